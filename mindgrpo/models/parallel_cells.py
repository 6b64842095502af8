"""Tensor-parallel building blocks as plain cells (Megatron-LM, arXiv:1909.08053, section 3).

The conjugate operators f and g have custom backwards, and so do those of sequence parallelism (arXiv:2205.05198,
section 4.2.2); everything else is ordinary graph code. The collectives of a graph are chained by dependencies, since
independent ones could run in a different order on each rank.
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
    """f: identity [...] in the forward, all-reduce in the backward, in the gradient's dtype or `in_float32`."""

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
    """g: all-reduce [...] in the forward, in its own dtype or `in_float32`, identity in the backward.

    Unless the model `is_trained`, last bits may differ between ranks.
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
    """All-gathers a rank's tokens [n, H] -> [size * n, H], in rank order.

    The backward reduce-scatters the gradient, in its own dtype or `in_float32`; if the gradient `is_whole` (already the
    same on every rank), it takes this rank's slice.
    """

    def __init__(self, group: Group, in_float32: bool, is_whole: bool = False) -> None:
        super().__init__()
        self.size, self.index, self.is_whole = group.size, group.index, is_whole
        self.gather = group.gather_cell()
        self.scatter = _in_float32(group.scatter_sum_cell(), in_float32)
        # An operator, not an index: in some graphs MindSpore 2.9 loses nodes of functions that a bprop calls.
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
    """(this rank's tokens [n, in], weight [in, out]) -> GEMM of all tokens [size * n, out]; stores its own tokens only.

    The backward gathers them again, once the output's gradient is available. `product`, `back` and `gradient` are
    matmul, matmul_back and matmul_gradient of the kernels.
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
    """x_NH -> product(enter(x)), where `enter` is an f (CopyTo) or a GatherTokens."""

    def __init__(self, enter: nn.Cell, product: nn.Cell) -> None:
        super().__init__()
        self.enter, self.product = enter, product

    def construct(self, x: Any) -> Any:
        return self.product(self.enter(x))


class ScatterTokens(nn.Cell):
    """(y [N, H], after) -> [N / size, H]: reduce-scatters y over tokens.

    The backward all-gathers, but only once `after` is available: in a recomputed layer, the gathers of the
    recomputation have to come first.
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
    """All-to-all of rows [size * n, H], n for each member -> [size * n, H], n from each member, in rank order.

    The backward is the same all-to-all, after the forward's: in a recomputed layer, the exchanges of the recomputation
    have to come first.
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
    """(y [N, H], after) -> cell(y), for a ReduceFrom, or cell(y, after), for a ScatterTokens."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell, self.is_scatter = cell, isinstance(cell, ScatterTokens)

    def construct(self, y: Any, after: Any) -> Any:
        if self.is_scatter:
            return self.cell(y, ops.stop_gradient(after))
        return self.cell(y)


class UnsharedRows(nn.Cell):
    """(positions, spans, columns) -> cell(positions, spans), without context parallelism."""

    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell

    def construct(self, positions: Any, spans: Any, columns: Any) -> Any:
        return self.cell(positions, spans)


class SumOverTokens(nn.Cell):
    """All-reduces [...] in the forward and in the backward, for a sum over tokens that every rank uses."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.copy, self.reduce = CopyTo(group, False), ReduceFrom(group, True, False)

    def construct(self, x: Any) -> Any:
        return self.copy(self.reduce(x))


class Float32Gradient(nn.Cell):
    """The identity of a weight [...], which casts its gradient to float32, so that gradients accumulate in float32."""

    def construct(self, weight: Any) -> Any:
        return weight

    def bprop(self, weight: Any, out: Any, dout: Any) -> Any:
        return (ops.cast(dout, ms.float32),)


class ToFloat32(nn.Cell):
    """Casts a weight [...] to float32, and keeps its gradient in float32: a 16-bit sum over tokens loses precision."""

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
    """x [N, in] @ weight [in, out] -> [N, out], with a `matmul` of the kernels; weights pass through `exact` first.

    For experts, the weight is [E, in, out], `matmul` is an expert_matmul, and `rows` int32 [E] are the rows of each.
    """

    def __init__(self, weight: Any, matmul: Any, exact: nn.Cell) -> None:
        super().__init__()
        self.weight = weight
        self.matmul, self.exact = matmul, exact
        self.is_of_experts = len(weight.shape) > 2

    # Not `*rows`: MindSpore does not recompute cells with variadic arguments.
    def construct(self, x: Any, rows: Any = None) -> Any:
        return self.product(x, self.weight, rows)

    def product(self, x: Any, weight: Any, rows: Any = None) -> Any:
        """Like construct, but with the given weight."""
        if self.is_of_experts:
            return self.matmul(x, self.exact(weight), rows)
        return self.matmul(x, self.exact(weight))


class BiasedLinear(nn.Cell):
    """x [N, in] @ weight [in, out] + bias [out] -> [N, out], with an `add_matmul` of the kernels."""

    def __init__(self, bias: Any, weight: Any, add_matmul: nn.Cell) -> None:
        super().__init__()
        self.bias, self.weight = bias, weight
        self.add_matmul = add_matmul

    def construct(self, x: Any) -> Any:
        return self.add_matmul(self.bias, x, self.weight)


class GatherColumns(nn.Cell):
    """All-gathers x [B, k] -> [B, size, k]."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.alone = group.size == 1
        self.gather = group.gather_cell()

    def construct(self, x: Any) -> Any:
        if self.alone:
            return ops.expand_dims(x, 1)
        return self.gather(x).transpose(1, 0, 2)
