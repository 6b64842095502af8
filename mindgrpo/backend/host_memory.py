"""Remaps pages of this process's memory instead of copying them, and batches array copies in one C kernel call."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mindgrpo.backend.kernels.native.library import library

ALIGN_BYTES = 4096
# Pages of 2 MiB: touching released memory again takes 500 times fewer page faults.
HUGE_BYTES = 2 << 20
CHUNK_BYTES = 8 * HUGE_BYTES
MAY_MOVE, FIXED, LEAVE_MAPPED = 1, 2, 4  # mremap(2)
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


def whole_pages(num_bytes: int) -> int:
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def private_pages(num_bytes: int) -> mmap.mmap:
    # Python's default is shared pages, which the system would keep after MADV_DONTNEED.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def address_of(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, np.uint8).ctypes.data)


def move_pages(source: mmap.mmap, start: int, target: mmap.mmap, to: int, num_bytes: int) -> bool:
    """Remaps `num_bytes` at `start` in `source` to `to` in `target`, and leaves zeros behind.

    Returns False if the system cannot do it (before Linux 5.7).
    """
    places = address_of(source) + start, address_of(target) + to
    length = ctypes.c_size_t(num_bytes)
    flags = ctypes.c_int(MAY_MOVE | FIXED | LEAVE_MAPPED)
    moved = _libc.mremap(
        ctypes.c_void_p(places[0]), length, length, flags, ctypes.c_void_p(places[1])
    )
    return bool(moved != FAILED)


def chunks_of(pages: mmap.mmap, num_bytes: int) -> list[int]:
    """Returns the byte offsets of the whole chunks of CHUNK_BYTES in `pages`, aligned to huge pages."""
    first = -address_of(pages) % HUGE_BYTES
    return list(range(first, num_bytes - CHUNK_BYTES + 1, CHUNK_BYTES))


def filled_chunks(pages: mmap.mmap, num_bytes: int) -> list[int]:
    """Returns the byte offsets of the chunks whose pages are all resident."""
    has_page = np.zeros(-(-num_bytes // ALIGN_BYTES), np.uint8)
    address, answer = ctypes.c_void_p(address_of(pages)), ctypes.c_void_p(has_page.ctypes.data)
    if _libc.mincore(address, ctypes.c_size_t(num_bytes), answer) != 0:
        return []
    has_page &= 1
    return [
        start
        for start in chunks_of(pages, num_bytes)
        if has_page[start // ALIGN_BYTES : (start + CHUNK_BYTES) // ALIGN_BYTES].all()
    ]


class SparePages:
    """Recycles the pages of released pools for the pools that are loaded next, in chunks of CHUNK_BYTES.

    The kernel zeroes every page that it hands out, which took an eighth of a step with bfloat16 GEMMs. Roles that are
    loaded in turns can reuse pages instead, and this keeps no more pages than the roles once held.
    """

    def __init__(self) -> None:
        # (pages, offset of the chunk in them).
        self._kept: list[tuple[mmap.mmap, int]] = []

    @property
    def num_bytes(self) -> int:
        return CHUNK_BYTES * len(self._kept)

    def put(self, pages: mmap.mmap, num_bytes: int) -> list[int]:
        """Takes the fully resident chunks out of `pages`, which read as zeros afterwards; returns their offsets."""
        starts = filled_chunks(pages, num_bytes)
        for start in starts:
            try:
                to = private_pages(CHUNK_BYTES + HUGE_BYTES)
            except OSError:  # a limit on the address space
                break
            first = chunks_of(to, CHUNK_BYTES + HUGE_BYTES)[0]
            if move_pages(pages, start, to, first, CHUNK_BYTES):
                self._kept.append((to, first))
        pages.madvise(mmap.MADV_DONTNEED)
        return starts

    def take(self, pages: mmap.mmap, starts: Sequence[int]) -> None:
        """Moves kept chunks to the offsets `starts` of `pages` while they last. `pages` are zero before and after."""
        for start in starts[: len(self._kept)]:
            kept, first = self._kept.pop()
            if move_pages(kept, first, pages, start, CHUNK_BYTES):
                np.frombuffer(pages, np.uint8, CHUNK_BYTES, start).fill(0)

    def give_up(self) -> None:
        """Returns all pages to the system."""
        self._kept.clear()


class Copies:
    """A reusable batch of copies between arrays: (target, source) pairs of equal shape [..., rows, columns] and dtype.

    The arrays have to outlive this object. Raises ValueError if target and source have different memory orders.
    """

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._pairs = list(pairs)
        self._library = library()
        jobs = [job for pair in self._pairs if pair[0].size for job in _jobs(*pair)]
        self._table = np.array(_joined(jobs), np.int64).reshape(-1, 6)

    def run(self) -> None:
        if self._library is None:
            for target, source in self._pairs:
                target[...] = source
            return
        table = ctypes.c_void_p(self._table.ctypes.data)
        self._library.copy_runs(table, ctypes.c_int64(len(self._table)))

    @property
    def num_elements(self) -> int:
        return sum(target.size for target, _ in self._pairs)


_Job = tuple[int, int, int, int, int, int]


def _jobs(target: np.ndarray, source: np.ndarray) -> Iterator[_Job]:
    """Yields one job for each matrix of arrays [..., rows, columns]."""
    if target.shape != source.shape:
        raise ValueError(f"an array of shape {source.shape} does not fit {target.shape}")
    for outer in np.ndindex(target.shape[:-2]):
        matrix: Any = (*outer, ...)
        yield _job(target[matrix], source[matrix])


def _job(target: np.ndarray, source: np.ndarray) -> _Job:
    """Returns (target address, source address, number of runs, bytes per run, target stride, source stride)."""
    for first, second in ((target, source), (target.T, source.T)):
        pair = [array.reshape(1, -1) if array.ndim < 2 else array for array in (first, second)]
        if all(_has_runs(array) for array in pair):
            to, origin = pair
            runs, length = to.shape
            places = (to.ctypes.data, origin.ctypes.data)
            return *places, runs, length * to.itemsize, to.strides[0], origin.strides[0]
    raise ValueError("the arrays have their elements in different orders")


def _joined(jobs: list[_Job]) -> list[_Job]:
    """Merges consecutive jobs whose runs are contiguous in both target and source: longer runs copy faster."""
    result: list[_Job] = []
    for job in jobs:
        if result:
            to, origin, runs, length, *strides = result[-1]
            follows = (to + length, origin + length, runs, *strides)
            if follows == (job[0], job[1], job[2], *job[4:]):
                result[-1] = (to, origin, runs, length + job[3], strides[0], strides[1])
                continue
        result.append(job)
    return result


def _has_runs(array: np.ndarray) -> bool:
    return array.ndim == 2 and (array.shape[1] == 1 or array.strides[1] == array.itemsize)
