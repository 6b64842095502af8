"""The decoder as graph code: one transformer layer and its ends, for whole packed rows.

`x_NH`: N = R rows * T tokens, H = hidden; M picked positions; V local vocabulary. What is no matrix product comes
from the backend's kernels. Refuses to hold weights of its own: a `Shard` hands out a rank's parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from mindgrpo.backend.contract import Backend, Group
from mindgrpo.backend.kernels.contract import Heads, Vocabulary
from mindgrpo.models.families import DecoderConfig
from mindgrpo.models.log_probs import TokenLogProbs
from mindgrpo.models.lora import LowRankLinear, fused_parts
from mindgrpo.models.lora_specs import LoraSettings, adapter_names
from mindgrpo.models.parallel_cells import CopyTo, Linear, ReduceFrom
from mindgrpo.models.rotary import rotary_table
from mindgrpo.weights.local_weights import Weights

NEVER = -1e30


@dataclass(frozen=True)
class Adapters:
    """A rank's low-rank adapters, in the layout of the weights that they are for."""

    weights: Weights
    settings: LoraSettings


@dataclass(frozen=True)
class Recompute:
    """`parts` ("attention", "mlp") of each `every`-th layer are computed again in the backward pass, not kept."""

    parts: frozenset[str] = frozenset()
    every: int = 1

    def apply(self, layer: Any, index: int) -> None:
        """`index` counts layers from 0 over the whole model."""
        if index % self.every:
            return
        if self.parts == {"attention", "mlp"}:
            layer.recompute()
            return
        for part in sorted(self.parts):
            getattr(layer, part).recompute()


KEEP_ALL = Recompute()
WHOLE_LAYERS = Recompute(frozenset(("attention", "mlp")))


class Shard:
    """A rank's parameters of one role, by stored key, with the sizes that cells need.

    With `adapters`, matrices that have some are used together with them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        backend: Backend,
        prefix: str,
        adapters: Adapters | None = None,
    ) -> None:
        layout = weights.layout
        self.config = config
        self.weights = weights
        self.backend = backend
        self.group: Group = backend.group(layout.grid.model_group(weights.rank))
        ways = layout.grid.model_parallel
        self.model_index = layout.grid.coordinates(weights.rank).model
        self.layers = layout.stage_layers[layout.grid.coordinates(weights.rank).stage]
        self.query_heads = config.num_attention_heads // ways
        self.kv_heads = max(1, config.num_key_value_heads // ways)
        self.local_vocab = -(-config.vocab_size // ways)
        self.kernels = backend.kernels
        self.first_token = self.local_vocab * self.model_index
        # Trained roles have gradients for exactly these, in this order.
        self.parameters = {
            entry.key: backend.parameter(weights.tensors[entry.key], f"{prefix}.{entry.key}")
            for entry in weights.stored
        }

        self._adapters = adapters
        self.adapter_parameters: dict[str, Any] = {}
        if adapters is not None:
            self.adapter_parameters = {
                entry.key: backend.parameter(
                    adapters.weights.tensors[entry.key], f"{prefix}.{entry.key}"
                )
                for entry in adapters.weights.stored
            }

    def linear(self, key: str) -> nn.Cell:
        """The product with matrix `key` (without bias)."""
        base = Linear(self[key])
        a_key, b_key = adapter_names(key)
        if self._adapters is None or a_key not in self.adapter_parameters:
            return base
        adapted = {spec.name for e in self._adapters.weights.stored for spec in e.parts}
        flags = [adapter_names(part)[0] in adapted for part in fused_parts(key)]
        (entry,) = [entry for entry in self.weights.stored if entry.key == key]
        parameters = self.adapter_parameters[a_key], self.adapter_parameters[b_key]
        return LowRankLinear(base, *parameters, entry.widths, flags, self._adapters.settings)

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
    def head_table(self) -> Any:
        tied = self.config.tie_word_embeddings
        return self["model.embed_tokens.weight" if tied else "lm_head.weight"]

    def padding_bias(self) -> np.ndarray | None:
        """float32 [1, local vocabulary] that keeps padded columns out of a softmax; None where there are none."""
        ids = np.arange(self.first_token, self.first_token + self.local_vocab)
        if ids[-1] < self.config.vocab_size:
            return None
        return np.where(ids < self.config.vocab_size, 0.0, NEVER).astype(np.float32)[None]

    def heads(self, prefix: str) -> Heads:
        config = self.config
        return Heads(
            self.query_heads,
            self.kv_heads,
            config.head_dim,
            self.get(prefix + "self_attn.qkv_proj.bias") is not None,
            config.rms_norm_eps if config.qk_norm else None,
        )

    def vocabulary(self, temperature: float = 1.0) -> Vocabulary:
        real = min(self.local_vocab, max(0, self.config.vocab_size - self.first_token))
        return Vocabulary(self.first_token, self.local_vocab, real, 1.0 / temperature)


class Attention(nn.Cell):
    """Normed x_NH -> what attention adds to the residual, a split of heads over the group."""

    def __init__(self, shard: Shard, prefix: str, rotary: np.ndarray) -> None:
        super().__init__()
        name = prefix + "self_attn."
        heads = shard.heads(prefix)
        nothing = Tensor([0.0], ms.float32)
        self.copy = CopyTo(shard.group)
        self.qkv = shard.linear(name + "qkv_proj.weight")
        self.bias = shard[name + "qkv_proj.bias"] if heads.has_bias else nothing
        normed = heads.norm_eps is not None
        self.q_norm = shard[name + "q_norm.weight"] if normed else nothing
        self.k_norm = shard[name + "k_norm.weight"] if normed else nothing
        self.attend = shard.kernels.attention(heads, rotary)
        self.out = shard.linear(name + "o_proj.weight")
        self.reduce = ReduceFrom(shard.group)
        self.out_bias = shard.get(name + "o_proj.bias")
        self.has_out_bias = self.out_bias is not None

    def construct(self, x: Any, place: Any, other_place: Any) -> Any:
        qkv = self.qkv(self.copy(x))
        mixed = self.attend(qkv, self.bias, self.q_norm, self.k_norm, place, other_place)
        y = self.reduce(self.out(mixed))
        if self.has_out_bias:
            y = y + self.out_bias
        return y


class GatedMlp(nn.Cell):
    """down(silu(gate(x)) * up(x)), the inner dim split over the group (arXiv:2002.05202)."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.copy = CopyTo(shard.group)
        self.gate_up = shard.linear(prefix + "mlp.gate_up_proj.weight")
        self.gated = shard.kernels.gated()
        self.down = shard.linear(prefix + "mlp.down_proj.weight")
        self.reduce = ReduceFrom(shard.group)

    def construct(self, x: Any) -> Any:
        return self.reduce(self.down(self.gated(self.gate_up(self.copy(x)))))


