"""Ranks of one host talk through mapped files: groups, links and buckets over /dev/shm.

A segment's file is unlinked as soon as every member has mapped it, so neither a crash nor a normal end leaves one
behind. Refuses to know what the bytes mean and to wait for a rank that has ended.

Counters are 8-byte aligned stores, each written by one rank only; data is written before its counter. That order
is what x86-64 guarantees; on a machine with weaker ordering the system call in the wait loop is relied upon.
"""

from __future__ import annotations

import mmap
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.backend import PeerLost
from mindgrpo.errors import UserError

SHM = Path("/dev/shm")
LINE = 64  # bytes between two ranks' counters: a cache line each
PAGE_BYTES = 4096
YIELDS_BEFORE_SLEEP = 40
NAP_SECONDS = 50e-6
LIFE_CHECK_SECONDS = 0.5
ATTACH_SECONDS = 120.0
SMALL_BYTES = 32 * 1024


def is_alive(pid: int) -> bool:
    """False for a process that has ended, also while nobody has collected its status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Peers:
    """The process ids of the ranks, known once the job's first segment is shared."""

    def __init__(self) -> None:
        self._pids: dict[int, int] = {}

    def know(self, rank: int, pid: int) -> None:
        self._pids[rank] = pid

    def check(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            pid = self._pids.get(rank)
            if pid is not None and not is_alive(pid):
                raise PeerLost(f"rank {rank} (process {pid}) has ended; its log says why")


class Wait:
    """Yields the core a few times, then naps, and looks now and then whether the others still live."""

    def __init__(self, peers: Peers, ranks: Sequence[int]) -> None:
        self._peers = peers
        self._ranks = ranks

    def until_at_least(self, counters: memoryview, positions: Sequence[int], value: int) -> None:
        """Return when every counter at `positions` has reached `value`; raises PeerLost."""
        turns = 0
        next_check = 0.0
        for position in positions:
            while counters[position] < value:
                turns += 1
                if turns <= YIELDS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                time.sleep(NAP_SECONDS)
                now = time.monotonic()
                if not next_check:
                    next_check = now + LIFE_CHECK_SECONDS
                elif now > next_check:
                    self._peers.check(self._ranks)
                    next_check = now + LIFE_CHECK_SECONDS


class Segment:
    """`num_bytes` of memory shared by `ranks`, behind a header: a counter a rank, then a process id a rank."""

    def __init__(
        self, job: str, name: str, rank: int, ranks: Sequence[int], num_bytes: int, peers: Peers
    ) -> None:
        path = SHM / f"mindgrpo-{job}-{name}"
        size = len(ranks)
        self._header_bytes = -(-size * (LINE + 8) // PAGE_BYTES) * PAGE_BYTES
        total = self._header_bytes + num_bytes
        leader = rank == ranks[0]
        descriptor = self._create(path, total) if leader else self._open(path, peers, ranks)
        self.memory = mmap.mmap(descriptor, total)
        os.close(descriptor)
        self.counters = memoryview(self.memory)[: self._header_bytes].cast("q")
        # A process id that is not zero means attached.
        base = size * LINE // 8
        index = list(ranks).index(rank)
        self.counters[base + index] = os.getpid()
        positions = [base + i for i in range(size)]
        Wait(peers, ranks).until_at_least(self.counters, positions, 1)
        for member, position in zip(ranks, positions, strict=True):
            peers.know(member, self.counters[position])
        if leader:
            path.unlink()

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

    @staticmethod
    def _open(path: Path, peers: Peers, ranks: Sequence[int]) -> int:
        give_up = time.monotonic() + ATTACH_SECONDS
        while True:
            try:
                return os.open(path, os.O_RDWR)
            except FileNotFoundError:
                if time.monotonic() > give_up:
                    raise PeerLost(
                        f"rank {ranks[0]} did not share {path} within {ATTACH_SECONDS:.0f} s"
                    ) from None
                peers.check(ranks)
                time.sleep(0.002)


class SharedGroup:
    """Sum, gather and barrier over one segment; two alternating buffers a member.

    A buffer is written again two operations later, which a member reaches only after every other has posted the
    operation in between, and so has read the earlier one.
    """

    def __init__(
        self, job: str, rank: int, ranks: Sequence[int], buffer_bytes: int, peers: Peers
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = self.ranks.index(rank)
        self._buffer_bytes = buffer_bytes
        name = "group-" + "_".join(map(str, ranks))
        size = len(ranks)
        self._segment = Segment(job, name, rank, ranks, 2 * size * buffer_bytes, peers)
        self._counters = self._segment.counters
        self._positions = [i * (LINE // 8) for i in range(size)]
        self._buffers = [
            [
                self._segment.array((half * size + i) * buffer_bytes, buffer_bytes)
                for i in range(size)
            ]
            for half in range(2)
        ]
        self._wait = Wait(peers, ranks)
        self._posted = 0
        self._turn = 0

    def _post_and_wait(self) -> None:
        self._posted += 1
        self._counters[self._positions[self.index]] = self._posted
        self._wait.until_at_least(self._counters, self._positions, self._posted)

    def _next_buffers(self) -> list[np.ndarray]:
        self._turn ^= 1
        return self._buffers[self._turn]

    def barrier(self) -> None:
        self._next_buffers()
        self._post_and_wait()

    def sum_into(self, source: np.ndarray, out: np.ndarray) -> None:
        """out = the sum of the members' `source`, both 1-dim and of one dtype, added in rank order."""
        step = self._buffer_bytes // source.itemsize
        for start in range(0, source.size, step):
            self._sum_piece(source[start : start + step], out[start : start + step])

    def _sum_piece(self, source: np.ndarray, out: np.ndarray) -> None:
        views = [b[: source.nbytes].view(source.dtype) for b in self._next_buffers()]
        np.copyto(views[self.index], source)
        self._post_and_wait()
        if source.nbytes <= SMALL_BYTES:
            self._add(views, slice(None), out)
            return
        # Each member adds its own share into its own buffer, where nobody else reads that share.
        size = len(views)
        cuts = [source.size * i // size for i in range(size + 1)]
        shares = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        mine = shares[self.index]
        self._add(views, mine, out[mine])
        np.copyto(views[self.index][mine], out[mine])
        self._post_and_wait()
        for view, share in zip(views, shares, strict=True):
            np.copyto(out[share], view[share])

    @staticmethod
    def _add(views: list[np.ndarray], share: slice, out: np.ndarray) -> None:
        np.add(views[0][share], views[1][share], out=out)
        for view in views[2:]:
            np.add(out, view[share], out=out)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every member's value, pickled through memory between this job's own processes only."""
        payload = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = np.zeros(len(self.ranks), np.int64)
        sizes[self.index] = payload.size
        self.sum_into(sizes.copy(), sizes)
        parts = [np.empty(n, np.uint8) for n in sizes]
        for start in range(0, int(sizes.max()), self._buffer_bytes):
            buffers = self._next_buffers()
            piece = payload[start : start + self._buffer_bytes]
            buffers[self.index][: piece.size] = piece
            self._post_and_wait()
            for part, buffer in zip(parts, buffers, strict=True):
                wanted = part[start : start + self._buffer_bytes]
                np.copyto(wanted, buffer[: wanted.size])
        return [pickle.loads(part.tobytes()) for part in parts]


class SharedLink:
    """A ring of slots from one rank to another; the sender waits only when all slots are unread."""

    SLOTS = 4

    def __init__(
        self,
        job: str,
        rank: int,
        source: int,
        target: int,
        slot_bytes: int,
        serial: int,
        peers: Peers,
    ) -> None:
        ranks = (source, target)
        self._slot_bytes = slot_bytes
        self._segment = Segment(
            job, f"link-{source}_{target}-{serial}", rank, ranks, self.SLOTS * slot_bytes, peers
        )
        self._wait = Wait(peers, ranks)
        self._counters = self._segment.counters
        self._sent, self._received = 0, LINE // 8
        self._count = 0

    def _slot(self) -> np.ndarray:
        return self._segment.array((self._count % self.SLOTS) * self._slot_bytes, self._slot_bytes)

    def send(self, array: np.ndarray) -> None:
        if array.nbytes > self._slot_bytes:
            raise ValueError(f"{array.nbytes} bytes do not fit a slot of {self._slot_bytes}")
        self._wait.until_at_least(self._counters, [self._received], self._count + 1 - self.SLOTS)
        np.copyto(self._slot()[: array.nbytes].view(array.dtype).reshape(array.shape), array)
        self._count += 1
        self._counters[self._sent] = self._count

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        self._wait.until_at_least(self._counters, [self._sent], self._count + 1)
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        array = self._slot()[:num_bytes].view(dtype).reshape(shape).copy()
        self._count += 1
        self._counters[self._received] = self._count
        return array


class SharedBuckets:
    """One bucket a rank that every rank can read."""

    def __init__(
        self, job: str, rank: int, world_size: int, bucket_bytes: int, serial: int, peers: Peers
    ) -> None:
        self.bucket_bytes = bucket_bytes
        segment = Segment(
            job,
            f"buckets-{serial}",
            rank,
            tuple(range(world_size)),
            world_size * bucket_bytes,
            peers,
        )
        self._buckets = [segment.array(r * bucket_bytes, bucket_bytes) for r in range(world_size)]

    def of(self, rank: int) -> np.ndarray:
        return self._buckets[rank]
