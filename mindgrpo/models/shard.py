"""Holds a rank's share of a model: its parameters by stored key, and the sizes and options that cells are made with.

Plans count the same sizes.
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

# The largest [rows, vocabulary] tensor of a head; longer ones go in chunks.
LOGITS_BYTES = 64 << 20
# Sums over ranks are sums of so many parts in a binary tree, as many of them on each rank.
LEAVES = 8


def local_leaves(tp_size: int, *widths: int) -> int:
    """Returns a rank's leaves of sums over `widths`; 1 where these, or the ranks, do not divide into LEAVES."""
    divides = LEAVES % tp_size == 0 and not any(width % LEAVES for width in widths)
    return LEAVES // tp_size if divides else 1


def product_leaves(config: DecoderConfig, tp_size: int) -> int:
    """Returns the leaves of a rank's products whose sums go over ranks: attention's and a dense feed-forward's last."""
    mixed = config.num_attention_heads * config.value_dim
    return local_leaves(tp_size, mixed, dense_inner(config))


def vocabulary_leaves(config: DecoderConfig, tp_size: int) -> int:
    """Returns the leaves of a rank's vocabulary."""
    return local_leaves(tp_size, config.vocab_size)


def local_vocabulary(config: DecoderConfig, tp_size: int) -> int:
    """Returns the width of a rank's vocabulary, with the padding of the last rank."""
    return -(-config.vocab_size // tp_size)


def dense_inner(config: DecoderConfig) -> int:
    """Returns the width of feed-forwards without experts; 0 where all layers have experts."""
    return 0 if all(kind.has_experts for kind in config.layers) else config.intermediate_size


def local_inner(config: DecoderConfig, tp_size: int) -> int:
    """Returns a rank's width of feed-forwards without experts, with the padding of the last rank."""
    return -(-dense_inner(config) // tp_size)


def routing(moe: MoeConfig) -> Routing:
    """Returns the choice and the scores of experts as kernels take them."""
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
    """Returns rank `index`'s share of the experts of all layers; None in models without."""
    if (moe := config.moe) is None:
        return None
    count = moe.num_experts // ep_size
    layers = tuple(i for i, kind in enumerate(config.layers) if kind.has_experts)
    shared = moe.shared_inner
    return LocalExperts(routing(moe), index * count, count, moe.inner, layers, shared_inner=shared)


def local_latents(config: DecoderConfig) -> LocalLatents | None:
    """Returns the latents that the generator caches; None in models without."""
    if (latent := config.latent) is None:
        return None
    widths = latent.rank, latent.query_rank or 0, latent.nope_dim, latent.rope_dim, latent.value
    return LocalLatents(*widths, latent.is_interleaved, LATENT_EPS)


def local_heads(config: DecoderConfig, tp_size: int) -> Heads:
    """Returns heads as attention's kernels take them: a norm over the projection, and its bias, are not theirs."""
    return Heads(
        config.num_attention_heads // tp_size,
        max(1, config.num_key_value_heads // tp_size),
        config.head_dim,
        config.qkv_bias and config.family.qk_norm != "projection",
        config.rms_norm_eps if config.family.qk_norm == "head" else None,
        config.query_scale,
    )


def cached_heads(config: DecoderConfig, tp_size: int) -> Heads:
    """Returns heads as the plain decoder caches them: of latents, one of keys that are the latent and its rope key."""
    heads = local_heads(config, tp_size)
    if (latent := config.latent) is None:
        return heads
    return replace(heads, kv=1, dim=latent.rank + latent.rope_dim)


@dataclass(frozen=True)
class Adapters:
    """A rank's low-rank adapters, in the layout of the weights that they are for."""

    weights: Weights
    settings: LoraSettings


class Shard:
    """A rank's parameters of one role, by stored key, with the sizes that cells need.

    With `adapters`, matrices that have some are used together with them. Of a role that is not trained (`is_trained`),
    no gradient is computed: sums over ranks may take the quicker way.
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
        # Ranks that share rows of tokens.
        self.context_group: Group = backend.group(mesh.group(weights.rank, ("cp",)))
        # Ranks with other experts, with other parts of the same ones, and both.
        experts = {
            axes: mesh.group(weights.rank, axes) for axes in (("ep",), ("etp",), ("ep", "etp"))
        }
        self.expert_groups = {axes: backend.group(ranks) for axes, ranks in experts.items()}
        tp_size = mesh.tp
        self.token_shares = layout.token_shares
        self._chunks = layout.stage_layers[mesh.index(weights.rank, "pp")]
        # Of the first chunk; cells of others are made with `chunks`.
        self.layers = self._chunks[0]
        self.query_heads = config.num_attention_heads // tp_size
        self.kv_heads = max(1, config.num_key_value_heads // tp_size)
        # Ranks of the group that hold the same heads of keys and values.
        self.kv_copies = max(1, tp_size // config.num_key_value_heads)
        self.local_vocab = local_vocabulary(config, tp_size)
        self.kernels = backend.kernels
        self.first_token = self.local_vocab * mesh.index(weights.rank, "tp")
        # Trained roles have gradients for exactly these, in this order.
        self.parameters = weights.parameters
        self._adapters = adapters
        # Adapters are trained in their place.
        self.trains_weights = adapters is None
        self.adapter_parameters: dict[str, Any] = {}
        if adapters is not None:
            self.adapter_parameters = adapters.weights.parameters
        self._shared_cells: dict[Any, nn.Cell] | None = None
        self._scope: tuple[object, ...] = ()
        # Whether a gradient finds hidden states of before, which are not computed again for it.
        self.are_kept = False

    @property
    def chunks(self) -> tuple[Shard, ...]:
        """Returns a copy for each chunk of its stage's layers."""
        shards = tuple(copy(self) for _ in self._chunks)
        for shard, layers in zip(shards, self._chunks, strict=True):
            shard.layers = layers
        return shards

    def restore_names(self) -> None:
        """Gives parameters their names again that cells have changed."""
        self.weights.restore_names()
        if self._adapters is not None:
            self._adapters.weights.restore_names()

    def sharing_cells(self) -> Shard:
        """Returns a copy whose equal cells without weights are one object, so that a graph compiles it once."""
        shard = copy(self)
        shard._shared_cells = {}
        return shard

    def within(self, scope: object) -> Shard:
        """Returns a copy whose cells are shared with those of the same scope alone.

        Whether it is computed again is a cell's own property, so what may differ in that must not share.
        """
        shard = copy(self)
        shard._scope = (*self._scope, scope)
        return shard

    def keeping(self, are_kept: bool) -> Shard:
        """Returns a copy for cells whose hidden states are kept for the gradient, or are not."""
        shard = copy(self)
        shard.are_kept = are_kept and self.is_trained
        return shard

    def cell(self, make: Callable[..., nn.Cell], *arguments: Any) -> nn.Cell:
        """Returns make(*arguments), a cell without weights; the arguments are hashable."""
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
        """Returns `product` of hidden states, the first of those that are split over the group.

        Where tokens are shared out and hidden states `are_kept`, the own ones are, if `product` is one of a matrix.
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
        """Returns what the results of such products pass through, with something that is computed on the way."""
        if self.token_shares > 1:
            return Leave(self.cell(ScatterTokens, self.group, self.backend.sums_in_float32))
        return Leave(self.reduce_from_group())

    def all_tokens(self) -> nn.Cell:
        """Returns what hidden states pass through before every rank of the group computes the same with all of them."""
        if self.token_shares > 1:
            return self.cell(GatherTokens, self.group, self.backend.sums_in_float32, True)
        return self.cell(Same)

    def gather_context(self) -> GatherTokens:
        """Returns what gathers keys and values of the ranks that share rows."""
        return GatherTokens(self.context_group, self.backend.sums_in_float32)

    @property
    def leaves(self) -> int:
        """The leaves of products whose sums go over ranks."""
        return self.tree_leaves(product_leaves)

    def tree_leaves(self, of: Callable[[DecoderConfig, int], int]) -> int:
        return of(self.config, self.group.size) if self.kernels.batch_invariant else 1

    def linear(self, key: str, over_ranks: bool = False) -> nn.Cell:
        """Returns the product with matrix `key` (without bias); `over_ranks`: one whose sums go over ranks."""
        leaves = self.leaves if over_ranks else 1
        base = Linear(self[key], self.cell(self.kernels.matmul, False, leaves), self.exact())
        if adapter_names(key)[0] not in self.adapter_parameters:
            return base
        merging = self.cell(self.kernels.float32_matmul)
        return self._adapted(key, base, self.cell(self.kernels.matmul), merging)

    def linear_of_experts(self, key: str) -> nn.Cell:
        """Returns the product by expert with the matrices `key`."""
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
        """Returns the product with matrix `key` plus vector `bias`, of a model that is not trained."""
        return BiasedLinear(self[bias], self[key], self.cell(self.kernels.add_matmul))

    def exact(self) -> nn.Cell:
        """Returns what matrices pass through before products, so that their gradients are float32."""
        has_gradient = self.is_trained and self.weights.dtype != "float32"
        return self.cell(Float32Gradient if has_gradient else Same)

    @property
    def widens_head(self) -> bool:
        """Returns whether what the head multiplies has to be made float32 first."""
        kernels = self.kernels
        return kernels.fp32_lm_head and kernels.widens_head and self.weights.dtype != "float32"

    def exact_head(self) -> nn.Cell:
        """Returns what the head's table passes through before its product, as `exact` of other matrices."""
        return self.cell(ToFloat32) if self.widens_head else self.exact()

    def vector(self) -> nn.Cell:
        """Returns what vectors of weights pass through: they are used, and have gradients, in float32.

        Where nothing is trained and kernels take them, they are used as they are.
        """
        as_they_are = self.kernels.takes_narrow_vectors and not self.is_trained
        return self.cell(Same if as_they_are or self.weights.dtype == "float32" else ToFloat32)

    def embedding(self) -> nn.Cell:
        """Returns the cell (tokens int32 [N], table) -> rows [N, H] of this shard's part of the table."""
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
        tied = self.config.tie_word_embeddings
        return "model.embed_tokens.weight" if tied else "lm_head.weight"

    @property
    def head_table(self) -> Any:
        return self[self.head_key]

    def padding_bias(self) -> np.ndarray | None:
        """Returns float32 [1, local vocabulary] that keeps padding out of a softmax; None where there is none."""
        ids = np.arange(self.first_token, self.first_token + self.local_vocab)
        if ids[-1] < self.config.vocab_size:
            return None
        return np.where(ids < self.config.vocab_size, 0.0, NEVER).astype(np.float32)[None]

    def heads(self) -> Heads:
        return local_heads(self.config, self.weights.layout.mesh.tp)

    def attended_heads(self) -> Heads:
        """Returns heads as attention gets them: of a model that is not trained, the product adds the bias."""
        heads = self.heads()
        return heads if self.is_trained else replace(heads, has_bias=False)

    def cached_heads(self) -> Heads:
        """Returns heads as the plain decoder caches them, and its attention gets them, as attended_heads are."""
        if self.config.latent is None:
            return self.attended_heads()
        return cached_heads(self.config, self.weights.layout.mesh.tp)

    def vocabulary(self, temperature: float = 1.0) -> Vocabulary:
        real = min(self.local_vocab, max(0, self.config.vocab_size - self.first_token))
        leaves = self.tree_leaves(vocabulary_leaves)
        return Vocabulary(self.first_token, self.local_vocab, real, 1.0 / temperature, leaves)