class Layer(nn.Cell):
    """(x, what the layer before adds to it) -> the same pair: each sum is made where its norm needs it.

    A stage's first layer has nothing to add and ignores `added`.
    """

    def __init__(self, shard: Shard, index: int, rotary: np.ndarray) -> None:
        super().__init__()
        prefix, eps = f"model.layers.{index}.", shard.config.rms_norm_eps
        self.is_entry = index == shard.layers.start
        self.weight_in = shard[prefix + "input_layernorm.weight"]
        self.weight_mlp = shard[prefix + "post_attention_layernorm.weight"]
        self.first_norm = shard.kernels.rms_norm(eps)
        self.norm = shard.kernels.add_rms_norm(eps)
        self.attention = Attention(shard, prefix, rotary)
        self.mlp = GatedMlp(shard, prefix)

    def construct(self, x: Any, added: Any, place: Any, other_place: Any) -> Any:
        if self.is_entry:
            normed = self.first_norm(x, self.weight_in)
        else:
            x, normed = self.norm(x, added, self.weight_in)
        x, normed = self.norm(x, self.attention(normed, place, other_place), self.weight_mlp)
        return x, self.mlp(normed)


class Stage(nn.Cell):
    """A stage's layers: (tokens int32 [R, T] or x_NH, positions int32 [R, T], spans int32 [R, T, 3]) -> x_NH.

    Spans as in backend/kernels.py; positions stay below `num_positions`.
    """

    def __init__(self, shard: Shard, num_positions: int, recompute: Recompute = KEEP_ALL) -> None:
        super().__init__()
        self.is_first = shard.is_first
        kernels = shard.kernels
        if shard.is_first:
            self.table = shard["model.embed_tokens.weight"]
            self.embed = kernels.embedding(shard.first_token)
            self.reduce = ReduceFrom(shard.group)
        rotary = rotary_table(shard.config, num_positions)
        heads = shard.heads(f"model.layers.{shard.layers.start}.")
        self.places = kernels.places(heads, rotary)
        self.layers = nn.CellList([Layer(shard, index, rotary) for index in shard.layers])
        for index, layer in zip(shard.layers, self.layers, strict=True):
            recompute.apply(layer, index)

    def construct(self, x: Any, positions: Any, spans: Any) -> Any:
        place, other_place = self.places(positions, spans)
        if self.is_first:
            x = self.reduce(self.embed(x.reshape(-1), self.table))
        added = x
        for layer in self.layers:
            x, added = layer(x, added, place, other_place)
        return x + added


class LogProbStage(nn.Cell):
    """A last stage that ends in (log p [M], entropy [M]) of `labels` int32 [M] at `picks` int32 [M] of its N places.

    A pick of -1 is padding: it takes a row of zeros.
    """

    def __init__(self, stage: Stage, shard: Shard, temperature: float, chunk_bytes: int) -> None:
        super().__init__()
        self.stage = stage
        self.pick = shard.kernels.embedding(0)
        self.norm = shard.kernels.rms_norm(shard.config.rms_norm_eps)
        self.weight = shard["model.norm.weight"]
        self.copy = CopyTo(shard.group)
        self.table = shard.head_table
        self.logprobs = TokenLogProbs(
            shard.kernels, shard.vocabulary(temperature), shard.group, chunk_bytes
        )

    def construct(self, x: Any, positions: Any, spans: Any, picks: Any, labels: Any) -> Any:
        picked = self.pick(picks, self.stage(x, positions, spans))
        normed = self.copy(self.norm(picked, self.weight))
        return self.logprobs(normed, self.table, labels)
