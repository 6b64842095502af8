"""The cells of the kernels' contract in MindSpore's own operations.

Those of attention are in mindspore_attention.py; letters as in contract.Kernels. Log-probs straight from the head's
input are computed a chunk of rows at a time: no [rows, vocabulary] tensor is of all rows.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.kernels.shapes import NEVER, Activation, AdamWNumbers, Vocabulary

# Elements of an array that the host works on at once.
PIECE = 1 << 18
# Rows, a power of two, that tokens of other shards are spread over.
SPREAD = 256
SLOPE = 2.0 * (2.0 / np.pi) ** 0.5


def right_shift(x: Any, shift: int) -> Any:
    """Returns int32 x >> shift, 8 or more, with zeros from above; by float32, which holds the 24 bits that stay.

    NPUs have no vectors for shifts to the right: their AI CPU would compute them.
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
    """A token of another shard takes a row as well, times zero: one of many, as thousands that add to one row in the
    gradient would wait for each other.
    """

    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.first = first_token
        self.choose = ops.Select()

    def construct(self, tokens: Any, table: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        return ops.gather(table, rows, 0) * ops.expand_dims(ops.cast(mine, table.dtype), 1)

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
        dout = ops.cast(dout, ms.float32) * ops.expand_dims(ops.cast(mine, ms.float32), 1)
        return ops.zeros_like(tokens), ops.unsorted_segment_sum(dout, rows, table.shape[0])


class Pick(nn.Cell):
    """Gathers from a float32 copy: the gradient is a sum in the dtype of what is gathered from."""

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
        # Padding must not look like the next rank's tokens.
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
    def __init__(self) -> None:
        super().__init__()
        self.sum = SumExt()

    def construct(self, x: Any) -> Any:
        return self.sum(x * x)


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
