"""The reference attention kernels in plain MindSpore operations, with masks made from spans and rotary embeddings.

Dimensions: N tokens in R rows of T; a context-parallel rank has n of them, L per row; D head dim; others as in
contract.Kernels. Masks are 0.0 if a token attends to another, else NEVER. Angles hold the cosines of a token's rotary
embedding, then its sines (arXiv:2104.09864).
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from mindgrpo.backend.kernels.mindspore_ops import RmsNorm
from mindgrpo.backend.kernels.shapes import NEVER, Heads


class SeenTokens(nn.Cell):
    """Base class of cells that make masks from spans, and angles from positions; `rotary` float32 [positions, 2 D].

    Without `rotary`, angles float32 [R, T, 2 D] take the place of positions.
    """

    def __init__(self, rotary: np.ndarray | None) -> None:
        super().__init__()
        self.has_table = rotary is not None
        if rotary is not None:
            self.rotary = Tensor(rotary)
        # A constant that is longer than any row; a range in the graph would take half a second to compile.
        self.order = Tensor(np.arange(1 << 16, dtype=np.int32))
        self.slice = ops.StridedSlice()

    def seen(self, spans: Any, row: Any, column: Any) -> Any:
        """Returns bool [R, L, T]: whether the tokens in columns `row`, with spans [R, L, 3], attend to `column`.

        `row` int32 [R or 1, L, 1] and `column` int32 [R or 1, 1, T] are column numbers.
        """
        prefix, count, start = [self.column(spans, i) for i in range(3)]
        shared = ops.logical_and(column >= prefix, column < prefix + count)
        own = ops.logical_and(column >= start, column <= row)
        return ops.logical_or(shared, own)

    def column(self, spans: Any, index: int) -> Any:
        """Returns number `index` of each of the spans [R, L, 3], as [R, L, 1]."""
        # Not with Split, which NPUs run on their AI CPU for int32.
        rows, length, _ = spans.shape
        return self.slice(spans, (0, 0, index), (rows, length, index + 1), (1, 1, 1))

    def first(self, count: int) -> Any:
        """Returns the numbers below `count`, int32 [count]."""
        return self.slice(self.order, (0,), (count,), (1,))

    def mask(self, seen: Any) -> Any:
        return ops.expand_dims((ops.cast(seen, ms.float32) - 1.0) * -NEVER, 1)

    def angles(self, positions: Any) -> Any:
        """Returns the angles float32 [N, 1, 2 D] of positions [...], or of angles [..., 2 D] without a table."""
        if self.has_table:
            return ops.expand_dims(ops.gather(self.rotary, positions.reshape(-1), 0), 1)
        return positions.reshape(-1, 1, positions.shape[-1])


class RopeAndMask(SeenTokens):
    """(positions [R, T], spans [R, T, 3]) -> mask float32 [R, 1, T, T], angles float32 [N, 1, 2 D]."""

    def construct(self, positions: Any, spans: Any) -> Any:
        return self.mask(self.seen_in_rows(spans)), self.angles(positions)

    def seen_in_rows(self, spans: Any) -> Any:
        """Returns bool [R, T, T]: whether a token (dim 1) attends to another (dim 2)."""
        length = spans.shape[1]
        order = self.first(length)
        return self.seen(spans, order.reshape(1, length, 1), order.reshape(1, 1, length))


class ContextMask(SeenTokens):
    """(positions [R, T], spans [R, T, 3], columns [G, R, L]) -> mask float32 [R, 1, L, T], angles float32 [n, 1, 2 D].

    Both are of this rank's tokens; the last dim of the mask concatenates the columns of all ranks.
    """

    def __init__(self, rotary: np.ndarray | None, index: int) -> None:
        super().__init__(rotary)
        self.index = index

    def construct(self, positions: Any, spans: Any, columns: Any) -> Any:
        seen, own_positions = self.own(positions, spans, columns)
        return self.mask(seen), self.angles(own_positions)

    def own(self, positions: Any, spans: Any, columns: Any) -> Any:
        """Returns bool [R, L, T], as `seen` does, and the positions [n], or angles [n, 2 D], of this rank's tokens."""
        rows, length, _ = spans.shape
        own = columns[self.index]
        places = (own + self.first(rows).reshape(-1, 1) * length).reshape(-1)
        own_spans = ops.gather(spans.reshape(-1, 3), places, 0).reshape(rows, -1, 3)
        others = columns.transpose(1, 0, 2).reshape(rows, 1, length)
        seen = self.seen(own_spans, ops.expand_dims(own, 2), others)
        return seen, ops.gather(positions.reshape(rows * length, *positions.shape[2:]), places, 0)


