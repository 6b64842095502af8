"""Cells for collectives inside graphs, built on MindSpore's all-reduce or on other collectives."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

# In elements; above, all-gathering whole tensors takes longer than a second collective.
MOST_GATHERED = 16 << 10


class MindSporeSum(nn.Cell):
    """MindSpore's all-reduce (sum) over group `name`, [...] -> [...]; last bits may differ between members."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = ops.AllReduce(ops.ReduceOp.SUM, name)

    def construct(self, x: Any) -> Any:
        return self.call(x)


class SumInFloat32(nn.Cell):
    """All-reduce `total` for 16-bit tensors, [...] -> [...]: adds in float32 and rounds once."""

    def __init__(self, total: nn.Cell) -> None:
        super().__init__()
        self.total = total

    def construct(self, x: Any) -> Any:
        return ops.cast(self.total(ops.cast(x, ms.float32)), x.dtype)


class GatherBySum(nn.Cell):
    """All-gather [...] -> [size, ...] as an all-reduce `total` of tensors that are zero except at the own index."""

    def __init__(self, total: nn.Cell, index: int, size: int) -> None:
        super().__init__()
        self.total = total
        self.one_hot = Tensor(np.arange(size) == index, ms.float32)
        self.size = size
        self.reshape, self.expand = ops.Reshape(), ops.ExpandDims()

    def construct(self, x: Any) -> Any:
        mask = self.reshape(self.one_hot, (self.size,) + (1,) * len(x.shape))
        return self.total(ops.cast(mask, x.dtype) * self.expand(x, 0))


class ScatterBySum(nn.Cell):
    """Reduce-scatter (sum) [size, ...] -> [...]: entry `index` of an all-reduce `total` of everything."""

    def __init__(self, total: nn.Cell, index: int) -> None:
        super().__init__()
        self.total, self.index = total, index
        self.slice = ops.StridedSlice()

    def construct(self, x: Any) -> Any:
        own = x.shape[1:]
        begin, end = (self.index,) + (0,) * len(own), (self.index + 1, *own)
        return self.slice(self.total(x), begin, end, (1,) * len(end)).reshape(own)


class ExchangeByGather(nn.Cell):
    """All-to-all [size, ...] -> [size, ...]: each member's entry `index`, taken from an all-gather of everything."""

    def __init__(self, gather: nn.Cell, index: int) -> None:
        super().__init__()
        self.gather, self.index = gather, index
        self.slice, self.reshape = ops.StridedSlice(), ops.Reshape()

    def construct(self, x: Any) -> Any:
        size, *own = x.shape
        begin, end = (0, self.index) + (0,) * len(own), (size, self.index + 1, *own)
        return self.reshape(self.slice(self.gather(x), begin, end, (1,) * len(end)), x.shape)


class AgreedSum(nn.Cell):
    """All-reduce (sum) [...] -> [...], bitwise identical on all members even if the transport's own all-reduce is not.

    Small tensors (MOST_GATHERED elements) are all-gathered and added in the order of the members. Large ones are
    reduce-scattered and all-gathered, which moves as many bytes as a ring all-reduce.
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
            # Padding; its values do not matter, since their sums are cut off below.
            flat = ops.concat((flat, flat[:missing]))
        total = self.gather(self.scatter(flat.reshape(self.size, -1))).reshape(-1)
        if missing > 0:
            total = total[:count]
        return total.reshape(x.shape)
