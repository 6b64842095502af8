"""The reference mixture-of-experts kernels, in plain MindSpore operations.

Shapes are in contract.Kernels. Every expert computes all rows, and a mask selects its own, so that any number of rows
per expert works with static shapes.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.kernels.mindspore_ops import Glu
from mindgrpo.backend.kernels.shapes import NEVER, Activation, Routing


class _Probabilities(nn.Cell):
    """(x [N, H], weight [H, E]) -> the scores of all experts, float32 [N, E]."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.is_sigmoid, self.matmul = routing.is_sigmoid, ops.MatMul()

    def construct(self, x: Any, weight: Any) -> Any:
        logits = self.matmul(ops.cast(x, ms.float32), ops.cast(weight, ms.float32))
        return ops.sigmoid(logits) if self.is_sigmoid else ops.softmax(logits, -1)


class PlainRouter(nn.Cell):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.probabilities = _Probabilities(routing)
        self.renormalise, self.scaling = routing.renormalise, routing.scaling
        self.sum, self.max = SumExt(), ops.ArgMaxWithValue(1, True)

    def construct(self, x: Any, weight: Any, topk_ids: Any) -> Any:
        is_sent = ops.cast(topk_ids >= 0, ms.float32)
        every = self.probabilities(x, weight)
        scores = ops.gather_elements(every, 1, ops.maximum(topk_ids, 0)) * is_sent
        if self.renormalise:
            # Divides by 1 for tokens without experts.
            _, any_sent = self.max(is_sent)
            scores = scores / (self.sum(scores, (1,), True, None) + (1.0 - any_sent))
        return scores * self.scaling


class PlainChooseExperts(nn.Cell):
    """(x [N, H], weight [H, E], bias [E]) -> (topk_ids int32 [N, K], margins float32 [N]).

    Does not use TopK, which breaks ties differently on different devices.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.probabilities = _Probabilities(routing)
        self.count, self.has_bias = routing.per_token, routing.has_bias
        self.groups, self.taken = routing.groups, routing.groups_taken
        self.ids = Tensor(np.arange(routing.num_experts, dtype=np.float32)[None])
        self.choose, self.slice = ops.Select(), ops.StridedSlice()
        self.max, self.min = ops.ArgMaxWithValue(1, True), ops.ArgMinWithValue(1, True)

    def construct(self, x: Any, weight: Any, bias: Any) -> Any:
        scores = self.probabilities(x, weight)
        if self.has_bias:
            scores = scores + bias
        if self.taken < self.groups:
            scores = self.of_best_groups(scores)
        topk_ids, value = [], scores
        for _ in range(self.count):
            first, value, scores = self.largest(scores)
            topk_ids.append(first)
        _, rest = self.max(scores)
        rest = ops.maximum(rest, NEVER)
        return ops.cast(ops.concat(topk_ids, 1), ms.int32), (value - rest).reshape(-1)

    def first_ids(self, count: int) -> Any:
        return self.slice(self.ids, (0, 0), (1, count), (1, 1))

    def largest(self, scores: Any) -> Any:
        """Finds the largest of float32 scores [N, E], the first of equal ones.

        Returns its column float32 [N, 1], its value [N, 1], and the scores with it masked out [N, E].
        """
        ids = scores * 0.0 + self.first_ids(scores.shape[1])
        _, value = self.max(scores)
        behind = ids * 0.0 + float(scores.shape[1])
        _, first = self.min(self.choose(ops.equal(scores, value), ids, behind))
        return first, value, self.choose(ops.equal(ids, first), ids * 0.0 + 2.0 * NEVER, scores)

    def of_best_groups(self, scores: Any) -> Any:
        """Returns `scores` [N, E], with NEVER in groups that are not eligible."""
        by_group = scores.reshape(-1, scores.shape[1] // self.groups)
        _, best, others = self.largest(by_group)
        _, second, _ = self.largest(others)
        left = (best + second).reshape(-1, self.groups)
        ids = left * 0.0 + self.first_ids(self.groups)
        is_taken = left * 0.0
        for _ in range(self.taken):
            first, _, left = self.largest(left)
            is_taken = is_taken + ops.cast(ops.equal(ids, first), ms.float32)
        own = ops.expand_dims(is_taken, 2) + 0.0 * scores.reshape(
            -1, self.groups, by_group.shape[1]
        )
        own = own.reshape(scores.shape)
        return self.choose(own > 0.5, scores, own * 0.0 + NEVER)


class PlainSortSlots(nn.Cell):
    """topk_ids int32 [N, K] -> (order [N K], counts [E], home [N, K]); counts in float32, exact up to 2^24."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.ids = Tensor(np.arange(routing.num_experts, dtype=np.int32)[None])

    def construct(self, topk_ids: Any) -> Any:
        slots = topk_ids.reshape(-1, 1)
        is_own = ops.cast(ops.equal(slots, self.ids), ms.float32)
        counts = is_own.sum(0, keepdims=True)
        starts = ops.cumsum(counts, 1) - counts
        before = ops.cumsum(is_own, 0) - is_own
        rows = ops.cast((is_own * (before + starts)).sum(1), ms.int32)
        is_sent = ops.cast(slots.reshape(-1) >= 0, ms.int32)
        home = (rows + 1) * is_sent - 1
        # Slots without a row all write to an extra row at the end, which is cut off.
        count = home.shape[0]
        at = ops.expand_dims(rows * is_sent + count * (1 - is_sent), 1)
        numbers = ops.cumsum(is_sent * 0 + 1, 0)
        order = ops.scatter_nd(at, ops.cast(numbers, ms.int32), (count + 1,))[:count] - 1
        return order, ops.cast(counts.reshape(-1), ms.int32), home.reshape(topk_ids.shape)


