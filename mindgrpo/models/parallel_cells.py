"""Tensor-parallel building blocks as plain cells (Megatron-LM, arXiv:1909.08053, section 3).

The conjugate operators f and g carry their own backward, and so do those of sequence parallelism (arXiv:2205.05198,
section 4.2.2); everything else is ordinary graph code. The collectives of a graph depend on each other: independent
ones would run in an order of its own on every rank.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from mindgrpo.backend.contract import Group
from mindgrpo.backend.group_cells import SumInFloat32


def _in_float32(total: nn.Cell, wanted: bool) -> nn.Cell:
    return SumInFloat32(total) if wanted else total


class CopyTo(nn.Cell):
    """f: the identity, whose gradient is summed over the group, in its own dtype or `in_float32`."""

    def __init__(self, group: Group, in_float32: bool) -> None:
        super().__init__()
        self.alone = group.size == 1
        self.total = _in_float32(group.sum_cell(), in_float32)

    def construct(self, x: Any) -> Any:
        return x

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        if self.alone:
            return (dout,)
        return (ops.cast(self.total(dout), x.dtype),)


class ReduceFrom(nn.Cell):
    """g: the sum over the group, in its own dtype or `in_float32`, whose gradient is the identity.

    Of a model that is never trained (`is_trained`), last bits may differ between ranks.
    """

    def __init__(self, group: Group, is_trained: bool, in_float32: bool) -> None:
        super().__init__()
        self.alone = group.size == 1
        total = group.sum_cell() if is_trained else group.quick_sum_cell()
        self.total = _in_float32(total, in_float32)

    def construct(self, x: Any) -> Any:
        if self.alone:
            return x
        return self.total(x)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout,)


class GatherTokens(nn.Cell):
    """A rank's own tokens [n, H] -> those of the group, [size * n, H], in its order.

    The gradient is that of the own tokens: summed over the group, in its own dtype or `in_float32`, or where it
    `is_whole` on every rank, as it is.
    """

    def __init__(self, group: Group, in_float32: bool, is_whole: bool = False) -> None:
        super().__init__()
        self.size, self.index, self.is_whole = group.size, group.index, is_whole
        self.gather = group.gather_cell()
        self.scatter = _in_float32(group.scatter_sum_cell(), in_float32)
        # Not an index: of functions that a bprop calls, MindSpore 2.9 loses nodes in some graphs, of operations never.
        self.slice = ops.StridedSlice()

    def construct(self, x: Any) -> Any:
        return self.gather(x).reshape(-1, x.shape[-1])

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        count, width = x.shape
        if self.is_whole:
            start = self.index * count
            own = self.slice(dout, (start, 0), (start + count, width), (1, 1))
        else:
            own = self.scatter(dout.reshape(self.size, count, width))
        return (ops.cast(own, x.dtype),)


class GatheredProduct(nn.Cell):
    """(own tokens [n, in], weight [in, out]) -> `product` of all tokens, of which the own ones are kept.

    For the gradient they are gathered again, once its other factor is there; `back` and `gradient` are the kernels'
    matmul_back and matmul_gradient.
    """

    def __init__(
        self, product: Any, back: Any, gradient: Any, group: Group, in_float32: bool
    ) -> None:
        super().__init__()
        self.size, self.product = group.size, product
        self.back, self.gradient = back, gradient
        self.gather = group.gather_cell()
        self.scatter = _in_float32(group.scatter_sum_cell(), in_float32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.product(self.gather(x).reshape(-1, x.shape[-1]), weight)

    def bprop(self, x: Any, weight: Any, out: Any, dout: Any) -> Any:
        whole = self.gather(ops.depend(x, dout)).reshape(-1, x.shape[-1])
        by_rank = self.back(ops.depend(dout, whole), weight).reshape(self.size, -1, x.shape[-1])
        return ops.cast(self.scatter(by_rank), x.dtype), self.gradient(whole, dout)


class Entering(nn.Cell):
    """`product` of what `enter` makes of hidden states."""

    def __init__(self, enter: nn.Cell, product: nn.Cell) -> None:
        super().__init__()
        self.enter, self.product = enter, product

    def construct(self, x: Any) -> Any:
        return self.product(self.enter(x))


class ScatterTokens(nn.Cell):
    """(y [N, H], after) -> a rank's own tokens [N / size, H] of the sum of y over the group.

    The gradient is gathered once `after` is computed: in a layer that is computed again, its own gathers come first.
    """

    def __init__(self, group: Group, in_float32: bool) -> None:
        super().__init__()
        self.size = group.size
        self.scatter = _in_float32(group.scatter_sum_cell(), in_float32)
        self.gather = group.gather_cell()
        self.zeros = ops.ZerosLike()

    def construct(self, y: Any, after: Any) -> Any:
        return self.scatter(y.reshape(self.size, -1, y.shape[-1]))

    def bprop(self, y: Any, after: Any, out: Any, dout: Any) -> Any:
        whole = self.gather(ops.depend(dout, after)).reshape(y.shape)
        return ops.cast(whole, y.dtype), self.zeros(after)


class ExchangeRows(nn.Cell):
    """Rows [size * n, H], n for each member of the group -> those that each has for this one, in its order.

    The gradient goes the same way back, once everything arrived: in a layer that is computed again, its own exchanges
    come first.
    """

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.size, self.exchange = group.size, group.exchange_cell()

    def construct(self, x: Any) -> Any:
        return self.by_member(x)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (self.by_member(ops.depend(dout, out)),)

    def by_member(self, x: Any) -> Any:
        return self.exchange(x.reshape(self.size, -1, x.shape[-1])).reshape(x.shape)


class Leave(nn.Cell):
    """(y, after) -> what `cell`, a ReduceFrom or a ScatterTokens, makes of y."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell, self.is_scatter = cell, isinstance(cell, ScatterTokens)

    def construct(self, y: Any, after: Any) -> Any:
        if self.is_scatter:
            return self.cell(y, ops.stop_gradient(after))
        return self.cell(y)


