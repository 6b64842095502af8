"""The reference kernels in plain MindSpore operations, except attention (mindspore_attention.py) and experts.

Shapes of each cell are in contract.Kernels. Log-probs from hidden states are computed in chunks of rows, so that the
logits of all rows never exist at a time.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.kernels.shapes import NEVER, Activation, AdamWNumbers, Vocabulary

# Elements of an array that the host updates at a time.
PIECE = 1 << 18
# Tokens of other vocabulary shards are spread over this many rows, a power of two.
SPREAD = 256
SLOPE = 2.0 * (2.0 / np.pi) ** 0.5


def right_shift(x: Any, shift: int) -> Any:
    """Returns the logical right shift of int32 x [...] by 8 bits or more, computed in float32.

    float32 represents the remaining 24 bits exactly. NPUs have no vector instruction for right shifts, and would run
    them on the slow AI CPU.
    """
    upper = ops.cast(ops.bitwise_and(x, -(1 << shift)), ms.float32) * 2.0**-shift
    return ops.bitwise_and(ops.cast(upper, ms.int32), (1 << (32 - shift)) - 1)


class RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps, self.mean = eps, ops.ReduceMean(True)

    def construct(self, x: Any, weight: Any) -> Any:
        exact = ops.cast(x, ms.float32)
        scale = ops.rsqrt(self.mean(exact * exact, -1) + self.eps)
        return ops.cast(exact * scale * ops.cast(weight, ms.float32), x.dtype)


class AddMatMul(nn.Cell):
    def __init__(self, matmul: Any) -> None:
        super().__init__()
        self.matmul = matmul

    def construct(self, bias: Any, x: Any, weight: Any) -> Any:
        product = self.matmul(x, weight)
        return product + ops.cast(bias, product.dtype)


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
        self.halves = ops.Split(1, 2)

    def construct(self, both: Any) -> Any:
        gate, up = self.halves(ops.cast(both, ms.float32))
        if self.is_silu:
            return ops.cast(gate * ops.sigmoid(gate) * up, both.dtype)
        # tanh(x) = 2 sigmoid(2 x) - 1
        slope = gate * (SLOPE + (SLOPE * 0.044715) * gate * gate)
        return ops.cast(gate * ops.sigmoid(slope) * up, both.dtype)


class PlainEmbedding(nn.Cell):
    """(tokens int32 [N], table [V, H]) -> [N, H]. Tokens of other shards read some row, times zero.

    They are spread over SPREAD rows, since thousands of tokens that add to a single row of the gradient would
    serialize.
    """

    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.first = first_token
        self.choose = ops.Select()

    def construct(self, tokens: Any, table: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        return ops.gather(table, rows, 0) * ops.expand_dims(ops.cast(mine, table.dtype), 1)

    def rows_of(self, tokens: Any, count: int) -> Any:
        """Returns the row of each token, int32 [N] below `count`, and bool [N], whether the token is in this shard."""
        local = tokens - self.first
        mine = ops.logical_and(local >= 0, local < count)
        # Not ops.clamp or ops.where, which have no graph in a bprop.
        spread = ops.minimum(ops.bitwise_and(local, SPREAD - 1), count - 1)
        return self.choose(mine, local, spread), mine


class ExactEmbedding(PlainEmbedding):
    """Like PlainEmbedding, but sums the gradient of the table in float32 [V, H], whatever the table's dtype."""

    def bprop(self, tokens: Any, table: Any, out: Any, dout: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        dout = ops.cast(dout, ms.float32) * ops.expand_dims(ops.cast(mine, ms.float32), 1)
        return ops.zeros_like(tokens), ops.unsorted_segment_sum(dout, rows, table.shape[0])


class Pick(nn.Cell):
    """(picks int32 [M], x [N, H]) -> [M, H], from a float32 copy of x, so that its gradient is summed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = PlainEmbedding(0)

    def construct(self, picks: Any, x: Any) -> Any:
        return ops.cast(self.rows(picks, ops.cast(x, ms.float32)), x.dtype)


class _Vocabulary(nn.Cell):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        width = vocabulary.width
        self.scale = vocabulary.scale
        columns = np.arange(width)
        self.padded = vocabulary.real < width
        self.bias = Tensor(np.where(columns < vocabulary.real, 0.0, NEVER).astype(np.float32)[None])
        # Ids of padding columns must not equal the next rank's tokens.
        ids = np.where(columns < vocabulary.real, columns + vocabulary.first, -1)
        self.ids = Tensor(ids.astype(np.int32)[None])
        self.max, self.sum = ops.ArgMaxWithValue(1, True), SumExt()

    def scaled(self, logits: Any) -> Any:
        logits = ops.cast(logits, ms.float32) * self.scale
        if self.padded:
            logits = logits + self.bias
        return logits

    def onehot(self, labels: Any) -> Any:
        return ops.cast(ops.equal(ops.expand_dims(labels, 1), self.ids), ms.float32)


class LogProbStats(_Vocabulary):
    def construct(self, logits: Any, labels: Any) -> Any:
        logits = self.scaled(logits)
        _, top = self.max(logits)
        mass = ops.exp(logits - top)
        moment, target = mass * logits, logits * self.onehot(labels)
        return ops.concat((top, self.total(mass), self.total(moment), self.total(target)), 1)

    def total(self, x: Any) -> Any:
        return self.sum(x, (1,), True, None)


class LogProbsOfStats(nn.Cell):
    """Statistics float32 [M, 4 L] -> (log-prob, entropy, log-sum-exp), float32 [M] each.

    Calls operators instead of tensor methods and indexing: MindSpore parses their Python code again in every graph,
    which took a quarter of the last stage's forward pass.
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
        return ops.cast(gradient, logits.dtype)


class MatMulGradient(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.run = ops.MatMul(transpose_a=True)

    def construct(self, x: Any, dy: Any) -> Any:
        return ops.cast(self.run(x, dy), ms.float32)


def adamw(
    weight: np.ndarray,
    gradient: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    numbers: AdamWNumbers,
) -> None:
    """Implements Kernels.adamw on float32 [n] arrays in chunks of PIECE, so that temporary arrays stay small."""
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
    """An AdamW step with ops.Adam, which adds eps before the bias correction, so that eps has to be corrected first."""

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
    """Returns scalars, float32 []: learning rate, beta1^count, beta2^count, corrected eps, 1 - lr * weight_decay."""
    power1, power2 = numbers.beta1**numbers.count, numbers.beta2**numbers.count
    eps = numbers.eps * float(np.sqrt(1.0 - power2))
    kept = 1.0 - numbers.lr * numbers.weight_decay
    return [Tensor(number, ms.float32) for number in (numbers.lr, power1, power2, eps, kept)]


class Squares(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum = SumExt()

    def construct(self, x: Any) -> Any:
        return self.sum(x * x)


class LinearLogProbStats(nn.Cell):
    """(x [M, H], table [V, H], labels int32 [M]) -> statistics float32 [M, 4 leaves], in chunks of `rows` rows."""

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
            # Forces the chunks to run one after the other, or the logits of all could exist at a time.
            logits = self.logits(ops.depend(x[start:stop], before), table)
            before = self.stats(logits, labels[start:stop])
            chunks.append(before)
        return ops.concat(chunks, 0)


class LinearLogProbGrad(nn.Cell):
    """(x [M, H], table [V, H], labels [M], log-sum-exp, entropy, dlogp, dentropy, all [M]) -> (dx, dtable).

    Recomputes the logits, `rows` rows at a time. dtable is float32 [V, H], or [1] unless the table `is_trained`.
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
        # Waits for the gradient: otherwise the logits could be recomputed early and kept since the forward pass.
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
