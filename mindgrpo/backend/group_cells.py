"""What groups offer inside graphs: the sum over the members and the gathering of what each has, as cells.

A cell for each transport; the same contract for all.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.cpu.shared_group import NativeGroup, SharedGroup
from mindgrpo.backend.kernels.native import library as native_library


def _same(x: Any) -> Any:
    return x


def _same_as_first(x: Any, group: Any) -> Any:
    return x


class AloneSum(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x


class AloneGather(nn.Cell):
    def construct(self, x: Any) -> Any:
        return ops.expand_dims(x, 0)


class NativeSum(nn.Cell):
    """Through the C library, which finds the group by its number."""

    def __init__(self, group: NativeGroup) -> None:
        super().__init__()
        self.group = Tensor([group.kernel_id], ms.int32)
        self.call = native_library.operation("shared_sum", _same_as_first, _same_as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class NativeGather(nn.Cell):
    def __init__(self, group: NativeGroup) -> None:
        super().__init__()
        self.group = Tensor([group.kernel_id], ms.int32)
        size = len(group.ranks)

        def stacked(x: Any, group: Any) -> Any:
            return [size, *x]

        self.call = native_library.operation("shared_gather", stacked, _same_as_first)

    def construct(self, x: Any) -> Any:
        return self.call(x, self.group)


class PythonSum(nn.Cell):
    """Without a C compiler: a Python call on numpy arrays."""

    def __init__(self, group: SharedGroup) -> None:
        super().__init__()

        def call(x: np.ndarray) -> np.ndarray:
            source = np.ascontiguousarray(x)
            out = np.empty_like(source)
            group.sum_into(source.reshape(-1), out.reshape(-1))
            return out

        self.call = ops.Custom(call, out_shape=_same, out_dtype=_same, func_type="pyfunc")

    def construct(self, x: Any) -> Any:
        return self.call(x)


class MindSporeSum(nn.Cell):
    """MindSpore's own, over whatever joins the ranks of group `name`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = ops.AllReduce(ops.ReduceOp.SUM, name)

    def construct(self, x: Any) -> Any:
        return self.call(x)


class GatherBySum(nn.Cell):
    """A sum of arrays that are zero in the others' places."""

    def __init__(self, total: nn.Cell, index: int, size: int) -> None:
        super().__init__()
        self.total = total
        self.one_hot = Tensor(np.arange(size) == index, ms.float32)
        self.size = size

    def construct(self, x: Any) -> Any:
        mask = ops.reshape(self.one_hot, (self.size,) + (1,) * len(x.shape))
        return self.total(mask * ops.expand_dims(x, 0))
