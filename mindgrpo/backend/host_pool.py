"""Memory pools in host pages, which are also the device memory if the device is the CPU.

Offloading and loading remap pages from one address to another without copying, since device and host share the same
memory. Released pages go to the pools that are loaded next (SparePages), or back to the system at once.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mindspore import Parameter, Tensor

from mindgrpo.backend.contract import Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, mindspore_dtype, numpy_dtype
from mindgrpo.backend.host_memory import (
    SparePages,
    chunks_of,
    move_pages,
    private_pages,
    whole_pages,
)


def _view(pages: mmap.mmap, dtype: Dtype, offset: int, shape: Sequence[int]) -> np.ndarray:
    count = int(np.prod(shape, dtype=np.int64))
    start = ITEM_BYTES[dtype] * offset
    return np.frombuffer(pages, numpy_dtype(dtype), count, start).reshape(shape)


class HostPool(Pool):
    is_host_memory = True

    def __init__(self, size: int, dtype: Dtype = "float32") -> None:
        """Allocates `size` elements of `dtype`."""
        self.num_bytes, self.dtype = size * ITEM_BYTES[dtype], dtype
        self._ranges: set[tuple[int, int]] = set()
        self._is_offloaded = False
        self._length = whole_pages(self.num_bytes)
        self._device = self._pages()
        self._host: mmap.mmap | None = None
        self._spare: SparePages | None = None
        self._is_released = False
        # The chunks filled last time predict those filled next time: most of a KV cache may never be used.
        self._chunks = chunks_of(self._device, self._length)

    def _pages(self) -> mmap.mmap:
        return private_pages(self._length)

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
        if self._is_released and self._spare is not None:
            self._spare.take(self._device, self._chunks)
        self._is_released = False

    def release(self) -> None:
        if self._is_offloaded and self._host is not None:
            self._host.madvise(mmap.MADV_DONTNEED)
        elif self._spare is not None and not self._is_released:
            self._chunks = self._spare.put(self._device, self._length)
        else:
            self._device.madvise(mmap.MADV_DONTNEED)
        self._is_offloaded, self._is_released = False, True

    def take_turns(self, spare: SparePages, is_empty: bool) -> None:
        self._spare, self._is_released = spare, is_empty

    def _move(self, source: mmap.mmap, target: mmap.mmap) -> None:
        if not move_pages(source, 0, target, 0, self._length):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
            source.madvise(mmap.MADV_DONTNEED)


class SharedPool(HostPool):
    """A pool that other ranks of the host can read, backed by an anonymous file (memfd).

    Offloading leaves its pages in place: pages moved out of the file could not be read by other ranks.
    """

    def _pages(self) -> mmap.mmap:
        self.descriptor = os.memfd_create("mindgrpo-pool", os.MFD_CLOEXEC)
        # The pages live as long as a view of this pool or another rank has them mapped.
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self._length)
        return mmap.mmap(self.descriptor, self._length)

    def offload(self) -> None:
        """Does nothing: the pages are in host memory already."""

    def load(self) -> None:
        """Does nothing: the pages are still there."""

    def take_turns(self, spare: SparePages, is_empty: bool) -> None:
        """Does nothing: the pages belong to the file."""

    def release(self) -> None:
        self._device.madvise(mmap.MADV_REMOVE)


class PeerPool:
    """A read-only view of another rank's SharedPool. Raises OSError if the system forbids access."""

    def __init__(self, process: int, descriptor: int, num_bytes: int, dtype: Dtype) -> None:
        self.num_bytes, self._dtype = num_bytes, dtype
        length = whole_pages(num_bytes)
        handle = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY)
        try:
            self._pages = mmap.mmap(handle, length, prot=mmap.PROT_READ)
        finally:
            os.close(handle)

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        return _view(self._pages, self._dtype, offset, shape)

    def forget(self) -> None:
        """Drops the pages read so far from this process's resident memory; later reads map them again."""
        self._pages.madvise(mmap.MADV_DONTNEED)
