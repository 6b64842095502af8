"""Memory that ranks of one host share: segments over /dev/shm, and links and buckets made of them.

A segment's file is unlinked as soon as every member has mapped it, so neither a crash nor a normal end leaves one
behind. Refuses to know what the bytes mean and to wait for a rank that has ended.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.backend import PeerLost
from mindgrpo.backend.waiting import LINE, Counters, PolledCounters, SleepingCounters
from mindgrpo.errors import UserError

SHM = Path("/dev/shm")
PAGE_BYTES = 4096
ATTACH_SECONDS = 120.0
OPEN_NAP_SECONDS = (0.001, 0.02)


def is_alive(pid: int) -> bool:
    """False for a process that has ended, also while nobody has collected its status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Host:
    """What one rank knows of the ranks beside it: their job, how to wait for them, and their process ids.

    `library` is None where there is no C compiler; then waits poll. `spins`: see SleepingCounters.
    """

    def __init__(
        self, job: str, rank: int, library: ctypes.CDLL | None = None, spins: int = 0
    ) -> None:
        self.job, self.rank, self.library, self.spins = job, rank, library, spins
        self._pids: dict[int, int] = {}

    def know(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def check(self, ranks: Sequence[int]) -> None:
        """Raises PeerLost if one of `ranks` has ended, as far as its process is known."""
        for rank in ranks:
            pid = self._pids.get(rank)
            if pid is not None and not is_alive(pid):
                raise self.lost(pid)

    def check_failure(self) -> None:
        """Raises PeerLost if the end of a rank is why the C library failed."""
        pid = 0 if self.library is None else self.library.group_lost_pid()
        if pid:
            raise self.lost(pid)

    def lost(self, pid: int) -> PeerLost:
        rank = next((str(rank) for rank, known in self._pids.items() if known == pid), "?")
        return PeerLost(f"rank {rank} (process {pid}) has ended; its log says why")

    def counters(self, memory: mmap.mmap, start: int, count: int) -> Counters:
        if self.library is None:
            return PolledCounters(memoryview(memory)[start : start + count * LINE])
        return SleepingCounters(self.library, address_of(memory) + start, self.spins)


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Segment:
    """`num_bytes` of memory shared by `ranks`, behind a header.

    The header holds a counter a rank for whoever uses the segment, another a rank that says "attached", and the
    ranks' process ids with one more: that of the first whose end was noticed.
    """

    def __init__(self, host: Host, name: str, ranks: Sequence[int], num_bytes: int) -> None:
        path = SHM / f"mindgrpo-{host.job}-{name}"
        size = len(ranks)
        self._pids_start = 2 * size * LINE
        header_bytes = self._pids_start + 8 * (size + 1)
        self._header_bytes = -(-header_bytes // PAGE_BYTES) * PAGE_BYTES
        total = self._header_bytes + num_bytes
        self._host, self._ranks = host, tuple(ranks)
        leader = host.rank == ranks[0]
        descriptor = self._create(path, total) if leader else self._open(path)
        self.memory = mmap.mmap(descriptor, total)
        os.close(descriptor)
        self._pids = np.frombuffer(self.memory, np.int64, size + 1, self._pids_start)
        self.counters = host.counters(self.memory, 0, size)
        try:
            self._attach()
        finally:
            # Also where it failed, and whoever is left: then nobody will come who needs the name.
            path.unlink(missing_ok=True)

    def _attach(self) -> None:
        size = len(self._ranks)
        index = self._ranks.index(self._host.rank)
        attached = self._host.counters(self.memory, size * LINE, size)
        self._pids[index] = os.getpid()
        attached.post(index, attached.kind)
        attached.wait(range(size), 1, self.check)
        kinds = np.frombuffer(self.memory, np.uint32, size * LINE // 4, size * LINE)[:: LINE // 4]
        if len(set(kinds.tolist())) > 1:
            raise RuntimeError(
                f"ranks {self._ranks} do not all have the C kernels: set MINDGRPO_NATIVE=0 for all, "
                "or see that each finds the compiler and ~/.cache/mindgrpo"
            )
        for rank, pid in zip(self._ranks, self._pids[:size].tolist(), strict=True):
            self._host.know(rank, pid)

    def check(self) -> None:
        """Raises PeerLost, for all members with the name of the one whose end was noticed first."""
        if not self._pids[-1]:
            ended = [pid for pid in self._pids[:-1].tolist() if pid and not is_alive(pid)]
            self._pids[-1] = ended[0] if ended else 0
        if self._pids[-1]:
            raise self._host.lost(int(self._pids[-1]))

    @property
    def address(self) -> int:
        return address_of(self.memory) + self._header_bytes

    @property
    def pids_address(self) -> int:
        return address_of(self.memory) + self._pids_start

    def array(self, start: int, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes], a view."""
        return np.frombuffer(self.memory, np.uint8, num_bytes, self._header_bytes + start)

    @staticmethod
    def _create(path: Path, total: int) -> int:
        free = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
        if free < total:
            raise UserError(
                f"/dev/shm has {free >> 20} MiB free but this run's ranks need {total >> 20} MiB more there; "
                "make it larger (mount -o remount,size=..., docker --shm-size) or use fewer ranks."
            )
        path.unlink(missing_ok=True)
        partial = path.with_name(path.name + ".partial")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.ftruncate(descriptor, total)
        os.rename(partial, path)
        return descriptor

    def _open(self, path: Path) -> int:
        started = time.monotonic()
        nap, longest = OPEN_NAP_SECONDS
        while True:
            try:
                return os.open(path, os.O_RDWR)
            except FileNotFoundError:
                if time.monotonic() > started + ATTACH_SECONDS:
                    raise PeerLost(
                        f"rank {self._ranks[0]} did not share {path} within {ATTACH_SECONDS:.0f} s"
                    ) from None
                self._host.check(self._ranks)
                time.sleep(nap)
                nap = min(2 * nap, longest)


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


class SharedBuckets:
    """One bucket a rank that every rank can read."""

    def __init__(self, host: Host, world_size: int, bucket_bytes: int, serial: int) -> None:
        self.bucket_bytes = bucket_bytes
        segment = Segment(
            host, f"buckets-{serial}", tuple(range(world_size)), world_size * bucket_bytes
        )
        self._buckets = [segment.array(r * bucket_bytes, bucket_bytes) for r in range(world_size)]

    def of(self, rank: int) -> np.ndarray:
        return self._buckets[rank]
