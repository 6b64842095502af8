"""The CPU as a device, to test the code for NPUs: MCCL between ranks, and device memory kept apart from host arrays.

A point-to-point transfer is an all-reduce over two ranks in which the receiver contributes zeros: it is the only
operation that MCCL has between two ranks, and it blocks until both have called it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from mindgrpo.backend.device.backend import DeviceBackend
from mindgrpo.backend.dtypes import Dtype, device_bits, numpy_dtype
from mindgrpo.backend.group_cells import (
    ExchangeByGather,
    GatherBySum,
    MindSporeSum,
    ScatterBySum,
    SumInFloat32,
)
from mindgrpo.backend.kernels.contract import Kernels


class HostCpuBackend(DeviceBackend):
    name = "CPU, mccl"
    communication = "mccl"

    def __init__(self, environment: dict[str, str], compiled: bool = True) -> None:
        self.kernels = Kernels()
        # The memory of tensors, by address.
        self._pages: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
        super().__init__(environment, compiled)

    def _open(self) -> None:
        if self.world_size > 1:
            # A rank without a second core of its own gets no threads that spin between operations.
            threads = max(1, len(os.sched_getaffinity(0)) // self.world_size)
            ms.set_context(runtime_num_threads=threads - 1, inter_op_parallel_num=1)

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        # Separate mappings can be returned to the system at once, unlike memory of MindSpore's allocator.
        count = int(np.prod(shape, dtype=np.int64))
        kind = numpy_dtype(dtype)
        size = max(1, kind.itemsize * count)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(pages, kind, count).reshape(shape)
        self._pages[array.ctypes.data] = pages
        return Tensor.from_numpy(array)

    def give_up(self, parameter: Any) -> None:
        # Graphs that used the parameter hold a reference to its memory until they run again.
        pages = self._pages.pop(parameter.asnumpy().ctypes.data, None)
        if pages is not None:
            pages.madvise(mmap.MADV_DONTNEED)

    def copied(self, array: np.ndarray, dtype: Dtype) -> Tensor:
        tensor = self.zeros(array.shape, dtype)
        np.copyto(tensor.asnumpy(), array)
        return tensor

    def synchronize(self) -> None:
        # MindSpore's synchronize rejects the CPU. Operations run in order, so waiting for a new one waits for all.
        mint.zeros((1,)).asnumpy()

    def sum_cell(self, group: str) -> nn.Cell:
        # MCCL cannot add 16-bit floats.
        return SumInFloat32(MindSporeSum(group))

    def gather_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return GatherBySum(self.sum_cell(group), index, size)

    def scatter_sum_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return ScatterBySum(self.sum_cell(group), index)

    def exchange_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return ExchangeByGather(self.gather_cell(group, index, size), index)

    def _transfer(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        transfers = [(self.rank, peer) for peer in sends]
        transfers += [(peer, self.rank) for peer in receives]
        # The same order on all ranks avoids deadlocks: each transfer blocks both of its ends.
        for source, target in sorted(transfers, key=lambda ends: (min(ends), max(ends), ends)):
            group = self._name_of((min(source, target), max(source, target)))
            # As integers, since adding zero then preserves every bit, also of -0.0 and NaN.
            if source == self.rank:
                outgoing = joined_bits(sends[target])
                ops.communication.all_reduce(outgoing, group=group)
                outgoing[:1].asnumpy()
                continue
            wanted = receives[source]
            incoming = mint.zeros((sum(tensor.size for tensor in wanted),), dtype=ms.int32)
            ops.communication.all_reduce(incoming, group=group)
            fill(wanted, incoming)
            wanted[0].reshape(-1)[:1].asnumpy()


def joined_bits(tensors: Sequence[Any]) -> Any:
    """Concatenates the bits of all tensors' elements as int32 [total size], since MCCL cannot sum 16-bit integers."""
    return mint.cat([device_bits(tensor).reshape(-1).astype(ms.int32) for tensor in tensors])


def fill(tensors: Sequence[Any], bits: Any) -> None:
    """Writes `bits` int32 [total size], made by `joined_bits` from tensors of equal shapes, into `tensors`."""
    by_tensor = mint.split(bits, [tensor.size for tensor in tensors])
    for tensor, values in zip(tensors, by_tensor, strict=True):
        own = device_bits(tensor)
        own[:] = values.reshape(own.shape).astype(own.dtype)
