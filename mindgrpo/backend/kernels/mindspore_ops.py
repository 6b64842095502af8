"""The cells of the kernels' contract in MindSpore's own operations.

N tokens, D head dim, R rows of T tokens; other letters as in contract.Kernels. A mask is 0.0 where a token sees another
and NEVER elsewhere; angles hold the cosines of a token's rotary positions, then their sines (arXiv:2104.09864).
Log-probs straight from the head's input are computed a chunk of rows at a time: no [rows, vocabulary] tensor is of all
rows.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.kernels.shapes import NEVER, Activation, AdamWNumbers, Heads, Vocabulary

# Elements of an array that the host works on at once.
PIECE = 1 << 18
# Rows, a power of two, that tokens of other shards are spread over.
SPREAD = 256
SLOPE = 2.0 * (2.0 / np.pi) ** 0.5


def right_shift(x: Any, shift: int) -> Any:
    """Returns int32 x >> shift, 8 or more, with zeros from above; by float32, which holds the 24 bits that stay.

    NPUs have no vectors for shifts to the right: their AI CPU would compute them.
    """
    upper = ops.bitwise_and(x, -(1 << shift)).astype(ms.float32) * 2.0**-shift
    return ops.bitwise_and(upper.astype(ms.int32), (1 << (32 - shift)) - 1)


class RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x: Any, weight: Any) -> Any:
        exact = x.astype(ms.float32)
        scale = ops.rsqrt((exact * exact).mean(-1, keep_dims=True) + self.eps)
        return (exact * scale * weight.astype(ms.float32)).astype(x.dtype)


class AddMatMul(nn.Cell):
    def __init__(self, matmul: Any) -> None:
        super().__init__()
        self.matmul = matmul

    def construct(self, bias: Any, x: Any, weight: Any) -> Any:
        product = self.matmul(x, weight)
        return product + bias.astype(product.dtype)


class SeenTokens(nn.Cell):
    """Base of what makes masks of spans, and angles of positions."""

    def __init__(self, rotary: np.ndarray) -> None:
        super().__init__()
        self.rotary = Tensor(rotary)
        # A constant, longer than any row: asking for it in the graph costs half a second of compiling.
        self.order = Tensor(np.arange(1 << 16, dtype=np.int32))

    def seen(self, spans: Any, row: Any, column: Any) -> Any:
        """Returns bool [R, L, T]: whether tokens in columns `row`, which have these spans, see those in `column`."""
        prefix, count, start = spans[:, :, 0:1], spans[:, :, 1:2], spans[:, :, 2:3]
        shared = ops.logical_and(column >= prefix, column < prefix + count)
        own = ops.logical_and(column >= start, column <= row)
        return ops.logical_or(shared, own)

    def mask(self, seen: Any) -> Any:
        return ops.expand_dims((seen.astype(ms.float32) - 1.0) * -NEVER, 1)

    def angles(self, positions: Any) -> Any:
        return ops.expand_dims(ops.gather(self.rotary, positions.reshape(-1), 0), 1)


class RopeAndMask(SeenTokens):
    """-> mask [R, 1, T, T]; angles [N, 1, 2 D]."""

    def construct(self, positions: Any, spans: Any) -> Any:
        return self.mask(self.seen_in_rows(spans)), self.angles(positions)

    def seen_in_rows(self, spans: Any) -> Any:
        """Returns bool [R, T, T]: whether a token, the second dim, sees another, the third."""
        length = spans.shape[1]
        order = self.order[:length]
        return self.seen(spans, order.reshape(1, length, 1), order.reshape(1, 1, length))


class ContextMask(SeenTokens):
    """-> mask [R, 1, L, T] of own tokens, over columns in the order of the ranks; their angles [n, 1, 2 D]."""

    def __init__(self, rotary: np.ndarray, index: int) -> None:
        super().__init__(rotary)
        self.index = index

    def construct(self, positions: Any, spans: Any, columns: Any) -> Any:
        seen, own_positions = self.own(positions, spans, columns)
        return self.mask(seen), self.angles(own_positions)

    def own(self, positions: Any, spans: Any, columns: Any) -> Any:
        """Returns bool [R, L, T], as `seen`, and the own tokens' positions [n]."""
        rows, length = positions.shape
        own = columns[self.index]
        places = (own + self.order[:rows].reshape(-1, 1) * length).reshape(-1)
        own_spans = ops.gather(spans.reshape(-1, 3), places, 0).reshape(rows, -1, 3)
        others = columns.transpose(1, 0, 2).reshape(rows, 1, length)
        seen = self.seen(own_spans, ops.expand_dims(own, 2), others)
        return seen, ops.gather(positions.reshape(-1), places, 0)


