"""The kernels' contract in MindSpore's own operations: what every device has, and what faster kernels are held to.

Works on whole rows with a mask, whatever the samples' lengths. Refuses to be clever.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.contract import (
    AdamWNumbers,
    Heads,
    Kernels,
    Vocabulary,
)

NEVER = -1e30
# Elements of an array that the host works on at once.
PIECE = 1 << 18


class _RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def construct(self, x: Any, weight: Any) -> Any:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps) * weight


class _AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.norm = _RmsNorm(eps)

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        total = x + added
        return total, self.norm(total, weight)


class _Gated(nn.Cell):
    def construct(self, both: Any) -> Any:
        inner = both.shape[1] // 2
        gate, up = both[:, :inner], both[:, inner:]
        return gate * ops.sigmoid(gate) * up


class _Embedding(nn.Cell):
    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.first = first_token

    def construct(self, tokens: Any, table: Any) -> Any:
        local = tokens - self.first
        rows = table.shape[0]
        mine = ops.logical_and(local >= 0, local < rows)
        found = ops.gather(table, ops.clamp(local, 0, rows - 1), 0)
        return found * ops.expand_dims(mine.astype(ms.float32), 1)


class _Places(nn.Cell):
    """-> mask [R, 1, T, T], 0 where a token sees another and NEVER elsewhere; angles [N, 1, 2 D]."""

    def __init__(self, rotary: np.ndarray) -> None:
        super().__init__()
        self.rotary = Tensor(rotary)
        # A constant, longer than any row: asking for it in the graph costs half a second of compiling.
        self.order = Tensor(np.arange(1 << 16, dtype=np.int32))

    def construct(self, positions: Any, spans: Any) -> Any:
        length = positions.shape[1]
        order = self.order[:length]
        column = order.reshape(1, 1, length)
        row = order.reshape(1, length, 1)
        prefix, count, start = spans[:, :, 0:1], spans[:, :, 1:2], spans[:, :, 2:3]
        shared = ops.logical_and(column >= prefix, column < prefix + count)
        own = ops.logical_and(column >= start, column <= row)
        seen = ops.logical_or(shared, own).astype(ms.float32)
        mask = ops.expand_dims((seen - 1.0) * -NEVER, 1)
        angles = ops.expand_dims(ops.gather(self.rotary, positions.reshape(-1), 0), 1)
        return mask, angles


class _Attention(nn.Cell):
    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.heads = heads
        self.kv, self.dim, self.queries = heads.kv, heads.dim, heads.queries
        self.share = heads.queries // heads.kv
        self.has_bias, self.has_norm = heads.has_bias, heads.norm_eps is not None
        self.norm = _RmsNorm(heads.norm_eps or 0.0)
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.mix = ops.BatchMatMul()
        self.scale = self.dim**-0.5

    def turned(self, heads: Any, norm: Any, angles: Any) -> Any:
        if self.has_norm:
            heads = self.norm(heads, norm)
        half = self.dim // 2
        other = ops.concat((-heads[:, :, half:], heads[:, :, :half]), 2)
        return heads * angles[:, :, : self.dim] + other * angles[:, :, self.dim :]

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, mask: Any, angles: Any
    ) -> Any:
        rows, length = mask.shape[0], mask.shape[2]
        if self.has_bias:
            qkv = qkv + bias
        heads = qkv.reshape(-1, self.queries + 2 * self.kv, self.dim)
        queries = self.turned(heads[:, : self.queries], q_norm, angles)
        keys = self.turned(heads[:, self.queries : self.queries + self.kv], k_norm, angles)
        values = heads[:, self.queries + self.kv :]
        queries = queries.reshape(rows, length, self.kv, self.share, self.dim)
        queries = queries.transpose(0, 2, 3, 1, 4).reshape(
            rows * self.kv, self.share * length, self.dim
        )
        keys = keys.reshape(rows, length, self.kv, self.dim).transpose(0, 2, 1, 3)
        keys = keys.reshape(rows * self.kv, length, self.dim)
        values = values.reshape(rows, length, self.kv, self.dim).transpose(0, 2, 1, 3)
        values = values.reshape(rows * self.kv, length, self.dim)
        scores = self.scores(queries * self.scale, keys)
        scores = scores.reshape(rows, self.queries, length, length) + mask
        weights = ops.softmax(scores, -1).reshape(rows * self.kv, self.share * length, length)
        mixed = self.mix(weights, values).reshape(rows, self.kv, self.share, length, self.dim)
        return mixed.transpose(0, 3, 1, 2, 4).reshape(rows * length, -1)


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
        logits = logits * self.scale
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
        return (to_label * (self.onehot(labels) - p) - to_entropy) * self.scale


class PlainKernels(Kernels):
    ragged = False
    has_adamw = False
    has_slots = False

    def rms_norm(self, eps: float) -> nn.Cell:
        return _RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        return _AddRmsNorm(eps)

    def gated(self) -> nn.Cell:
        return _Gated()

    def embedding(self, first_token: int) -> nn.Cell:
        return _Embedding(first_token)

    def places(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        return _Places(rotary)

    def attention(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        return _Attention(heads)

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

    def log_prob_pieces(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbPieces(vocabulary, vocabulary.width)

    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbGrad(vocabulary, vocabulary.width)
