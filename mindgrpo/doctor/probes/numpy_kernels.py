"""The kernels' contract in NumPy: what the results of other kernels are compared with.

Methods return functions of arrays, in place of cells, which compute in the dtype of their floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import (
    NEVER,
    Activation,
    AdamWNumbers,
    Heads,
    Routing,
    Vocabulary,
)

Array = np.ndarray
Function = Callable[..., Any]


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rows(table: Array, rows: Array) -> Array:
    """Returns rows of a table, zeros for those that it does not have."""
    mine = (rows >= 0) & (rows < len(table))
    return table[np.where(mine, rows, 0)] * mine[..., None]


def turned(heads: Array) -> Array:
    first, second = np.split(heads, 2, -1)
    return np.concatenate([-second, first], -1)


def _split(own: Heads, *inputs: Array) -> list[Array]:
    """Takes qkv, bias, q_norm, k_norm, angles; returns queries, keys and values [N, heads, D], turned by position."""
    qkv, bias, q_norm, k_norm, angles = inputs
    heads = (qkv + bias if own.has_bias else qkv).reshape(len(qkv), -1, own.dim)
    q, k, v = np.split(heads, [own.queries, own.queries + own.kv], 1)
    if own.norm_eps is not None:
        q, k = _norm(q, q_norm, own.norm_eps), _norm(k, k_norm, own.norm_eps)
    cos, sin = np.split(angles, 2, -1)
    return [x * cos + turned(x) * sin for x in (q, k)] + [v]


def _mixed(own: Heads, *inputs: Array) -> Array:
    """Mixes values of rows: q [R, queries, T, D], k and v [R, kv, S, D], mask [R or 1, T, S] -> [R, T, queries D]."""
    q, k, v, mask = inputs
    out = np.empty_like(q)
    for row, head in np.ndindex(q.shape[:2]):
        key = head * own.kv // own.queries
        scores = q[row, head] @ k[row, key].T * own.scale + mask[row % len(mask)]
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[row, head] = weights @ v[row, key] / weights.sum(-1, keepdims=True)
    return out.transpose(0, 2, 1, 3).reshape(len(q), q.shape[2], -1)


def _by_head(heads: Array, rows: int) -> Array:
    return heads.reshape(rows, -1, *heads.shape[1:]).transpose(0, 2, 1, 3)


def _without_settings(function: Function) -> Any:
    """Makes a method that gives the same function for all settings."""
    return lambda self, *settings: function


class NumpyKernels(Kernels):
    def matmul(self, transpose_b: bool = False, leaves: int = 1) -> Function:
        return lambda x, weight: x @ (weight.T if transpose_b else weight)

    add_matmul = _without_settings(lambda bias, x, weight: x @ weight + bias)
    matmul_back = _without_settings(lambda dy, weight: dy @ weight.T)
    matmul_gradient = _without_settings(lambda x, dy: x.T @ dy)
    pick = _without_settings(lambda picks, x: _rows(x, picks))
    take_rows = _without_settings(lambda x, order, home: _rows(x, order // home.shape[1]))
    weighted_sum = _without_settings(
        lambda y, scores, order, home: (_rows(y, home) * scores[:, :, None]).sum(1)
    )
    cached_angles = _without_settings(lambda angles: angles)
    squares = _without_settings(lambda x: (x * x).sum())

    def rms_norm(self, eps: float) -> Any:
        return lambda x, weight: _norm(x, weight, eps)

    def add_rms_norm(self, eps: float) -> Any:
        return lambda x, added, weight: (x + added, _norm(x + added, weight, eps))

    def glu(self, activation: Activation) -> Any:
        def glu(both: Array) -> Array:
            gate, up = np.split(both, 2, 1)
            cubic = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
            return gate / (1 + np.exp(-(gate if activation == "silu" else cubic))) * up

        return glu

    def router(self, routing: Routing) -> Any:
        def scores(x: Array, weight: Array, topk_ids: Array) -> Array:
            taken = np.take_along_axis(_probabilities(x @ weight, routing), topk_ids, 1)
            taken = np.where(topk_ids >= 0, taken, 0)
            if routing.renormalise:
                total = taken.sum(1, keepdims=True)
                taken = taken / np.where(total > 0, total, 1)
            return taken * routing.scaling

        return scores

    def choose_experts(self, routing: Routing) -> Any:
        def choose(x: Array, weight: Array, bias: Array) -> tuple[Array, Array]:
            scores = _probabilities(x @ weight, routing)
            if routing.has_bias:
                scores = scores + bias
            by_group = scores.reshape(len(x), routing.groups, -1)
            sums = np.sort(by_group, 2)[:, :, -2:].sum(2)
            taken = np.argsort(-sums, 1, kind="stable")[:, : routing.groups_taken]
            is_taken = np.zeros(sums.shape, bool)
            np.put_along_axis(is_taken, taken, True, 1)
            scores = np.where(is_taken[:, :, None], by_group, NEVER).reshape(scores.shape)
            order = np.argsort(-scores, 1, kind="stable")
            falling = np.pad(np.take_along_axis(scores, order, 1), ((0, 0), (0, 1)))
            falling[:, -1] = NEVER
            count = routing.per_token
            margins = falling[:, count - 1] - falling[:, count]
            return order[:, :count].astype(np.int32), margins.astype(np.float32)

        return choose

    def sort_slots(self, routing: Routing) -> Any:
        def sort(topk_ids: Array) -> tuple[Array, Array, Array]:
            flat, home = topk_ids.reshape(-1), np.full(topk_ids.size, -1, np.int32)
            order = np.argsort(flat, kind="stable")[np.count_nonzero(flat < 0) :]
            home[order] = np.arange(order.size)
            counts = np.bincount(flat[order], minlength=routing.num_experts)
            order = np.pad(order, (0, flat.size - order.size), constant_values=-1)
            return order.astype(np.int32), counts.astype(np.int32), home.reshape(topk_ids.shape)

        return sort

    def expert_mlp(self, activation: Activation) -> Any:
        glu = self.glu(activation)

        def mlp(x: Array, counts: Array, gate_up: Array, down: Array) -> Array:
            y, ends = np.zeros_like(x), np.cumsum(counts)
            for e, (count, end) in enumerate(zip(counts, ends, strict=True)):
                y[end - count : end] = glu(x[end - count : end] @ gate_up[e]) @ down[e]
            return y

        return mlp

    def expert_matmul(self, in_float32: bool = False) -> Any:
        def product(x: Array, weight: Array, counts: Array) -> Array:
            y, ends = np.zeros((len(x), weight.shape[2]), x.dtype), np.cumsum(counts)
            for matrix, count, end in zip(weight, counts, ends, strict=True):
                y[end - count : end] = x[end - count : end] @ matrix
            return y

        return product

    def embedding(self, first_token: int) -> Any:
        return lambda tokens, table: _rows(table, tokens - first_token)

    exact_embedding = embedding

    def rope_and_mask(self, rotary: Array | None, is_causal: bool = False) -> Any:
        def rope_and_mask(positions: Array, spans: Array) -> tuple[Array, Array]:
            prefix, count, start = np.split(spans, 3, 2)
            column = np.arange(spans.shape[1])
            seen = (column >= prefix) & (column < prefix + count)
            seen |= (column >= start) & (column <= column[:, None])
            if rotary is None:
                return np.where(seen, 0.0, NEVER), positions.reshape(-1, 1, positions.shape[2])
            return np.where(seen, 0.0, NEVER), rotary[positions.reshape(-1), None]

        return rope_and_mask

    def attention(self, heads: Heads, rotary: Array | None, is_causal: bool = False) -> Any:
        def attention(*inputs: Array) -> Array:
            *own, mask, angles = inputs
            q, k, v = (_by_head(x, len(mask)) for x in _split(heads, *own, angles))
            return _mixed(heads, q, k, v, mask).reshape(len(own[0]), -1)

        return attention

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> Any:
        def attention(*inputs: Array) -> Array:
            *own, mask, angles, _, _ = inputs
            rows = len(own[0]) // mask.shape[3]
            q, k, v = (_by_head(x, rows) for x in _split(heads, *own, angles))
            return _mixed(heads, q, k, v, mask[0]).reshape(len(own[0]), -1)

        return attention

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> Any:
        def attention(*inputs: Array) -> Array:
            *own, mask, angles, rows, pages = inputs
            q, *cached = _split(heads, *own, angles)
            positions = np.arange(mask.shape[2] // pages.shape[1])
            of_pages = (pages[:, :, None] * len(positions) + positions).reshape(len(pages), -1)
            slots = []
            for new, cache in zip(cached, (keys, values), strict=True):
                filled = cache.astype(ms.float32).asnumpy().astype(q.dtype)
                filled[rows] = new.reshape(-1, heads.dim)
                slots.append(filled[of_pages].reshape(len(q), heads.kv, -1, heads.dim))
            return _mixed(heads, q[:, :, None], *slots, mask[:: heads.kv]).reshape(len(q), -1)

        return attention

    def largest(self, count: int) -> Any:
        def largest(x: Array) -> tuple[Array, Array]:
            columns = np.argsort(-x, 1, kind="stable")[:, :count].astype(np.int32)
            return np.take_along_axis(x, columns, 1), columns

        return largest

    def adamw_cell(self, beta1: float, beta2: float, eps: float, weight_decay: float) -> Any:
        def updated(*inputs: Any) -> tuple[Array, ...]:
            weight, gradient, first, second, count, lr = inputs
            first = beta1 * first + (1 - beta1) * gradient
            second = beta2 * second + (1 - beta2) * gradient**2
            root = np.sqrt(second / (1 - beta2**count)) + eps
            step = first / (1 - beta1**count) / root + weight_decay * weight
            return weight - lr * step, first, second

        return updated

    def adamw_inputs(self, numbers: AdamWNumbers) -> Any:
        return numbers.count, numbers.lr

    def log_prob_stats(self, vocabulary: Vocabulary) -> Any:
        def stats(logits: Array, labels: Array) -> Array:
            own = logits[:, : vocabulary.real] * vocabulary.scale
            top = own.max(1)
            mass = np.exp(own - top[:, None])
            target = (own * _one_hot(labels, vocabulary, own)).sum(1)
            return np.stack([top, mass.sum(1), (mass * own).sum(1), target], 1)

        return stats

    def log_probs_of_stats(self) -> Any:
        def of_stats(stats: Array) -> tuple[Array, Array, Array]:
            top, mass, moment, label = np.moveaxis(stats.reshape(len(stats), -1, 4), 2, 0)
            share = np.exp(top - top.max(1, keepdims=True))
            sums = (mass * share).sum(1)
            total = top.max(1) + np.log(sums)
            return label.sum(1) - total, total - (moment * share).sum(1) / sums, total

        return of_stats

    def log_prob_grad(self, vocabulary: Vocabulary) -> Any:
        def gradient(logits: Array, labels: Array, *numbers: Array) -> Array:
            totals, entropy, dlogp, dentropy = (own[:, None] for own in numbers)
            log_p = logits[:, : vocabulary.real] * vocabulary.scale - totals
            p = np.exp(log_p)
            own = dlogp * (_one_hot(labels, vocabulary, p) - p) - dentropy * p * (log_p + entropy)
            padding = [(0, 0), (0, vocabulary.width - vocabulary.real)]
            return np.pad(own * vocabulary.scale, padding)

        return gradient

    def linear_log_prob_stats(self, vocabulary: Vocabulary, rows: int) -> Any:
        stats = self.log_prob_stats(vocabulary)
        return lambda x, table, labels: stats(x @ table.T, labels)

    def linear_log_prob_grad(
        self, vocabulary: Vocabulary, rows: int, is_trained: bool = True
    ) -> Any:
        gradient = self.log_prob_grad(vocabulary)

        def both(x: Array, table: Array, *others: Array) -> tuple[Array, Array]:
            dlogits = gradient(x @ table.T, *others)
            return dlogits @ table, dlogits.T @ x

        return both


def _probabilities(logits: Array, routing: Routing) -> Array:
    if routing.is_sigmoid:
        return 1 / (1 + np.exp(-logits))
    mass = np.exp(logits - logits.max(1, keepdims=True))
    return mass / mass.sum(1, keepdims=True)


def _one_hot(labels: Array, vocabulary: Vocabulary, like: Array) -> Array:
    columns = np.arange(like.shape[1]) + vocabulary.first
    return (labels[:, None] == columns).astype(like.dtype)
