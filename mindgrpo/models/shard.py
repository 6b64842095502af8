"""A rank's shard of a model: its parameters by stored key, and the sizes and options that its cells are built with.

Memory plans use the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from mindspore import nn

from mindgrpo.backend.contract import Backend, Group
from mindgrpo.backend.kernels.rollout import LocalExperts, LocalLatents
from mindgrpo.backend.kernels.shapes import NEVER, Heads, Routing, Vocabulary
from mindgrpo.models.decoder_config import LATENT_EPS, DecoderConfig, MoeConfig
from mindgrpo.models.lora import LoraSettings, LowRankLinear, OfEach, adapter_names
from mindgrpo.models.parallel_cells import (
    BiasedLinear,
    CopyTo,
    Entering,
    Float32Gradient,
    GatheredProduct,
    GatherTokens,
    Leave,
    Linear,
    ReduceFrom,
    Same,
    ScatterTokens,
    ToFloat32,
)
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import SCORE

# The largest [rows, vocabulary] tensor of the LM head; more rows are computed in chunks.
LOGITS_BYTES = 64 << 20
# For batch invariance, sums over ranks are split into this many parts, equally many per rank, added in a binary tree.
LEAVES = 8


def local_leaves(tp_size: int, *widths: int) -> int:
    """Returns a rank's number of leaves in sums over `widths`, or 1 if widths or ranks do not divide evenly."""
    divides = LEAVES % tp_size == 0 and not any(width % LEAVES for width in widths)
    return LEAVES // tp_size if divides else 1


def product_leaves(config: DecoderConfig, tp_size: int) -> int:
    """Returns a rank's number of leaves in row-parallel GEMMs: the output projections of attention and dense MLPs."""
    mixed = config.num_attention_heads * config.value_dim
    return local_leaves(tp_size, mixed, dense_inner(config))


def vocabulary_leaves(config: DecoderConfig, tp_size: int) -> int:
    """Returns the number of leaves of a rank's vocabulary shard."""
    return local_leaves(tp_size, config.vocab_size)


