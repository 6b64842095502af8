"""A pool of anonymous pages: device memory where the device is the host itself.

Released pages go back to the system at once (MADV_DONTNEED), so memory that the ledger counts as given up is given
up in the process too. Refuses to remember who owns the pool or whether its bytes are valid: residency.py does.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np

from mindgrpo.backend import Pool

ALIGN_BYTES = 4096


def _private_pages(num_bytes: int) -> mmap.mmap:
    # Python's default is shared pages: given up, they would leave the process and still be kept by the system.
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HostPool(Pool):
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._length = max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        self._device = _private_pages(self._length)
        self._host: mmap.mmap | None = None

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._device, np.float32, count, 4 * offset).reshape(shape)

    def pull(self) -> None:
        """The views and the graphs share one memory."""

    def push(self) -> None:
        """The views and the graphs share one memory."""

    def offload(self) -> None:
        if self._host is None:
            self._host = _private_pages(self._length)
        self._copy(self._device, self._host)
        self._device.madvise(mmap.MADV_DONTNEED)

    def load(self) -> None:
        if self._host is None:
            raise RuntimeError("this pool was never offloaded")
        self._copy(self._host, self._device)
        self._host.madvise(mmap.MADV_DONTNEED)

    def release(self) -> None:
        self._device.madvise(mmap.MADV_DONTNEED)
        if self._host is not None:
            self._host.madvise(mmap.MADV_DONTNEED)

    def _copy(self, source: mmap.mmap, target: mmap.mmap) -> None:
        a = np.frombuffer(source, np.uint8, self.num_bytes)
        np.copyto(np.frombuffer(target, np.uint8, self.num_bytes), a)