class UnsharedRows(nn.Cell):
    """(positions, spans, columns) -> what `cell` makes of the first two, of rows that no other rank shares."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, positions: Any, spans: Any, columns: Any) -> Any:
        return self.cell(positions, spans)


class SumOverTokens(nn.Cell):
    """The sum over a group whose ranks have tokens of their own, and all use it: so its gradient is a sum as well."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.copy, self.reduce = CopyTo(group, False), ReduceFrom(group, True, False)

    def construct(self, x: Any) -> Any:
        return self.copy(self.reduce(x))


class Float32Gradient(nn.Cell):
    """The identity of a weight, whose gradients are added up in float32."""

    def construct(self, weight: Any) -> Any:
        return weight

    def bprop(self, weight: Any, out: Any, dout: Any) -> Any:
        return (ops.cast(dout, ms.float32),)


class ToFloat32(nn.Cell):
    """A vector of weights in float32, whose gradient stays float32: its sum over tokens would lose most digits."""

    def __init__(self) -> None:
        super().__init__()
        self.cast = ops.Cast()

    def construct(self, x: Any) -> Any:
        return self.cast(x, ms.float32)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout,)


class Same(nn.Cell):
    """The identity."""

    def construct(self, x: Any) -> Any:
        return x


class Linear(nn.Cell):
    """x [N, in] @ weight [in, out], by a `matmul` of the kernels; `exact` is what weights go through.

    Matrices of experts [E, in, out] take the rows of each beside x (expert_matmul).
    """

    def __init__(self, weight: Any, matmul: Any, exact: nn.Cell) -> None:
        super().__init__()
        self.weight = weight
        self.matmul, self.exact = matmul, exact
        self.is_of_experts = len(weight.shape) > 2

    # Not `*rows`: of what takes any number of arguments MindSpore computes nothing again.
    def construct(self, x: Any, rows: Any = None) -> Any:
        return self.product(x, self.weight, rows)

    def product(self, x: Any, weight: Any, rows: Any = None) -> Any:
        """Computes the same with another weight."""
        if self.is_of_experts:
            return self.matmul(x, self.exact(weight), rows)
        return self.matmul(x, self.exact(weight))


class BiasedLinear(nn.Cell):
    """x [N, in] @ weight [in, out] + bias [out], by `add_matmul` of the kernels."""

    def __init__(self, bias: Any, weight: Any, add_matmul: nn.Cell) -> None:
        super().__init__()
        self.bias, self.weight = bias, weight
        self.add_matmul = add_matmul

    def construct(self, x: Any) -> Any:
        return self.add_matmul(self.bias, x, self.weight)


class GatherColumns(nn.Cell):
    """x [B, k] on each rank -> [B, size, k] on all."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.alone = group.size == 1
        self.gather = group.gather_cell()

    def construct(self, x: Any) -> Any:
        if self.alone:
            return ops.expand_dims(x, 1)
        return self.gather(x).transpose(1, 0, 2)
