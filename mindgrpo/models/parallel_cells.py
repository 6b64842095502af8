"""Tensor-parallel building blocks as plain cells (Megatron-LM, arXiv:1909.08053, section 3).

The conjugate operators f and g carry their own backward; everything else is ordinary graph code.
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
        return (self.total(dout).astype(x.dtype),)


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


class Float32Gradient(nn.Cell):
    """The identity of a weight, whose gradients are added up in float32."""

    def construct(self, weight: Any) -> Any:
        return weight

    def bprop(self, weight: Any, out: Any, dout: Any) -> Any:
        return (dout.astype(ms.float32),)


class ToFloat32(nn.Cell):
    """A vector of weights in float32, whose gradient stays float32: its sum over tokens would lose most digits."""

    def construct(self, x: Any) -> Any:
        return x.astype(ms.float32)

    def bprop(self, x: Any, out: Any, dout: Any) -> Any:
        return (dout,)


class Same(nn.Cell):
    """The identity."""

    def construct(self, x: Any) -> Any:
        return x


class Linear(nn.Cell):
    """x [N, in] @ weight [in, out], by a `matmul` of the kernels; `exact` is what weights go through."""

    def __init__(self, weight: Any, matmul: Any, exact: nn.Cell) -> None:
        super().__init__()
        self.weight = weight
        self.matmul, self.exact = matmul, exact

    def construct(self, x: Any) -> Any:
        return self.product(x, self.weight)

    def product(self, x: Any, weight: Any) -> Any:
        """Computes the same with another weight."""
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
