"""Memory that ranks of one host share: segments, and links made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindgrpo.backend.cpu.host import (
    Host,
    Joined,
    header_bytes,
    nameless,
)


class Segment(Joined):
    """`num_bytes` that `ranks` share under `name`, which is used once in a job."""

    def __init__(self, host: Host, name: str, ranks: Sequence[int], num_bytes: int) -> None:
        board, leader = host.board, ranks[0]
        if host.rank == leader:
            descriptor = nameless(f"mindgrpo-{name}", header_bytes(len(ranks)) + num_bytes)
            board.offer(name, descriptor)
        else:
            descriptor = board.take(name, leader)
        super().__init__(host, ranks, descriptor, num_bytes)


class SharedLink:
    """A ring of slots from one rank to another; the sender waits only when all slots are unread."""

    SLOTS = 4

    def __init__(self, host: Host, source: int, target: int, slot_bytes: int, serial: int) -> None:
        self._slot_bytes = slot_bytes
        name = f"link-{source}_{target}-{serial}"
        self._segment = Segment(host, name, (source, target), self.SLOTS * slot_bytes)
        self._counters = self._segment.counters
        self._sent, self._received = 0, 1
        self._count = 0

    def _slot(self) -> np.ndarray:
        return self._segment.array((self._count % self.SLOTS) * self._slot_bytes, self._slot_bytes)

    def send(self, array: np.ndarray) -> None:
        if array.nbytes > self._slot_bytes:
            raise ValueError(f"{array.nbytes} bytes do not fit a slot of {self._slot_bytes}")
        room = max(0, self._count + 1 - self.SLOTS)
        self._counters.wait([self._received], room, self._segment.check)
        np.copyto(self._slot()[: array.nbytes].view(array.dtype).reshape(array.shape), array)
        self._count += 1
        self._counters.post(self._sent, self._count)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self._counters.wait([self._sent], self._count + 1, self._segment.check)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = self._slot()[:num_bytes].view(dtype).reshape(shape).copy()
        self._count += 1
        self._counters.post(self._received, self._count)
        return array