class HeadAttention(nn.Cell):
    """Base of the three: splits a projection into heads, and mixes values of rows of the full length."""

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
        """Returns queries [N, queries, D] and keys [N, kv, D], both with their positions, and values [N, kv, D]."""
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
        """Transposes [R T, kv, D] to [R, kv, T, D]."""
        return heads.reshape(rows, length, self.kv, self.dim).transpose(0, 2, 1, 3)

    def mixed(self, queries: Any, keys: Any, values: Any, mask: Any, rows: int) -> Any:
        """Mixes values: `keys` and `values` [N, kv, D] -> mixed [n, queries D], of n queries, N or some of them."""
        count, length = mask.shape[2], mask.shape[3]
        keys, values = self.by_head(keys, rows, length), self.by_head(values, rows, length)
        queries = queries.reshape(rows, count, self.kv, self.group, self.dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(
            rows * self.kv, self.group * count, self.dim
        )
        keys = keys.reshape(rows * self.kv, length, self.dim)
        values = values.reshape(rows * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(rows, self.queries, count, length).astype(ms.float32) + mask
        weights = ops.softmax(scores, -1).reshape(rows * self.kv, self.group * count, length)
        mixed = self.mix(weights.astype(values.dtype), values).reshape(
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
    """Gathers keys, with their positions, and values; their order within a row is that of the ranks."""

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
        return self.mixed(queries, whole[:, : self.kv], whole[:, self.kv :], mask, rows)


class PlainPrefillAttention(HeadAttention):
    def __init__(self, heads: Heads, keys: Any, values: Any) -> None:
        super().__init__(heads)
        self.cached_keys, self.cached_values = keys, values

    def cache_rows_of(self, heads: Any, source: Any) -> Any:
        """Returns rows `source` of `heads` [N, kv, D] as rows of the cache, in its dtype."""
        copies = ops.gather(heads.reshape(-1, self.dim), source, 0)
        return copies.astype(self.cached_keys.dtype)

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
        keys = keys.reshape(-1, self.dim).astype(dtype)
        values = values.reshape(-1, self.dim).astype(dtype)
        keys = ops.scatter_update(self.cached_keys, cache_rows, keys)
        values = ops.scatter_update(self.cached_values, cache_rows, values)
        return self.mixed_with_cache(queries, keys, values, mask, pages)

    def mixed_with_cache(self, queries: Any, keys: Any, values: Any, mask: Any, pages: Any) -> Any:
        """Mixes values: `queries` [B, queries, D] against pages of the cache [rows, D] -> mixed [B, queries D]"""
        rows, length = mask.shape[0], mask.shape[2]
        page = length // pages.shape[1] * self.dim
        keys = ops.gather(keys.reshape(-1, page), pages, 0).reshape(rows, length, self.dim)
        values = ops.gather(values.reshape(-1, page), pages, 0).reshape(rows, length, self.dim)
        queries = queries.reshape(rows, self.group, self.dim)
        scores = self.scores(queries * self.scale, keys).astype(ms.float32) + mask
        mixed = self.mix(ops.softmax(scores, -1).astype(values.dtype), values)
        return mixed.reshape(-1, self.queries * self.dim)


class AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = RmsNorm(eps)

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        total = x + added
        return total, self.norm(total, weight)


class Largest(nn.Cell):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def construct(self, x: Any) -> Any:
        return ops.topk(x, self.count)


class Glu(nn.Cell):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.is_silu = activation == "silu"

    def construct(self, both: Any) -> Any:
        inner = both.shape[1] // 2
        exact = both.astype(ms.float32)
        gate, up = exact[:, :inner], exact[:, inner:]
        if self.is_silu:
            return (gate * ops.sigmoid(gate) * up).astype(both.dtype)
        # tanh(x) = 2 sigmoid(2 x) - 1
        slope = gate * (SLOPE + (SLOPE * 0.044715) * gate * gate)
        return (gate * ops.sigmoid(slope) * up).astype(both.dtype)


class PlainEmbedding(nn.Cell):
    """A token of another shard takes a row as well, times zero: one of many, as thousands that add to one row in the
    gradient would wait for each other.
    """

    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.first = first_token
        self.choose = ops.Select()

    def construct(self, tokens: Any, table: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        return ops.gather(table, rows, 0) * ops.expand_dims(mine.astype(table.dtype), 1)

    def rows_of(self, tokens: Any, count: int) -> Any:
        """Returns each token's row of `count`, and whether it is the token's own."""
        local = tokens - self.first
        mine = ops.logical_and(local >= 0, local < count)
        # Not ops.clamp or ops.where, which have no graph in a bprop.
        spread = ops.minimum(ops.bitwise_and(local, SPREAD - 1), count - 1)
        return self.choose(mine, local, spread), mine


class ExactEmbedding(PlainEmbedding):
    """As PlainEmbedding, but the table's gradient, a sum over tokens, is float32 whatever the table is."""

    def bprop(self, tokens: Any, table: Any, out: Any, dout: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        dout = dout.astype(ms.float32) * ops.expand_dims(mine.astype(ms.float32), 1)
        return ops.zeros_like(tokens), ops.unsorted_segment_sum(dout, rows, table.shape[0])


class Pick(nn.Cell):
    """Gathers from a float32 copy: the gradient is a sum in the dtype of what is gathered from."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = PlainEmbedding(0)

    def construct(self, picks: Any, x: Any) -> Any:
        return self.rows(picks, x.astype(ms.float32)).astype(x.dtype)


class _Vocabulary(nn.Cell):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        width = vocabulary.width
        self.scale = vocabulary.scale
        columns = np.arange(width)
        self.padded = vocabulary.real < width
        self.bias = Tensor(np.where(columns < vocabulary.real, 0.0, NEVER).astype(np.float32)[None])
        # Padding must not look like the next rank's tokens.
        ids = np.where(columns < vocabulary.real, columns + vocabulary.first, -1)
        self.ids = Tensor(ids.astype(np.int32)[None])

    def scaled(self, logits: Any) -> Any:
        logits = logits.astype(ms.float32) * self.scale
        if self.padded:
            logits = logits + self.bias
        return logits

    def onehot(self, labels: Any) -> Any:
        return ops.equal(ops.expand_dims(labels, 1), self.ids).astype(ms.float32)


class LogProbStats(_Vocabulary):
    def construct(self, logits: Any, labels: Any) -> Any:
        logits = self.scaled(logits)
        top = logits.max(axis=1, keepdims=True)
        mass = ops.exp(logits - top)
        total = mass.sum(axis=1, keepdims=True)
        moment = (mass * logits).sum(axis=1, keepdims=True)
        target = (logits * self.onehot(labels)).sum(axis=1, keepdims=True)
        return ops.concat((top, total, moment, target), 1)


class LogProbsOfStats(nn.Cell):
    """In operations themselves: a tensor's methods and indices are Python, which the compiler reads anew in each graph.

    That took a quarter of a last stage's forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reshape = ops.Reshape()
        self.slice = ops.StridedSlice(shrink_axis_mask=0b100)
        self.max, self.sum = ops.ArgMaxWithValue(1, True), SumExt()

    def column(self, stats: Any, index: int) -> Any:
        rows, leaves, _ = stats.shape
        return self.slice(stats, (0, 0, index), (rows, leaves, index + 1), (1, 1, 1))

    def total(self, x: Any) -> Any:
        return self.sum(x, (1,), False, None)

    def construct(self, stats: Any) -> Any:
        stats = self.reshape(stats, (stats.shape[0], -1, 4))
        tops = self.column(stats, 0)
        _, highest = self.max(tops)
        share = ops.exp(tops - highest)
        sums = self.total(self.column(stats, 1) * share)
        log_total = highest.reshape(-1) + ops.log(sums)
        mean_logit = self.total(self.column(stats, 2) * share) / sums
        return self.total(self.column(stats, 3)) - log_total, log_total - mean_logit, log_total


class LogProbGrad(_Vocabulary):
    def construct(
        self, logits: Any, labels: Any, totals: Any, entropy: Any, dlogp: Any, dentropy: Any
    ) -> Any:
        log_p = self.scaled(logits) - ops.expand_dims(totals, 1)
        p = ops.exp(log_p)
        to_label = ops.expand_dims(dlogp, 1)
        to_entropy = ops.expand_dims(dentropy, 1) * p * (log_p + ops.expand_dims(entropy, 1))
        gradient = (to_label * (self.onehot(labels) - p) - to_entropy) * self.scale
        return gradient.astype(logits.dtype)


class MatMulGradient(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.run = ops.MatMul(transpose_a=True)

    def construct(self, x: Any, dy: Any) -> Any:
        return self.run(x, dy).astype(ms.float32)


def adamw(
    weight: np.ndarray,
    gradient: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    numbers: AdamWNumbers,
) -> None:
    """Implements Kernels.adamw a piece at a time, so that temporary arrays stay small."""
    n = numbers
    for start in range(0, weight.size, PIECE):
        piece = slice(start, start + PIECE)
        w, m, v = weight[piece], first[piece], second[piece]
        g = gradient[piece] * np.float32(n.scale)
        m *= n.beta1
        m += (1.0 - n.beta1) * g
        v *= n.beta2
        v += (1.0 - n.beta2) * np.square(g)
        root = np.sqrt(v / (1.0 - n.beta2**n.count)) + n.eps
        w *= 1.0 - n.lr * n.weight_decay
        w -= n.lr / (1.0 - n.beta1**n.count) * m / root
        gradient[piece] = 0.0


class AdamWUpdate(nn.Cell):
    """Adam's kernel adds eps to sqrt(v) before the bias correction, so eps arrives already corrected."""

    def __init__(self, beta1: float, beta2: float, weight_decay: float) -> None:
        super().__init__()
        self.decays = weight_decay > 0
        self.beta1, self.beta2 = Tensor(beta1, ms.float32), Tensor(beta2, ms.float32)
        self.adam = ops.Adam()

    def construct(
        self,
        weight: Any,
        gradient: Any,
        first: Any,
        second: Any,
        lr: Any,
        power1: Any,
        power2: Any,
        eps: Any,
        keep: Any,
    ) -> Any:
        if self.decays:
            gradient = ops.depend(gradient, ops.assign(weight, weight * keep))
        betas = self.beta1, self.beta2
        return self.adam(weight, first, second, power1, power2, lr, *betas, eps, gradient)


def adamw_inputs(numbers: AdamWNumbers) -> list[Any]:
    """Returns the learning rate, both powers of the betas, the corrected eps, and what decay leaves of a weight."""
    power1, power2 = numbers.beta1**numbers.count, numbers.beta2**numbers.count
    eps = numbers.eps * float(np.sqrt(1.0 - power2))
    kept = 1.0 - numbers.lr * numbers.weight_decay
    return [Tensor(number, ms.float32) for number in (numbers.lr, power1, power2, eps, kept)]


class Squares(nn.Cell):
    def construct(self, x: Any) -> Any:
        return (x * x).sum()


class LinearLogProbStats(nn.Cell):
    """(x [M, H], table [V, H], labels [M]) -> stats [M, 4], by `kernels`' own products and stats of `rows` rows."""

    def __init__(self, kernels: Any, vocabulary: Vocabulary, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.logits = kernels.matmul(transpose_b=True)
        self.stats = kernels.log_prob_stats(vocabulary)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        chunks = []
        before = labels
        for start in range(0, x.shape[0], self.rows):
            stop = start + self.rows
            # One chunk after the other, or the logits of all would be made at once.
            logits = self.logits(ops.depend(x[start:stop], before), table)
            before = self.stats(logits, labels[start:stop])
            chunks.append(before)
        return ops.concat(chunks, 0)


class LinearLogProbGrad(nn.Cell):
    """(x, table, labels, log-sum-exp, entropy, dlogp, dentropy) -> (dx, dtable); the logits are made again.

    A table that is not trained has dtable [1].
    """

    def __init__(self, kernels: Any, vocabulary: Vocabulary, rows: int, is_trained: bool) -> None:
        super().__init__()
        self.rows, self.is_trained = rows, is_trained
        self.nothing = Tensor([0.0], ms.float32)
        self.logits = kernels.matmul(transpose_b=True)
        self.gradient = kernels.log_prob_grad(vocabulary)
        self.to_x = kernels.matmul()
        self.to_table = kernels.matmul_gradient()

    def construct(
        self, x: Any, table: Any, labels: Any, totals: Any, entropy: Any, dlogp: Any, dentropy: Any
    ) -> Any:
        rows, numbers = self.rows, (totals, entropy, dlogp, dentropy)
        # Not before its gradient is there: what is made again is not to be kept from the forward pass on.
        own = ops.depend(x[:rows], dlogp)
        dx, dtable = self.of_chunk(own, table, labels[:rows], [n[:rows] for n in numbers])
        chunks = [dx]
        for start in range(rows, x.shape[0], rows):
            stop = start + rows
            before = dtable if self.is_trained else dx
            own = ops.depend(x[start:stop], before)
            dx, more = self.of_chunk(
                own, table, labels[start:stop], [n[start:stop] for n in numbers]
            )
            dtable = dtable + more
            chunks.append(dx)
        return ops.concat(chunks, 0), dtable

    def of_chunk(self, x: Any, table: Any, labels: Any, numbers: Any) -> Any:
        dlogits = self.gradient(self.logits(x, table), labels, *numbers)
        dx = self.to_x(dlogits, table)
        return dx, self.to_table(dlogits, x) if self.is_trained else self.nothing
