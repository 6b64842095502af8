"""Pages of the process's own memory that move from one address to another, so that nothing is copied."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np

ALIGN_BYTES = 4096
# Pages of 2 MiB: filling given-up memory again takes 500 times fewer faults.
HUGE_BYTES = 2 << 20
CHUNK_BYTES = 8 * HUGE_BYTES
MAY_MOVE, FIXED, LEAVE_MAPPED = 1, 2, 4  # mremap(2)
FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


def whole_pages(num_bytes: int) -> int:
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def private_pages(num_bytes: int) -> mmap.mmap:
    # Python's default is shared pages: given up, they would leave the process and still be kept by the system.
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_BYTES:
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def address_of(pages: mmap.mmap) -> int:
    return int(np.frombuffer(pages, np.uint8).ctypes.data)


def move_pages(source: mmap.mmap, start: int, target: mmap.mmap, to: int, num_bytes: int) -> bool:
    """Moves `num_bytes` from `start` in `source` to `to` in `target`; zeros are left. False where the system cannot
    (before Linux 5.7)."""
    places = address_of(source) + start, address_of(target) + to
    length = ctypes.c_size_t(num_bytes)
    flags = ctypes.c_int(MAY_MOVE | FIXED | LEAVE_MAPPED)
    moved = _libc.mremap(
        ctypes.c_void_p(places[0]), length, length, flags, ctypes.c_void_p(places[1])
    )
    return bool(moved != FAILED)


def chunks_of(pages: mmap.mmap, num_bytes: int) -> list[int]:
    """Where whole chunks of huge pages begin."""
    first = -address_of(pages) % HUGE_BYTES
    return list(range(first, num_bytes - CHUNK_BYTES + 1, CHUNK_BYTES))


def filled_chunks(pages: mmap.mmap, num_bytes: int) -> list[int]:
    """Those of which the system has given out every page."""
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
    """Pages that released pools leave to the pools that are loaded next, in chunks of one size.

    The system clears every page that it gives out, which took an eighth of a step with bfloat16 products. Roles that
    take turns need no fresh ones, and no more are kept than they had at one time.
    """

    def __init__(self) -> None:
        # Each with where its chunk begins.
        self._kept: list[tuple[mmap.mmap, int]] = []

    @property
    def num_bytes(self) -> int:
        return CHUNK_BYTES * len(self._kept)

    def put(self, pages: mmap.mmap, num_bytes: int) -> list[int]:
        """Takes the filled chunks of `pages`, which are zero afterwards; returns where these are."""
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
        """Moves chunks to `starts` of `pages`, as long as there are some. `pages` are zero before and after."""
        for start in starts[: len(self._kept)]:
            kept, first = self._kept.pop()
            if move_pages(kept, first, pages, start, CHUNK_BYTES):
                np.frombuffer(pages, np.uint8, CHUNK_BYTES, start).fill(0)

    def give_up(self) -> None:
        """To the system."""
        self._kept.clear()
