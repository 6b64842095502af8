"""Groups and links of ranks over MindSpore's communication."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Group, Link
from mindgrpo.backend.device.hardware import Hardware
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.group_cells import AgreedSum, AloneGather, AloneSum, MindSporeSum
from mindgrpo.health.rank_health import RankHealth


class DeviceGroup(Group):
    """`name` is MindSpore's of the group; empty for a rank alone."""

    def __init__(
        self, ranks: Sequence[int], index: int, name: str, hardware: Hardware, health: RankHealth
    ) -> None:
        self.ranks, self.index = tuple(ranks), index
        self._name, self._hardware, self._health = name, hardware, health

    def sum_cell(self) -> nn.Cell:
        if not self._name:
            return AloneSum()
        scatter = self._hardware.scatter_sum_cell(self._name, self.index, self.size)
        return AgreedSum(scatter, self.gather_cell(), self.size)

    def quick_sum_cell(self) -> nn.Cell:
        return MindSporeSum(self._name) if self._name else AloneSum()

    def gather_cell(self) -> nn.Cell:
        if not self._name:
            return AloneGather()
        return self._hardware.gather_cell(self._name, self.index, self.size)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        if self._name:
            # By way of all members' arrays: in rank order, and in the dtype that they have.
            arrays = self.gather_objects(array)
            array[...] = arrays[0]
            for other in arrays[1:]:
                array += other
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        if not self._name:
            return [value]
        payload = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = np.zeros(self.size, np.int32)
        sizes[self.index] = payload.size
        sizes = self._sum(sizes)
        words = np.zeros((self.size, -(-int(sizes.max()) // 4)), np.int32)
        words[self.index].view(np.uint8)[: payload.size] = payload
        rows = self._sum(words).view(np.uint8)
        return [pickle.loads(row[:n].data) for row, n in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        if self._name:
            self._sum(np.zeros(1, np.int32))

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """Of int32, which every member has zeros in for what is the others'."""
        with waiting(self._health):
            total = Tensor(array)
            ops.communication.all_reduce(total, group=self._name)
            result: np.ndarray = total.asnumpy()
        return result


class DeviceLink(Link):
    def __init__(
        self,
        peer: int,
        shape: Sequence[int],
        exchange: Callable[[Mapping[int, Any], Mapping[int, Sequence[int]], Dtype], dict[int, Any]],
        dtype: Dtype,
    ) -> None:
        self._peer, self._shape = peer, tuple(shape)
        self._exchange, self._dtype = exchange, dtype

    def exchange(self, outgoing: Any | None, receives: bool) -> Any | None:
        sends = {} if outgoing is None else {self._peer: outgoing}
        wanted = {self._peer: self._shape} if receives else {}
        return self._exchange(sends, wanted, self._dtype).get(self._peer)


@contextmanager
def waiting(health: RankHealth) -> Iterator[None]:
    """The health of this rank knows since when it waits for others."""
    health.waits(time.monotonic())
    try:
        yield
    finally:
        health.waits(0.0)
