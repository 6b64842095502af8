"""The decoder as graph code: one transformer layer and its ends, for whole packed rows.

`x_NH`: N = rows * row length tokens, H = hidden. `R` rows, `T` row length, `K` local KV heads, `G` query heads a KV
head, `D` head_dim. Refuses to hold weights of its own: a `Shard` hands out a rank's parameters.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend import Backend, Group
from mindgrpo.model.families import DecoderConfig
from mindgrpo.model.logprobs import VocabParallelLogProbs
from mindgrpo.model.parallel_cells import (
    CopyTo,
    Linear,
    ReduceFrom,
    VocabParallelEmbedding,
)
from mindgrpo.model.rotary import rotary_table
from mindgrpo.model.weights import Weights

NEVER = -1e30


class Shard:
    """A rank's parameters of one role, by stored key, with the sizes that cells need."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, backend: Backend, prefix: str
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
        self.first_token = self.local_vocab * self.model_index
        # Trained roles have gradients for exactly these, in this order.
        self.parameters = {
            entry.key: backend.parameter(weights.tensors[entry.key], f"{prefix}.{entry.key}")
            for entry in weights.stored
        }

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


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv:1910.07467)."""

    def __init__(self, weight: Any, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps) * self.weight


class Projections(nn.Cell):
    """x_NH -> rotated queries and keys [N, K*G + K, D] and values [N, K, D]."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        config = shard.config
        self.linear = Linear(
            shard[prefix + "self_attn.qkv_proj.weight"],
            shard.get(prefix + "self_attn.qkv_proj.bias"),
        )
        self.queries, self.kv, self.dim = shard.query_heads, shard.kv_heads, config.head_dim
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(shard[prefix + "self_attn.q_norm.weight"], config.rms_norm_eps)
            self.k_norm = RMSNorm(shard[prefix + "self_attn.k_norm.weight"], config.rms_norm_eps)

    def construct(self, x: Any, angles: Any) -> Any:
        heads = self.linear(x).reshape(-1, self.queries + 2 * self.kv, self.dim)
        turning = heads[:, : self.queries + self.kv]
        if self.qk_norm:
            turning = ops.concat(
                (self.q_norm(turning[:, : self.queries]), self.k_norm(turning[:, self.queries :])),
                1,
            )
        half = self.dim // 2
        turned = ops.concat((-turning[:, :, half:], turning[:, :, :half]), 2)
        cos, sin = angles[:, :, : self.dim], angles[:, :, self.dim :]
        return turning * cos + turned * sin, heads[:, self.queries + self.kv :]


