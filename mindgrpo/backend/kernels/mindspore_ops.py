"""The kernels' contract in MindSpore's own operations: what every device has, and what faster kernels are held to.

Works on whole rows with a mask, whatever the samples' lengths.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_attention import (
    PlainCachedAttention,
    PlainPackedAttention,
    PlainPrefillAttention,
    RmsNorm,
    RopeAndMask,
)
from mindgrpo.backend.kernels.mindspore_log_probs import LinearLogProbGrad, LinearLogProbStats
from mindgrpo.backend.kernels.shapes import NEVER, Activation, AdamWNumbers, Heads, Vocabulary

# Elements of an array that the host works on at once.
PIECE = 1 << 18
# Rows, a power of two, that tokens of other shards are spread over.
SPREAD = 256
SLOPE = 2.0 * (2.0 / np.pi) ** 0.5


class _AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = RmsNorm(eps)

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        total = x + added
        return total, self.norm(total, weight)


class _Glu(nn.Cell):
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


class _Embedding(nn.Cell):
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
        """Each token's row of `count`, and whether it is the token's own."""
        local = tokens - self.first
        mine = ops.logical_and(local >= 0, local < count)
        # Not ops.clamp or ops.where, which have no graph in a bprop.
        spread = ops.minimum(ops.bitwise_and(local, SPREAD - 1), count - 1)
        return self.choose(mine, local, spread), mine


class _ExactEmbedding(_Embedding):
    """As _Embedding, but the table's gradient, a sum over tokens, is float32 whatever the table is."""

    def bprop(self, tokens: Any, table: Any, out: Any, dout: Any) -> Any:
        rows, mine = self.rows_of(tokens, table.shape[0])
        dout = dout.astype(ms.float32) * ops.expand_dims(mine.astype(ms.float32), 1)
        return ops.zeros_like(tokens), ops.unsorted_segment_sum(dout, rows, table.shape[0])


class _Pick(nn.Cell):
    """Gathers from a float32 copy: the gradient is a sum in the dtype of what is gathered from."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = _Embedding(0)

    def construct(self, picks: Any, x: Any) -> Any:
        return self.rows(picks, x.astype(ms.float32)).astype(x.dtype)


class _Vocabulary(nn.Cell):
    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        super().__init__()
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


class _LogProbPieces(_Vocabulary):
    def construct(self, logits: Any, labels: Any) -> Any:
        logits = self.scaled(logits)
        top = logits.max(axis=1, keepdims=True)
        mass = ops.exp(logits - top)
        total = mass.sum(axis=1, keepdims=True)
        moment = (mass * logits).sum(axis=1, keepdims=True)
        target = (logits * self.onehot(labels)).sum(axis=1, keepdims=True)
        return ops.concat((top, total, moment, target), 1)


class _LogProbGrad(_Vocabulary):
    def construct(
        self, logits: Any, labels: Any, totals: Any, entropy: Any, dlogp: Any, dentropy: Any
    ) -> Any:
        log_p = self.scaled(logits) - ops.expand_dims(totals, 1)
        p = ops.exp(log_p)
        to_label = ops.expand_dims(dlogp, 1)
        to_entropy = ops.expand_dims(dentropy, 1) * p * (log_p + ops.expand_dims(entropy, 1))
        gradient = (to_label * (self.onehot(labels) - p) - to_entropy) * self.scale
        return gradient.astype(logits.dtype)


class _MatMulGradient(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.run = ops.MatMul(transpose_a=True)

    def construct(self, x: Any, dy: Any) -> Any:
        return self.run(x, dy).astype(ms.float32)


class PlainKernels(Kernels):
    ragged = False
    has_adamw = False
    has_slots = False

    def matmul(self, transpose_b: bool = False) -> Any:
        return ops.MatMul(transpose_b=transpose_b)

    def matmul_gradient(self) -> Any:
        return _MatMulGradient()

    def rms_norm(self, eps: float) -> nn.Cell:
        return RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        return _AddRmsNorm(eps)

    def glu(self, activation: Activation) -> nn.Cell:
        return _Glu(activation)

    def embedding(self, first_token: int) -> nn.Cell:
        return _Embedding(first_token)

    def exact_embedding(self, first_token: int) -> nn.Cell:
        return _ExactEmbedding(first_token)

    def pick(self) -> nn.Cell:
        return _Pick()

    def rope_and_mask(self, rotary: np.ndarray) -> nn.Cell:
        return RopeAndMask(rotary)

    def attention(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        return PlainPackedAttention(heads)

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        return PlainPrefillAttention(heads, keys, values)

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        return PlainCachedAttention(heads, keys, values)

    def adamw(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        numbers: AdamWNumbers,
    ) -> None:
        n = numbers
        # A piece at a time, so that what is computed on the way stays small.
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

    def square_sum(self, array: np.ndarray) -> float:
        return float(np.sum(np.square(array, dtype=np.float64)))

    def log_prob_stats(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbPieces(vocabulary, vocabulary.width)

    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbGrad(vocabulary, vocabulary.width)

    def linear_log_prob_stats(self, vocabulary: Vocabulary, rows: int) -> nn.Cell:
        return LinearLogProbStats(self, vocabulary, rows)

    def linear_log_prob_grad(
        self, vocabulary: Vocabulary, rows: int, is_trained: bool = True
    ) -> nn.Cell:
        return LinearLogProbGrad(self, vocabulary, rows, is_trained)
