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

# Elements; above, the bytes of a gather over several members take longer than a second transfer.
MOST_GATHERED = 16 << 10


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
    """MindSpore's own, over whatever joins the ranks of group `name`; last bits may differ between members."""

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


class ScatterBySum(nn.Cell):
    """x [size, n] -> the sum over the members of what each has at [index], [n]: a sum of all of it."""

    def __init__(self, total: nn.Cell, index: int) -> None:
        super().__init__()
        self.total, self.index = total, index

    def construct(self, x: Any) -> Any:
        return self.total(x)[self.index]


class AgreedSum(nn.Cell):
    """A sum with the same bits on every member, though the transport may add in another order on each of them.

    Few elements are gathered and added in the order of the members. Of many, each member adds up its share (`scatter`)
    and hands it to the others: as many bytes as a sum around a ring.
    """

    def __init__(self, scatter: nn.Cell, gather: nn.Cell, size: int) -> None:
        super().__init__()
        self.scatter, self.gather, self.size = scatter, gather, size

    def construct(self, x: Any) -> Any:
        count = 1
        for extent in x.shape:
            count = count * extent
        if count <= MOST_GATHERED:
            rows = self.gather(x)
            total = rows[0]
            for member in range(1, self.size):
                total = total + rows[member]
            return total
        flat, missing = x.reshape(-1), -count % self.size
        if missing > 0:
            # Any numbers: their sums are cut off.
            flat = ops.concat((flat, flat[:missing]))
        total = self.gather(self.scatter(flat.reshape(self.size, -1))).reshape(-1)
        if missing > 0:
            total = total[:count]
        return total.reshape(x.shape)