class Attention(nn.Cell):
    """Causal attention inside the segments of packed rows; a split of heads over the group."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.copy = CopyTo(shard.group)
        self.project = Projections(shard, prefix)
        self.out = Linear(shard[prefix + "self_attn.o_proj.weight"])
        self.reduce = ReduceFrom(shard.group)
        self.kv, self.dim = shard.kv_heads, shard.config.head_dim
        self.share = shard.query_heads // shard.kv_heads
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.scale = self.dim**-0.5
        self.out_bias = shard.get(prefix + "self_attn.o_proj.bias")
        self.has_out_bias = self.out_bias is not None

    def construct(self, x: Any, angles: Any, mask: Any) -> Any:
        length = mask.shape[3]
        rows = x.shape[0] // length
        turned, values = self.project(self.copy(x), angles)
        queries = turned[:, : self.kv * self.share].reshape(
            rows, length, self.kv, self.share, self.dim
        )
        keys = turned[:, self.kv * self.share :].reshape(rows, length, self.kv, self.dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(
            rows * self.kv, self.share * length, self.dim
        )
        keys = keys.transpose(0, 2, 1, 3).reshape(rows * self.kv, length, self.dim)
        values = values.reshape(rows, length, self.kv, self.dim)
        values = values.transpose(0, 2, 1, 3).reshape(rows * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(rows, self.kv * self.share, length, length) + mask
        weights = ops.softmax(scores, -1).reshape(rows * self.kv, self.share * length, length)
        mixed = self.mix(weights, values).reshape(rows, self.kv, self.share, length, self.dim)
        mixed = mixed.transpose(0, 3, 1, 2, 4).reshape(rows * length, -1)
        y = self.reduce(self.out(mixed))
        if self.has_out_bias:
            y = y + self.out_bias
        return y


class GatedMlp(nn.Cell):
    """down(silu(gate(x)) * up(x)), the inner dim split over the group (arXiv:2002.05202)."""

    def __init__(self, shard: Shard, prefix: str) -> None:
        super().__init__()
        self.copy = CopyTo(shard.group)
        self.gate_up = Linear(shard[prefix + "mlp.gate_up_proj.weight"])
        self.down = Linear(shard[prefix + "mlp.down_proj.weight"])
        self.reduce = ReduceFrom(shard.group)
        self.inner = shard[prefix + "mlp.down_proj.weight"].shape[0]

    def construct(self, x: Any) -> Any:
        both = self.gate_up(self.copy(x))
        gate, up = both[:, : self.inner], both[:, self.inner :]
        return self.reduce(self.down(gate * ops.sigmoid(gate) * up))


class Layer(nn.Cell):
    def __init__(self, shard: Shard, index: int) -> None:
        super().__init__()
        prefix, eps = f"model.layers.{index}.", shard.config.rms_norm_eps
        self.norm_in = RMSNorm(shard[prefix + "input_layernorm.weight"], eps)
        self.attention = Attention(shard, prefix)
        self.norm_mlp = RMSNorm(shard[prefix + "post_attention_layernorm.weight"], eps)
        self.mlp = GatedMlp(shard, prefix)

    def construct(self, x: Any, angles: Any, mask: Any) -> Any:
        x = x + self.attention(self.norm_in(x), angles, mask)
        return x + self.mlp(self.norm_mlp(x))


class Stage(nn.Cell):
    """A stage's layers: (tokens int32 [R, T] or x_NH, positions [R, T], segments [R, T]) -> x_NH.

    `segments` numbers the samples of a packed row from 1; 0 is padding, which only sees itself.
    T is always `row_length`.
    """

    def __init__(self, shard: Shard, row_length: int, recompute: bool = False) -> None:
        super().__init__()
        self.is_first = shard.is_first
        if shard.is_first:
            table = shard["model.embed_tokens.weight"]
            self.embed = VocabParallelEmbedding(table, shard.first_token, shard.group)
        self.angles = Tensor(rotary_table(shard.config, row_length))
        # Constants: asking for them in the graph costs half a second of compiling each.
        order = np.arange(row_length, dtype=np.int32)
        self.row_order = Tensor(order.reshape(1, -1, 1))
        self.column_order = Tensor(order.reshape(1, 1, -1))
        self.layers = nn.CellList([Layer(shard, index) for index in shard.layers])
        if recompute:
            for layer in self.layers:
                layer.recompute()

    def construct(self, x: Any, positions: Any, segments: Any) -> Any:
        together = ops.equal(ops.expand_dims(segments, 2), ops.expand_dims(segments, 1))
        before = self.row_order >= self.column_order
        seen = ops.logical_and(together, before).astype(ms.float32)
        mask = ops.expand_dims((seen - 1.0) * -NEVER, 1)
        angles = ops.expand_dims(ops.gather(self.angles, positions.reshape(-1), 0), 1)
        if self.is_first:
            x = self.embed(x.reshape(-1))
        for layer in self.layers:
            x = layer(x, angles, mask)
        return x


class Head(nn.Cell):
    """Final norm and vocabulary-parallel logits, divided by the sampling temperature."""

    def __init__(self, shard: Shard, temperature: float) -> None:
        super().__init__()
        self.norm = RMSNorm(shard["model.norm.weight"], shard.config.rms_norm_eps)
        self.copy = CopyTo(shard.group)
        self.table = shard.head_table
        self.matmul = ops.MatMul(transpose_b=True)
        self.scale = 1.0 / temperature
        bias = shard.padding_bias()
        self.padded = bias is not None
        self.bias = Tensor(bias) if bias is not None else None

    def construct(self, x: Any) -> Any:
        logits = self.matmul(self.copy(self.norm(x)), self.table) * self.scale
        if self.padded:
            logits = logits + self.bias
        return logits


class LogProbStage(nn.Cell):
    """A last stage that ends in (log p [N], entropy [N]) of `labels` int32 [R, T]."""

    def __init__(self, stage: Stage, shard: Shard, temperature: float) -> None:
        super().__init__()
        self.stage = stage
        self.head = Head(shard, temperature)
        self.logprobs = VocabParallelLogProbs(shard.local_vocab, shard.first_token, shard.group)

    def construct(self, x: Any, positions: Any, segments: Any, labels: Any) -> Any:
        logits = self.head(self.stage(x, positions, segments))
        logp, entropy, _ = self.logprobs(logits, labels.reshape(-1))
        return logp, entropy
