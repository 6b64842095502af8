"""Attention of a layer: projections and norms around any attention kernel (packed rows, prefill or decode).

Dimensions as in decoder.py; W = (queries + 2 kv) D is the width of a rank's fused qkv projection.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize, SumExt

from mindgrpo.models.shard import Shard


class Attention(nn.Cell):
    """(normed x_NH, context) -> attention output x_NH, to be added to the residual; heads are split over the tp group.

    `attend` is an attention cell of the kernels (backend/kernels/contract.py), and `context` its inputs after the norm
    weights.
    """

    def __init__(self, shard: Shard, prefix: str, attend: nn.Cell) -> None:
        super().__init__()
        name, heads = prefix + "self_attn.", shard.attended_heads()
        nothing = Tensor([0.0], ms.float32)
        weight, bias = name + "qkv_proj.weight", name + "qkv_proj.bias"
        adds_bias = shard.heads().has_bias and not heads.has_bias
        product = shard.biased_linear(weight, bias) if adds_bias else shard.linear(weight)
        self.qkv = shard.entering(product)
        self.bias = shard[bias] if heads.has_bias else nothing
        self.vector = shard.vector()
        self.has_head_norms = heads.norm_eps is not None
        self.norm_offset = shard.config.family.norm_offset
        self.q_norm = shard[name + "q_norm.weight"] if self.has_head_norms else nothing
        self.k_norm = shard[name + "k_norm.weight"] if self.has_head_norms else nothing
        self.has_projection_norm = shard.config.family.qk_norm == "projection"
        if self.has_projection_norm:
            self.projection_norm = ProjectionNorm(shard, name)
        self.attend = attend
        self.out = shard.linear(name + "o_proj.weight", over_ranks=True)
        self.leave = shard.leave_region()
        self.out_bias = shard.get(name + "o_proj.bias")
        self.has_out_bias = self.out_bias is not None

    def construct(self, x: Any, context: Any) -> Any:
        qkv = self.qkv(x)
        if self.has_projection_norm:
            qkv = self.projection_norm(qkv)
        q_norm, k_norm = self.vector(self.q_norm), self.vector(self.k_norm)
        if self.has_head_norms and self.norm_offset != 0.0:
            q_norm = ops.cast(q_norm, ms.float32) + self.norm_offset
            k_norm = ops.cast(k_norm, ms.float32) + self.norm_offset
        mixed = self.attend(qkv, self.vector(self.bias), q_norm, k_norm, *context)
        y = self.leave(self.out(mixed), qkv)
        if self.has_out_bias:
            y = y + ops.cast(self.vector(self.out_bias), y.dtype)
        return y


class ProjectionNorm(nn.Cell):
    """qkv [N, W] -> [N, W]: adds the bias, if any, and applies RMS norms over all queries and all keys of a token.

    Heads are split over the tp group, so the mean squares take an all-reduce of float32 [N, 2], forward and backward.
    """

    def __init__(self, shard: Shard, name: str) -> None:
        super().__init__()
        config = shard.config
        self.queries = shard.query_heads * config.head_dim
        self.keys = self.queries + shard.kv_heads * config.head_dim
        self.q_norm, self.k_norm = shard[name + "q_norm.weight"], shard[name + "k_norm.weight"]
        self.offset, self.eps = config.family.norm_offset, config.rms_norm_eps
        # Keys that are replicated on several ranks occur in the sum several times.
        widths = (config.num_attention_heads, config.num_key_value_heads * shard.kv_copies)
        self.mean = Tensor([[1.0 / (heads * config.head_dim) for heads in widths]], ms.float32)
        self.bias = shard.get(name + "qkv_proj.bias")
        self.has_bias = self.bias is not None
        self.vector = shard.vector()
        self.reduce, self.copy = shard.reduce_from_group(), shard.copy_to_group()
        self.widths = self.queries, self.keys - self.queries, self.keys - self.queries
        self.split, self.halves = SplitWithSize(), ops.Split(1, 2)
        self.sum, self.concat = SumExt(), ops.Concat(1)

    def construct(self, qkv: Any) -> Any:
        dtype, qkv = qkv.dtype, ops.cast(qkv, ms.float32)
        if self.has_bias:
            qkv = qkv + self.vector(self.bias)
        queries, keys, values = self.split(qkv, self.widths, 1)
        squares = self.concat((self.squares(queries), self.squares(keys)))
        # All ranks use the sum, so its gradient is summed over them too.
        total = self.copy(self.reduce(squares))
        of_queries, of_keys = self.halves(ops.rsqrt(total * self.mean + self.eps))
        queries = (
            queries * of_queries * (ops.cast(self.vector(self.q_norm), ms.float32) + self.offset)
        )
        keys = keys * of_keys * (ops.cast(self.vector(self.k_norm), ms.float32) + self.offset)
        return ops.cast(self.concat((queries, keys, values)), dtype)

    def squares(self, x: Any) -> Any:
        return self.sum(x * x, (1,), True, None)
