"""What ranks of different hosts hand to each other between graphs: links and buckets over lines of their own.

The same contracts as on one host (shared_memory.py): a sender runs a few arrays ahead, every rank of a host reads all
buckets in this host's memory. Refuses arrays that are not those that were agreed.
"""

from __future__ import annotations

import queue
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from mindgrpo.backend.cpu import wire
from mindgrpo.backend.cpu.far_hosts import FarHosts
from mindgrpo.backend.cpu.host import Host
from mindgrpo.backend.cpu.shared_memory import Segment

_HEAD = struct.Struct("!QQ")


def far_line(far: FarHosts, rank: int, purpose: str) -> socket.socket:
    return far.network.line(rank, purpose, far.check)


class FarLink:
    """`received` arrays wait in memory of the receiver, at most SLOTS; what more comes fills the sockets' buffers."""

    SLOTS = 4

    def __init__(
        self, far: FarHosts, rank: int, source: int, target: int, slot_bytes: int, serial: int
    ) -> None:
        self._far, self._slot_bytes = far, slot_bytes
        self._other = target if rank == source else source
        self._line = far_line(far, self._other, f"link-{source}_{target}-{serial}")
        self._count = 0
        self._arrived: queue.Queue[Any] = queue.Queue(self.SLOTS)
        if rank == target:
            # Reads ahead, so that two ranks that send to each other at a time both come to an end.
            threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, array: np.ndarray) -> None:
        if array.nbytes > self._slot_bytes:
            raise ValueError(f"{array.nbytes} bytes do not fit a slot of {self._slot_bytes}")
        self._count += 1
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        head = _HEAD.pack(self._count, flat.size)
        try:
            with self._far.waiting() as check:
                wire.send_all(self._line, [head, flat], check)
        except OSError:
            raise self._far.lost(self._other) from None

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        bucket = self._next()
        if bucket is None:
            raise self._far.lost(self._other)
        self._count += 1
        count, raw = bucket
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if count != self._count or raw.size != num_bytes:
            raise RuntimeError(
                f"array {count} of {raw.size} bytes came from rank {self._other}, but {self._count} of "
                f"{num_bytes} was expected: the two ranks did not make the same calls"
            )
        array: np.ndarray = raw.view(dtype).reshape(shape)
        return array

    def _next(self) -> Any:
        with self._far.waiting() as check:
            while True:
                try:
                    return self._arrived.get(timeout=wire.CHECK_SECONDS)
                except queue.Empty:
                    check()

    def _read(self) -> None:
        try:
            while True:
                count, num_bytes = _HEAD.unpack(wire.receive(self._line, _HEAD.size))
                if num_bytes > self._slot_bytes:
                    break
                raw = np.empty(num_bytes, np.uint8)
                wire.receive_into(self._line, raw)
                self._arrived.put((count, raw))
        except (OSError, EOFError):
            pass
        self._arrived.put(None)


class FarBuckets:
    """One bucket a rank of the job, all in memory that the ranks of this host share.

    Each rank fetches the buckets of those that stand at its place on the other hosts.
    """

    def __init__(self, far: FarHosts, host: Host, bucket_bytes: int, serial: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._far, self._rank = far, host.rank
        placement = far.placement
        size = placement.world_size
        segment = Segment(host, f"buckets-{serial}", placement.here, size * bucket_bytes)
        self._buckets = [segment.array(r * bucket_bytes, bucket_bytes) for r in range(size)]
        self._lines = {
            rank: far_line(far, rank, f"buckets-{serial}")
            for rank in range(host.rank % placement.per_host, size, placement.per_host)
            if rank != host.rank
        }

    def of(self, rank: int) -> np.ndarray:
        return self._buckets[rank]

    def exchange(self, num_bytes: int) -> None:
        """The first `num_bytes` of this rank's bucket go out, and what others' ranks give comes in."""
        flows = [
            _Flow(line, self._buckets[self._rank][:num_bytes], self._buckets[rank])
            for rank, line in self._lines.items()
        ]
        ranks = dict(zip(flows, self._lines, strict=True))
        with self._far.waiting() as check:
            while left := [flow for flow in flows if flow.events]:
                poll = select.poll()
                for flow in left:
                    poll.register(flow.line, flow.events)
                ready = dict(poll.poll(wire.CHECK_SECONDS * 1000))
                check()
                for flow in left:
                    if flow.line.fileno() in ready:
                        self._move(flow, ranks[flow])

    def _move(self, flow: _Flow, rank: int) -> None:
        try:
            flow.move()
        except (OSError, EOFError):
            raise self._far.lost(rank) from None


class _Flow:
    """One bucket out and one in over a line at a time, so that neither end waits for the other to begin."""

    def __init__(self, line: socket.socket, outgoing: np.ndarray, target: np.ndarray) -> None:
        self.line = line
        self._out = [memoryview(_HEAD.pack(0, outgoing.size)), memoryview(outgoing.data)]
        self._head = bytearray(_HEAD.size)
        self._wanted = memoryview(self._head)
        self._target = memoryview(target.data)
        self._has_head = False

    @property
    def events(self) -> int:
        """What there is still to do; 0 for nothing."""
        coming = not self._has_head or len(self._wanted)
        return (select.POLLOUT if self._out else 0) | (select.POLLIN if coming else 0)

    def move(self) -> None:
        with suppress(BlockingIOError):
            while self._out:
                self._out[0] = self._out[0][self.line.send(self._out[0]) :]
                if not len(self._out[0]):
                    self._out.pop(0)
        with suppress(BlockingIOError):
            self._receive()

    def _receive(self) -> None:
        while True:
            while len(self._wanted):
                got = self.line.recv_into(self._wanted)
                if not got:
                    raise EOFError
                self._wanted = self._wanted[got:]
            if self._has_head:
                return
            _, num_bytes = _HEAD.unpack(self._head)
            if num_bytes > len(self._target):
                raise EOFError
            self._has_head, self._wanted = True, self._target[:num_bytes]