class HeadAttention(nn.Cell):
    """Base class of attention cells: splits the fused projection into heads, and attends in padded rows."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.kv, self.dim, self.queries = heads.kv, heads.dim, heads.queries
        # Query heads per key-value head.
        self.group = heads.queries // heads.kv
        self.has_bias, self.has_norm = heads.has_bias, heads.norm_eps is not None
        self.norm = RmsNorm(heads.norm_eps or 0.0)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.scale = heads.scale
        self.split, self.halves, self.concat = SplitWithSize(), ops.Split(2, 2), ops.Concat(2)
        self.of_values = heads.queries + heads.kv, heads.kv
        self.of_keys = heads.queries, heads.kv
        self.softmax = ops.Softmax()

    def heads_of(self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, angles: Any) -> Any:
        """Splits `qkv` [N, heads.width]; `angles` float32 [N, 1, 2 D].

        Returns queries [N, queries, D] and keys [N, kv, D], normalized and rotated, and values [N, kv, D].
        """
        if self.has_bias:
            qkv = qkv + ops.cast(bias, qkv.dtype)
        heads = qkv.reshape(-1, self.queries + 2 * self.kv, self.dim)
        both, values = self.split(heads, self.of_values, 1)
        if self.has_norm:
            queries, keys = self.split(both, self.of_keys, 1)
            both = ops.concat((self.norm(queries, q_norm), self.norm(keys, k_norm)), 1)
        queries, keys = self.split(self.apply_rope(both, angles), self.of_keys, 1)
        return queries, keys, values

    def apply_rope(self, heads: Any, angles: Any) -> Any:
        exact = ops.cast(heads, ms.float32)
        first, second = self.halves(exact)
        cos, sin = self.halves(angles)
        return ops.cast(exact * cos + self.concat((-second, first)) * sin, heads.dtype)

    def by_head(self, heads: Any, rows: int, length: int) -> Any:
        """Transposes [R T, kv, D] to [R, kv, T, D]."""
        return heads.reshape(rows, length, self.kv, self.dim).transpose(0, 2, 1, 3)

    def mixed(self, queries: Any, keys: Any, values: Any, mask: Any, rows: int) -> Any:
        """Attends: queries [n, queries, D], keys and values [N, kv, D], mask [rows, 1, n / rows, T] -> [n, queries D].

        With context parallelism, n is less than N.
        """
        count, length = mask.shape[2], mask.shape[3]
        keys, values = self.by_head(keys, rows, length), self.by_head(values, rows, length)
        queries = queries.reshape(rows, count, self.kv, self.group, self.dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(
            rows * self.kv, self.group * count, self.dim
        )
        keys = keys.reshape(rows * self.kv, length, self.dim)
        values = values.reshape(rows * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = ops.cast(scores.reshape(rows, self.queries, count, length), ms.float32) + mask
        weights = self.softmax(scores).reshape(rows * self.kv, self.group * count, length)
        mixed = self.mix(ops.cast(weights, values.dtype), values).reshape(
            rows, self.kv, self.group, count, self.dim
        )
        return mixed.transpose(0, 3, 1, 2, 4).reshape(rows * count, -1)


class PlainPackedAttention(HeadAttention):
    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, mask: Any, angles: Any
    ) -> Any:
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        return self.mixed(queries, keys, values, mask, mask.shape[0])


class PlainContextAttention(HeadAttention):
    """All-gathers rotated keys and values; in each row, they are ordered by rank."""

    def __init__(self, heads: Heads, gather: nn.Cell) -> None:
        super().__init__(heads)
        self.gather = gather

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, mask: Any, angles: Any
    ) -> Any:
        rows, own = mask.shape[0], qkv.shape[0]
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        both = ops.concat((keys, values), 1).reshape(own, -1)
        # [G, R, L, ..] -> [R, G, L, ..]
        by_rank = self.gather(both).reshape(-1, rows, own // rows, both.shape[1])
        whole = by_rank.transpose(1, 0, 2, 3).reshape(-1, 2 * self.kv, self.dim)
        keys, values = self.split(whole, (self.kv, self.kv), 1)
        return self.mixed(queries, keys, values, mask, rows)


class PlainPrefillAttention(HeadAttention):
    def __init__(self, heads: Heads, keys: Any, values: Any) -> None:
        super().__init__(heads)
        self.cached_keys, self.cached_values = keys, values

    def cache_rows_of(self, heads: Any, source: Any) -> Any:
        """Returns rows `source` int32 [C] of `heads` [N, kv, D], as [C, D] in the dtype of the KV cache."""
        copies = ops.gather(heads.reshape(-1, self.dim), source, 0)
        return ops.cast(copies, self.cached_keys.dtype)

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
        rows = qkv.shape[0] // mask.shape[3]
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        ops.scatter_update(self.cached_keys, cache_rows, self.cache_rows_of(keys, source))
        ops.scatter_update(self.cached_values, cache_rows, self.cache_rows_of(values, source))
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
        pages: Any,
    ) -> Any:
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, angles)
        dtype = self.cached_keys.dtype
        keys = ops.cast(keys.reshape(-1, self.dim), dtype)
        values = ops.cast(values.reshape(-1, self.dim), dtype)
        keys = ops.scatter_update(self.cached_keys, cache_rows, keys)
        values = ops.scatter_update(self.cached_values, cache_rows, values)
        return self.mixed_with_cache(queries, keys, values, mask, pages)

    def mixed_with_cache(self, queries: Any, keys: Any, values: Any, mask: Any, pages: Any) -> Any:
        """Attends: queries [B, queries, D], KV cache [rows, D], mask [B kv, 1, S], pages int32 [B kv, S / P] ->
        [B, queries D]."""
        rows, length = mask.shape[0], mask.shape[2]
        page = length // pages.shape[1] * self.dim
        keys = ops.gather(keys.reshape(-1, page), pages, 0).reshape(rows, length, self.dim)
        values = ops.gather(values.reshape(-1, page), pages, 0).reshape(rows, length, self.dim)
        queries = queries.reshape(rows, self.group, self.dim)
        scores = ops.cast(self.scores(queries * self.scale, keys), ms.float32) + mask
        mixed = self.mix(ops.cast(self.softmax(scores), values.dtype), values)
        return mixed.reshape(-1, self.queries * self.dim)
