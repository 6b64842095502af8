"""A pool of pages: device memory where the device is the host itself.

Offloading and loading move pages from one address to another, and nothing is copied: device and host are one memory
here. Released pages go back to the system at once, so memory that the ledger counts as given up is given up in the
process too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mindspore import Parameter, Tensor

from mindgrpo.backend.contract import Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, mindspore_dtype, numpy_dtype

ALIGN_BYTES = 4096
# Pages of 2 MiB: filling given-up memory again takes 500 times fewer faults.
HUGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 8 * HUGE_BYTES
MAY_MOVE, FIXED, LEAVE_MAPPED = 1, 2, 4  # mremap(2)
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


def _private_pages(num_bytes: int) -> mmap.mmap:
    # Python's default is shared pages: given up, they would leave the process and still be kept by the system.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_FROM_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _whole_pages(num_bytes: int) -> int:
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def _view(pages: mmap.mmap, dtype: Dtype, offset: int, shape: Sequence[int]) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    start = ITEM_BYTES[dtype] * offset
    return np.frombuffer(pages, numpy_dtype(dtype), count, start).reshape(shape)


def _address(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, np.uint8).ctypes.data)


class HostPool(Pool):
    is_host_memory = True

    def __init__(self, size: int, dtype: Dtype = "float32") -> None:
        """`size` is in elements."""
        self.num_bytes, self.dtype = size * ITEM_BYTES[dtype], dtype
        self._ranges: set[tuple[int, int]] = set()
        self._is_offloaded = False
        self._length = _whole_pages(self.num_bytes)
        self._device = self._pages()
        self._host: mmap.mmap | None = None

    def _pages(self) -> mmap.mmap:
        return _private_pages(self._length)

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        return _view(self._device, self.dtype, offset, shape)

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Parameter:
        count = int(np.prod(shape, dtype=np.int64))
        if (offset, count) in self._ranges:
            raise ValueError(
                f"{count} elements from {offset} on have a parameter: {name} is another"
            )
        self._ranges.add((offset, count))
        parameter = Parameter(Tensor([0.0], mindspore_dtype(self.dtype)), name)
        parameter.set_data(Tensor.from_numpy(self.view(offset, shape)), slice_shape=True)
        return parameter

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[HostPool]:
        yield self

    def offload(self) -> None:
        if self._host is None:
            self._host = self._pages()
        self._move(self._device, self._host)
        self._is_offloaded = True

    def load(self) -> None:
        if self._is_offloaded and self._host is not None:
            self._move(self._host, self._device)
            self._is_offloaded = False

    def release(self) -> None:
        self._is_offloaded = False
        self._device.madvise(mmap.MADV_DONTNEED)
        if self._host is not None:
            self._host.madvise(mmap.MADV_DONTNEED)

    def _move(self, source: mmap.mmap, target: mmap.mmap) -> None:
        length = ctypes.c_size_t(self._length)
        places = ctypes.c_void_p(_address(source)), ctypes.c_void_p(_address(target))
        flags = ctypes.c_int(MAY_MOVE | FIXED | LEAVE_MAPPED)
        moved = _libc.mremap(places[0], length, length, flags, places[1])
        if moved == FAILED:  # a system that cannot leave the source mapped (before Linux 5.7)
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            source.madvise(mmap.MADV_DONTNEED)


class SharedPool(HostPool):
    """A pool that other ranks of the host can read, through a file that has no name.

    Its pages stay where they are when it is offloaded: they cannot leave the file and be read by others too.
    """

    def _pages(self) -> mmap.mmap:
        self.descriptor = os.memfd_create("mindgrpo-pool", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, self._length)
        return mmap.mmap(self.descriptor, self._length)

    def offload(self) -> None:
        """The pages are the host's already."""

    def load(self) -> None:
        """The pages are still there."""

    def release(self) -> None:
        self._device.madvise(mmap.MADV_REMOVE)


class PeerPool:
    """Another rank's SharedPool, to be read only. Raises OSError where the system forbids it."""

    def __init__(self, process: int, descriptor: int, num_bytes: int, dtype: Dtype) -> None:
        self.num_bytes, self._dtype = num_bytes, dtype
        length = _whole_pages(num_bytes)
        handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
        try:
            self._pages = mmap.mmap(handle, length, prot=mmap.PROT_READ)
        finally:
            os.close(handle)

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        return _view(self._pages, self._dtype, offset, shape)

    def forget(self) -> None:
        """What was read no longer counts as this process's memory; it is read again when it is wanted."""
        self._pages.madvise(mmap.MADV_DONTNEED)
