"""Transformer layers over whole rows in MindSpore's own operations, for the generator's graphs."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn, ops

from mindgrpo.models.decoder import Shard
from mindgrpo.models.parallel_cells import CopyTo, Linear, ReduceFrom


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