def local_vocabulary(config: DecoderConfig, tp_size: int) -> int:
    """Returns the width of a vocabulary shard, with the padding of the last rank."""
    return -(-config.vocab_size // tp_size)


def head_width(config: DecoderConfig, tp_size: int) -> int:
    """Returns the number of outputs of a rank's head at each position."""
    return local_vocabulary(config, tp_size) if config.head == "vocabulary" else 1


def dense_inner(config: DecoderConfig) -> int:
    """Returns the size of dense MLPs, 0 if all layers have experts."""
    return 0 if all(kind.has_experts for kind in config.layers) else config.intermediate_size


def local_inner(config: DecoderConfig, tp_size: int) -> int:
    """Returns the size of a rank's shard of dense MLPs, with the padding of the last rank."""
    return -(-dense_inner(config) // tp_size)


def routing(moe: MoeConfig) -> Routing:
    """Returns the routing settings in the form that kernels take."""
    return Routing(
        moe.num_experts,
        moe.per_token,
        moe.scores == "sigmoid",
        moe.renormalise,
        moe.scaling,
        moe.groups,
        moe.groups_taken,
        moe.has_bias,
    )


def local_experts(config: DecoderConfig, ep_size: int, index: int) -> LocalExperts | None:
    """Returns the experts of rank `index` of the ep axis; None for dense models."""
    if (moe := config.moe) is None:
        return None
    count = moe.num_experts // ep_size
    layers = tuple(i for i, kind in enumerate(config.layers) if kind.has_experts)
    shared = moe.shared_inner
    return LocalExperts(routing(moe), index * count, count, moe.inner, layers, shared_inner=shared)


def local_latents(config: DecoderConfig) -> LocalLatents | None:
    """Returns the dimensions of latent attention in the form that kernels take; None for other models."""
    if (latent := config.latent) is None:
        return None
    widths = latent.rank, latent.query_rank or 0, latent.nope_dim, latent.rope_dim, latent.value
    return LocalLatents(*widths, latent.is_interleaved, LATENT_EPS)


def local_heads(config: DecoderConfig, tp_size: int) -> Heads:
    """Returns a rank's heads in the form that attention kernels take.

    Norms over the whole projection, and its bias, are applied before the kernel.
    """
    return Heads(
        config.num_attention_heads // tp_size,
        max(1, config.num_key_value_heads // tp_size),
        config.head_dim,
        config.qkv_bias and config.family.qk_norm != "projection",
        config.rms_norm_eps if config.family.qk_norm == "head" else None,
        config.query_scale,
    )


def cached_heads(config: DecoderConfig, tp_size: int) -> Heads:
    """Returns heads in the layout of the plain decoder's KV cache.

    With latent attention, there is a single key head, which holds the latent and the rotary key.
    """
    heads = local_heads(config, tp_size)
    if (latent := config.latent) is None:
        return heads
    return replace(heads, kv=1, dim=latent.rank + latent.rope_dim)


@dataclass(frozen=True)
class Adapters:
    """A rank's low-rank adapters, in the layout of their base weights."""

    weights: Weights
    settings: LoraSettings


class Shard:
    """A rank's parameters of one role, by stored key, with the factories and sizes that cells need.

    `adapters` are applied to the matrices that have some. Unless the role `is_trained`, no gradients are computed, and
    all-reduces may use the faster variant whose last bits differ between ranks.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        backend: Backend,
        adapters: Adapters | None = None,
        is_trained: bool = True,
    ) -> None:
        layout, mesh = weights.layout, weights.layout.mesh
        self.is_trained = is_trained
        self.config = config
        self.weights = weights
        self.backend = backend
        self.group: Group = backend.group(mesh.group(weights.rank, ("tp",)))
        # The cp group, whose ranks share rows of tokens.
        self.context_group: Group = backend.group(mesh.group(weights.rank, ("cp",)))
        # Groups of ranks with different experts (ep), with other columns of the same experts (etp), and both.
        experts = {
            axes: mesh.group(weights.rank, axes) for axes in (("ep",), ("etp",), ("ep", "etp"))
        }
        self.expert_groups = {axes: backend.group(ranks) for axes, ranks in experts.items()}
        tp_size = mesh.tp
        self.token_shares = layout.token_shares
        self._chunks = layout.stage_layers[mesh.index(weights.rank, "pp")]
        # The layers of the first chunk; cells of other chunks are made with the copies in `chunks`.
        self.layers = self._chunks[0]
        self.query_heads = config.num_attention_heads // tp_size
        self.kv_heads = max(1, config.num_key_value_heads // tp_size)
        # The number of tp ranks that hold the same key-value heads.
        self.kv_copies = max(1, tp_size // config.num_key_value_heads)
        self.local_vocab = local_vocabulary(config, tp_size)
        self.kernels = backend.kernels
        self.first_token = self.local_vocab * mesh.index(weights.rank, "tp")
        # Gradients of trained roles have exactly these keys, in this order.
        self.parameters = weights.parameters
        self._adapters = adapters
        # Adapters, if any, are trained instead of the weights.
        self.trains_weights = adapters is None
        self.adapter_parameters: dict[str, Any] = {}
        if adapters is not None:
            self.adapter_parameters = adapters.weights.parameters
        self._shared_cells: dict[Any, nn.Cell] | None = None
        self._scope: tuple[object, ...] = ()
        # Whether hidden states are stored for the backward instead of being recomputed.
        self.are_kept = False

    @property
    def chunks(self) -> tuple[Shard, ...]:
        """Returns a copy of the shard for each chunk of its stage's layers."""
        shards = tuple(copy(self) for _ in self._chunks)
        for shard, layers in zip(shards, self._chunks, strict=True):
            shard.layers = layers
        return shards

    def restore_names(self) -> None:
        """Restores the names of parameters that cells have renamed."""
        self.weights.restore_names()
        if self._adapters is not None:
            self._adapters.weights.restore_names()

    def sharing_cells(self) -> Shard:
        """Returns a copy that shares equal cells without weights, so that a graph compiles each only once."""
        shard = copy(self)
        shard._shared_cells = {}
        return shard

    def within(self, scope: object) -> Shard:
        """Returns a copy that shares cells only within the same scope.

        Recomputation is a property of the cell object, so modules that may differ in it must not share cells.
        """
        shard = copy(self)
        shard._scope = (*self._scope, scope)
        return shard

    def keeping(self, are_kept: bool) -> Shard:
        """Returns a copy for cells whose hidden states are, or are not, stored for the backward."""
        shard = copy(self)
        shard.are_kept = are_kept and self.is_trained
        return shard

    def cell(self, make: Callable[..., nn.Cell], *arguments: Any) -> nn.Cell:
        """Returns make(*arguments), a cell without weights, possibly shared; the arguments must be hashable."""
        if self._shared_cells is None:
            return make(*arguments)
        key = (self._scope, make, *arguments)
        if key not in self._shared_cells:
            self._shared_cells[key] = make(*arguments)
        return self._shared_cells[key]

    def copy_to_group(self) -> nn.Cell:
        return self.cell(CopyTo, self.group, self.backend.sums_in_float32)

    def reduce_from_group(self) -> nn.Cell:
        return self.cell(ReduceFrom, self.group, self.is_trained, self.backend.sums_in_float32)

    def entering(self, product: nn.Cell) -> nn.Cell:
        """Returns `product`, a column-parallel GEMM, preceded by f or, with sequence parallelism, by an all-gather.

        If hidden states `are_kept` and `product` is a Linear, only this rank's tokens are stored for the backward.
        """
        if self.token_shares == 1:
            return Entering(self.copy_to_group(), product)
        in_float32 = self.backend.sums_in_float32
        if self.are_kept and isinstance(product, Linear):
            gradients = self.cell(self.kernels.matmul_back), self.cell(self.kernels.matmul_gradient)
            matmul = self.cell(GatheredProduct, product.matmul, *gradients, self.group, in_float32)
            return Linear(product.weight, matmul, product.exact)
        return Entering(self.cell(GatherTokens, self.group, in_float32), product)

    def leave_region(self) -> nn.Cell:
        """Returns the cell (y [N, H], after) that ends a tensor-parallel region: an all-reduce, or a reduce-scatter.

        With sequence parallelism, `after` is a tensor computed inside the region (see ScatterTokens).
        """
        if self.token_shares > 1:
            return Leave(self.cell(ScatterTokens, self.group, self.backend.sums_in_float32))
        return Leave(self.reduce_from_group())

    def all_tokens(self) -> nn.Cell:
        """Returns the cell that gathers the hidden states of all tokens, where all tp ranks compute the same with them.

        Without sequence parallelism it is the identity.
        """
        if self.token_shares > 1:
            return self.cell(GatherTokens, self.group, self.backend.sums_in_float32, True)
        return self.cell(Same)

    def gather_context(self) -> GatherTokens:
        """Returns the cell that all-gathers keys and values over the cp group, [n, w] -> [G n, w]."""
        return GatherTokens(self.context_group, self.backend.sums_in_float32)

    @property
    def leaves(self) -> int:
        """Returns the number of leaves of row-parallel GEMMs; 1 unless kernels are batch-invariant."""
        return self.tree_leaves(product_leaves)

    def tree_leaves(self, of: Callable[[DecoderConfig, int], int]) -> int:
        return of(self.config, self.group.size) if self.kernels.batch_invariant else 1

    def linear(self, key: str, over_ranks: bool = False) -> nn.Cell:
        """Returns the GEMM cell [N, in] -> [N, out] of matrix `key`, without bias, with its adapters.

        `over_ranks`: its result is summed over the tp group (row-parallel).
        """
        leaves = self.leaves if over_ranks else 1
        base = Linear(self[key], self.cell(self.kernels.matmul, False, leaves), self.exact())
        if adapter_names(key)[0] not in self.adapter_parameters:
            return base
        merging = self.cell(self.kernels.float32_matmul)
        return self._adapted(key, base, self.cell(self.kernels.matmul), merging)

    def linear_of_experts(self, key: str) -> nn.Cell:
        """Returns the grouped GEMM cell of the expert matrices `key`, with their adapters."""
        matmul = self.cell(self.kernels.expert_matmul)
        base = Linear(self[key], matmul, self.exact())
        if adapter_names(key)[0] not in self.adapter_parameters:
            return base
        merging = self.cell(OfEach, self.cell(self.kernels.expert_matmul, True))
        return self._adapted(key, base, matmul, merging)

    def _adapted(self, key: str, base: Linear, low_rank: Any, merging: Any) -> nn.Cell:
        assert self._adapters is not None
        adapted = {spec.name for e in self._adapters.weights.fused for spec in e.specs}
        (entry,) = [entry for entry in self.weights.fused if entry.key == key]
        flags = [adapter_names(spec.name)[0] in adapted for spec in entry.specs]
        a, b = (self.adapter_parameters[name] for name in adapter_names(key))
        merging = merging if self.kernels.batch_invariant else None
        settings = self._adapters.settings
        return LowRankLinear(base, a, b, entry.widths, flags, settings, low_rank, merging)

    def biased_linear(self, key: str, bias: str) -> nn.Cell:
        """Returns the GEMM cell [N, in] -> [N, out] of matrix `key` plus vector `bias`, for a frozen model."""
        return BiasedLinear(self[bias], self[key], self.cell(self.kernels.add_matmul))

    def exact(self) -> nn.Cell:
        """Returns the cell that matrices pass through before GEMMs, so that their gradients are float32."""
        has_gradient = self.is_trained and self.weights.dtype != "float32"
        return self.cell(Float32Gradient if has_gradient else Same)

    @property
    def widens_head(self) -> bool:
        """Returns whether the LM head's inputs and table have to be cast to float32."""
        kernels = self.kernels
        return kernels.fp32_lm_head and kernels.widens_head and self.weights.dtype != "float32"

    def exact_head(self) -> nn.Cell:
        """Returns the cell that the LM head's table passes through before its GEMM, like `exact` for other matrices."""
        return self.cell(ToFloat32) if self.widens_head else self.exact()

    def vector(self) -> nn.Cell:
        """Returns the cell that weight vectors pass through, which casts them, and keeps their gradients, in float32.

        It is the identity if the weights are float32, or if nothing is trained and kernels accept narrow vectors.
        """
        as_they_are = self.kernels.takes_narrow_vectors and not self.is_trained
        return self.cell(Same if as_they_are or self.weights.dtype == "float32" else ToFloat32)

    def embedding(self) -> nn.Cell:
        """Returns the cell (tokens int32 [N], table [V, H]) -> rows [N, H], zeros for tokens of other shards."""
        kernels, exact = self.kernels, self.weights.dtype != "float32"
        return (kernels.exact_embedding if exact else kernels.embedding)(self.first_token)

    def experts(self) -> LocalExperts | None:
        mesh, group = self.weights.layout.mesh, self.expert_groups["ep",]
        own = local_experts(self.config, mesh.ep, mesh.index(self.weights.rank, "ep"))
        return own and replace(own, group=group.kernel_id)

    def __getitem__(self, key: str) -> Any:
        return self.parameters[key]

    def get(self, key: str) -> Any:
        return self.parameters.get(key)

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.config.num_hidden_layers

    @property
    def head_key(self) -> str:
        if self.config.head == "scalar":
            return SCORE
        tied = self.config.has_table_in_head
        return "model.embed_tokens.weight" if tied else "lm_head.weight"

    @property
    def head_table(self) -> Any:
        return self[self.head_key]

    def padding_bias(self) -> np.ndarray | None:
        """Returns the bias float32 [1, V] that masks padding columns out of a softmax; None without padding."""
        ids = np.arange(self.first_token, self.first_token + self.local_vocab)
        if ids[-1] < self.config.vocab_size:
            return None
        return np.where(ids < self.config.vocab_size, 0.0, NEVER).astype(np.float32)[None]

    def heads(self) -> Heads:
        return local_heads(self.config, self.weights.layout.mesh.tp)

    def attended_heads(self) -> Heads:
        """Returns heads as the attention cell sees them: if nothing is trained, the qkv GEMM adds the bias instead."""
        heads = self.heads()
        return heads if self.is_trained else replace(heads, has_bias=False)

    def cached_heads(self) -> Heads:
        """Returns heads in the layout of the plain decoder's KV cache, as its attention cell sees them."""
        if self.config.latent is None:
            return self.attended_heads()
        return cached_heads(self.config, self.weights.layout.mesh.tp)

    def vocabulary(self, temperature: float = 1.0) -> Vocabulary:
        real = min(self.local_vocab, max(0, self.config.vocab_size - self.first_token))
        leaves = self.tree_leaves(vocabulary_leaves)
        return Vocabulary(self.first_token, self.local_vocab, real, 1.0 / temperature, leaves)