class _Rows(nn.Cell):
    """(x [N, H], rows int32 [M]) -> [M, H], zeros for -1; calls operators only, since it is used in bprops."""

    def __init__(self) -> None:
        super().__init__()
        self.gather, self.largest, self.cast = ops.Gather(), ops.Maximum(), ops.Cast()
        self.mul, self.expand, self.greater = ops.Mul(), ops.ExpandDims(), ops.GreaterEqual()

    def construct(self, x: Any, rows: Any) -> Any:
        is_there = self.cast(self.greater(rows, 0), x.dtype)
        return self.mul(self.gather(x, self.largest(rows, 0), 0), self.expand(is_there, 1))


class _SumOfSlots(nn.Cell):
    """(y [S, H], scores float32 [N, K], home [N, K]) -> float32 [N, H], the sum of each token's rows times scores."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.slice, self.cast = _Rows(), ops.StridedSlice(), ops.Cast()
        self.mul, self.add, self.reshape = ops.Mul(), ops.Add(), ops.Reshape()

    def construct(self, y: Any, scores: Any, home: Any) -> Any:
        total = self.of_slot(y, scores, home, 0)
        for k in range(1, home.shape[1]):
            total = self.add(total, self.of_slot(y, scores, home, k))
        return total

    def of_slot(self, y: Any, scores: Any, home: Any, k: int) -> Any:
        count = home.shape[0]
        rows = self.reshape(self.slice(home, (0, k), (count, k + 1), (1, 1)), (count,))
        own = self.slice(scores, (0, k), (count, k + 1), (1, 1))
        return self.mul(self.cast(self.rows(y, rows), ms.float32), own)


class PlainTakeRows(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.back = _Rows(), _SumOfSlots()
        self.ones, self.zeros, self.cast = ops.OnesLike(), ops.ZerosLike(), ops.Cast()

    def construct(self, x: Any, order: Any, home: Any) -> Any:
        return self.rows(x, token_of(order, home.shape[1]))

    def bprop(self, x: Any, order: Any, home: Any, out: Any, dout: Any) -> Any:
        ones = self.ones(self.cast(home, ms.float32))
        dx = self.cast(self.back(dout, ones, home), x.dtype)
        return dx, self.zeros(order), self.zeros(home)


def token_of(order: Any, slots: int) -> Any:
    """Returns the token of each row int32 [S], negative for rows without one; `order` int32 [S] holds their slots."""
    return ops.floor_div(order, slots)


def _by_expert(x: Any, counts: Any) -> Any:
    """Returns a mask [S, E] in the dtype of x [S, H]: 1 if the row belongs to the expert, else 0."""
    numbers = ops.expand_dims(ops.cumsum(ops.cast(ops.ones_like(x[:, 0]), ms.float32), 0), 1)
    ends = ops.expand_dims(ops.cumsum(ops.cast(counts, ms.float32), 0), 0)
    starts = ends - ops.expand_dims(ops.cast(counts, ms.float32), 0)
    return ops.cast(ops.logical_and(numbers > starts, numbers <= ends), x.dtype)


class _Column(nn.Cell):
    """(x [M, E], e) -> column e, [M, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.slice = ops.StridedSlice()

    def construct(self, x: Any, e: int) -> Any:
        return self.slice(x, (0, e), (x.shape[0], e + 1), (1, 1))


class PlainExpertMlp(nn.Cell):
    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.glu, self.matmul = Glu(activation), ops.MatMul()
        self.column = _Column()

    def construct(self, x: Any, counts: Any, gate_up: Any, down: Any) -> Any:
        mine = _by_expert(x, counts)
        gates, downs = ops.unstack(gate_up), ops.unstack(down)
        y = ops.zeros_like(x)
        for e in range(gate_up.shape[0]):
            own = self.matmul(self.glu(self.matmul(x, gates[e])), downs[e])
            y = y + own * self.column(mine, e)
        return y


class PlainExpertMatMul(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.matmul, self.column = ops.MatMul(), _Column()

    def construct(self, x: Any, weight: Any, counts: Any) -> Any:
        mine, matrices = _by_expert(x, counts), ops.unstack(weight)
        y = self.matmul(x, matrices[0]) * self.column(mine, 0)
        for e in range(1, weight.shape[0]):
            y = y + self.matmul(x, matrices[e]) * self.column(mine, e)
        return y


class PlainWeightedSum(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.rows = _SumOfSlots(), _Rows()
        self.zeros, self.cast, self.mul = ops.ZerosLike(), ops.Cast(), ops.Mul()
        self.reshape, self.reduce = ops.Reshape(), ops.ReduceSum(True)
        self.slice, self.concat, self.divide = ops.StridedSlice(), ops.Concat(1), ops.FloorDiv()

    def construct(self, y: Any, scores: Any, order: Any, home: Any) -> Any:
        return ops.cast(self.sum(y, scores, home), y.dtype)

    def bprop(self, y: Any, scores: Any, order: Any, home: Any, out: Any, dout: Any) -> Any:
        count, slots = home.shape
        exact = self.cast(dout, ms.float32)
        own = self.rows(self.reshape(scores, (-1, 1)), order)
        dy = self.mul(self.rows(exact, self.divide(order, slots)), own)
        dscores = []
        for k in range(slots):
            rows = self.reshape(self.slice(home, (0, k), (count, k + 1), (1, 1)), (count,))
            products = self.mul(self.cast(self.rows(y, rows), ms.float32), exact)
            dscores.append(self.reduce(products, 1))
        return (
            self.cast(dy, y.dtype),
            self.concat(dscores),
            self.zeros(order),
            self.zeros(home),
        )
