"""The contract's attentions in MindSpore's own operations: packed rows, whole prompts, and one token against a cache.

N tokens, D head dim, R rows of T tokens. A mask is 0.0 where a token sees another and NEVER elsewhere; angles hold the
cosines of a token's rotary positions, then their sines (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.shapes import NEVER, Heads


class RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x: Any, weight: Any) -> Any:
        exact = x.astype(ms.float32)
        scale = ops.rsqrt((exact * exact).mean(-1, keep_dims=True) + self.eps)
        return (exact * scale * weight.astype(ms.float32)).astype(x.dtype)


class RopeAndMask(nn.Cell):
    """-> mask [R, 1, T, T]; angles [N, 1, 2 D]."""

    def __init__(self, rotary: np.ndarray) -> None:
        super().__init__()
        self.rotary = Tensor(rotary)
        # A constant, longer than any row: asking for it in the graph costs half a second of compiling.
        self.order = Tensor(np.arange(1 << 16, dtype=np.int32))

    def construct(self, positions: Any, spans: Any) -> Any:
        seen = self.seen(spans).astype(ms.float32)
        mask = ops.expand_dims((seen - 1.0) * -NEVER, 1)
        return mask, self.angles(positions)

    def seen(self, spans: Any) -> Any:
        """bool [R, T, T]: whether a token, the second dim, sees another, the third."""
        length = spans.shape[1]
        order = self.order[:length]
        column = order.reshape(1, 1, length)
        row = order.reshape(1, length, 1)
        prefix, count, start = spans[:, :, 0:1], spans[:, :, 1:2], spans[:, :, 2:3]
        shared = ops.logical_and(column >= prefix, column < prefix + count)
        own = ops.logical_and(column >= start, column <= row)
        return ops.logical_or(shared, own)

    def angles(self, positions: Any) -> Any:
        return ops.expand_dims(ops.gather(self.rotary, positions.reshape(-1), 0), 1)


class HeadAttention(nn.Cell):
    """What the three have in common: heads of a projection, and the mixing of values of whole rows."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.kv, self.dim, self.queries = heads.kv, heads.dim, heads.queries
        # Queries that share a head of keys.
        self.group = heads.queries // heads.kv
        self.has_bias, self.has_norm = heads.has_bias, heads.norm_eps is not None
        self.norm = RmsNorm(heads.norm_eps or 0.0)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.scale = heads.scale

    def heads_of(self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, angles: Any) -> Any:
        """-> queries [N, queries, D] and keys [N, kv, D], both with their positions, and values [N, kv, D]."""
        if self.has_bias:
            qkv = qkv + bias.astype(qkv.dtype)
        heads = qkv.reshape(-1, self.queries + 2 * self.kv, self.dim)
        both = heads[:, : self.queries + self.kv]
        if self.has_norm:
            queries, keys = both[:, : self.queries], both[:, self.queries :]
            both = ops.concat((self.norm(queries, q_norm), self.norm(keys, k_norm)), 1)
        both = self.apply_rope(both, angles)
        return both[:, : self.queries], both[:, self.queries :], heads[:, self.queries + self.kv :]

    def apply_rope(self, heads: Any, angles: Any) -> Any:
        half = self.dim // 2
        exact = heads.astype(ms.float32)
        other = ops.concat((-exact[:, :, half:], exact[:, :, :half]), 2)
        rotated = exact * angles[:, :, : self.dim] + other * angles[:, :, self.dim :]
        return rotated.astype(heads.dtype)

    def by_head(self, heads: Any, rows: int, length: int) -> Any:
        """[R T, kv, D] -> [R, kv, T, D]"""
        return heads.reshape(rows, length, self.kv, self.dim).transpose(0, 2, 1, 3)

    def mixed(self, queries: Any, keys: Any, values: Any, mask: Any, rows: int) -> Any:
        """`keys` and `values` [N, kv, D] -> mixed [N, queries D]"""
        length = mask.shape[3]
        keys, values = self.by_head(keys, rows, length), self.by_head(values, rows, length)
        queries = queries.reshape(rows, length, self.kv, self.group, self.dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(
            rows * self.kv, self.group * length, self.dim
        )
        keys = keys.reshape(rows * self.kv, length, self.dim)
        values = values.reshape(rows * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(rows, self.queries, length, length).astype(ms.float32) + mask
        weights = ops.softmax(scores, -1).reshape(rows * self.kv, self.group * length, length)
        mixed = self.mix(weights.astype(values.dtype), values).reshape(
            rows, self.kv, self.group, length, self.dim
        )
        return mixed.transpose(0, 3, 1, 2, 4).reshape(rows * length, -1)


class PlainPackedAttention(HeadAttention):
    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, mask: Any, angles: Any
    ) -> Any:
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        return self.mixed(queries, keys, values, mask, mask.shape[0])


class PlainPrefillAttention(HeadAttention):
    def __init__(self, heads: Heads, keys: Any, values: Any) -> None:
        super().__init__(heads)
        self.cached_keys, self.cached_values = keys, values

    def cache_rows_of(self, heads: Any, rows: int, length: int, source: Any) -> Any:
        """Of `heads` [N, kv, D] those of the prompts `source`, as rows of the cache, in its dtype."""
        copies = ops.gather(self.by_head(heads, rows, length), source, 0)
        return copies.reshape(-1, self.dim).astype(self.cached_keys.dtype)

    def construct(
        self,
        qkv: Any,
        bias: Any,
        q_norm: Any,
        k_norm: Any,
        mask: Any,
        angles: Any,
        source: Any,
        cache_rows: Any,
    ) -> Any:
        length = mask.shape[3]
        rows = qkv.shape[0] // length
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        copies = self.cache_rows_of(keys, rows, length, source)
        ops.scatter_update(self.cached_keys, cache_rows, copies)
        copies = self.cache_rows_of(values, rows, length, source)
        ops.scatter_update(self.cached_values, cache_rows, copies)
        return self.mixed(queries, keys, values, mask, rows)


class PlainCachedAttention(HeadAttention):
    def __init__(self, heads: Heads, keys: Any, values: Any) -> None:
        super().__init__(heads)
        self.cached_keys, self.cached_values = keys, values

    def construct(
        self,
        qkv: Any,
        bias: Any,
        q_norm: Any,
        k_norm: Any,
        mask: Any,
        angles: Any,
        cache_rows: Any,
    ) -> Any:
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        dtype = self.cached_keys.dtype
        keys = keys.reshape(-1, self.dim).astype(dtype)
        values = values.reshape(-1, self.dim).astype(dtype)
        keys = ops.scatter_update(self.cached_keys, cache_rows, keys)
        values = ops.scatter_update(self.cached_values, cache_rows, values)
        return self.mixed_with_cache(queries, keys, values, mask)

    def mixed_with_cache(self, queries: Any, keys: Any, values: Any, mask: Any) -> Any:
        """`queries` [B, queries, D] against the whole cache [B kv S, D] -> mixed [B, queries D]"""
        slots, length = mask.shape[0], mask.shape[2]
        keys = keys.reshape(slots * self.kv, length, self.dim)
        values = values.reshape(slots * self.kv, length, self.dim)
        queries = queries.reshape(slots * self.kv, self.group, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(slots, self.queries, length).astype(ms.float32) + mask
        weights = ops.softmax(scores, -1).reshape(slots * self.kv, self.group, length)
        return self.mix(weights.astype(values.dtype), values).reshape(slots, -1)
