"""The other hosts of a job: their first ranks beat to each other, so that every rank here learns of one that is lost.

A host is lost when what was sent to it stays unacknowledged for the deadline, whatever its ranks do meanwhile, and
when its first rank's line closes without a farewell. The verdict stands in memory that this host's ranks share.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.backend.contract import PeerLost
from mindgrpo.backend.cpu import wire
from mindgrpo.backend.cpu.host import Host, is_alive
from mindgrpo.backend.cpu.network import Network
from mindgrpo.backend.cpu.placement import Placement
from mindgrpo.backend.cpu.shared_memory import Segment
from mindgrpo.health.heartbeat import Heartbeat, HeartbeatFile, heartbeat_path
from mindgrpo.health.rank_health import RankHealth

BEAT_SECONDS = 1.0
# Where a rank has ended, msrun soon ends all others of the host; the other hosts are to hear of it before.
LOOK_SECONDS = 0.05
LONGEST_BEAT = 1 << 20
LONGEST_TEXT = 2000
# What the first rank may need to say why a line broke, before a rank says it in its own words.
VERDICT_SECONDS = 3.0
_LENGTH = struct.Struct("!I")
ENDED = (errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED)


class Verdict:
    """Which rank of another host is lost, and in what words; of all ranks of this host, the first to tell is heard."""

    def __init__(self, host: Host, placement: Placement) -> None:
        self._segment = Segment(host, "lost", placement.here, 4096)
        self._rank = self._segment.array(0, 8).view(np.int64)
        self._length = self._segment.array(8, 8).view(np.int64)
        self._text = self._segment.array(16, LONGEST_TEXT)
        if host.library is not None:
            host.library.group_watch.restype = None
            host.library.group_watch(ctypes.c_void_p(self._segment.address))

    def declare(self, rank: int, text: str) -> None:
        if self._rank[0]:
            return
        raw = np.frombuffer(text.encode()[:LONGEST_TEXT], np.uint8)
        self._text[: raw.size] = raw
        self._length[0] = raw.size
        # Last: who reads the rank reads the whole text.
        self._rank[0] = rank + 1

    def read(self) -> str | None:
        if not self._rank[0]:
            return None
        return self._text[: int(self._length[0])].tobytes().decode(errors="replace")

    @property
    def rank(self) -> int | None:
        return int(self._rank[0]) - 1 if self._rank[0] else None


def _by_our_clock(state: Heartbeat, later: float) -> Heartbeat:
    """0 stands for no time at all."""
    times = ("beat_at", "since", "graph_since", "waits_since")
    shifted = {name: getattr(state, name) + later for name in times if getattr(state, name)}
    return replace(state, **shifted)


class FarHosts:
    """Made by all ranks of the job together."""

    def __init__(self, placement: Placement, host: Host, health: RankHealth) -> None:
        self.placement, self._host, self._health = placement, host, health
        self.network = Network(placement, health.say)
        self.network.meet()
        self._verdict = Verdict(host, placement)
        host.far = self
        self._lines: dict[int, socket.socket] = {}  # by the other host's number
        self._closing = False
        self._told: set[int] = set()
        self._mirrors: dict[int, HeartbeatFile] = {}
        self._sending = threading.RLock()
        self._thread = threading.Thread(target=self._watch, name="far hosts", daemon=True)
        if placement.leads:
            for leader in placement.leaders():
                if leader != placement.rank:
                    line = self.network.line(leader, "watch", self.check)
                    wire.end_silence(line, placement.deadline)
                    self._lines[placement.host_of(leader)] = line
            self._thread.start()

    def check(self) -> None:
        """Raises PeerLost once a rank is lost that this one cannot go on without, here or on another host."""
        words = self._known()
        if words is not None:
            raise PeerLost(words)

    def _known(self) -> str | None:
        """The verdict. Who raises it ends, and the others would miss the one that told of a rank of its host."""
        missed, words = self._verdict.rank, self._verdict.read()
        if missed is not None and missed in self.placement.here and words is not None:
            self.tell(missed, words)
        return words

    @contextmanager
    def waiting(self) -> Iterator[wire.Check]:
        """A check for a wait for another host, which is told as a wait once it takes more than a moment."""
        is_reported = False

        def check() -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                self._health.waits(time.monotonic())
            self.check()

        yield wire.paced(check)
        if is_reported:
            self._health.waits(0.0)

    def lost(self, rank: int | None) -> PeerLost:
        """For who saw a line to `rank` break: the first rank of this host may know why in a moment."""
        until = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < until:
            words = self._known()
            if words is not None:
                return PeerLost(words)
            time.sleep(0.02)
        if rank is None:
            return PeerLost("a rank of another host has ended; its log there says why")
        name = self.network.name_of(self.placement.host_of(rank))
        words = f"rank {rank} on {name} has ended; its log there says why"
        self._verdict.declare(rank, words)
        return PeerLost(words)

    def tell(self, rank: int, words: str) -> None:
        """The other hosts hear that a rank of this one is lost, before they hear it from broken lines.

        So do the ranks of this host: those that wait for another host would else hear of its end, which follows.
        """
        self._verdict.declare(rank, words)
        if not self._lines:
            return
        where = self.network.name_of(self.placement.host)
        # A second caller may end once this returns: not before the first has sent.
        with self._sending:
            if rank not in self._told:
                self._told.add(rank)
                self._send({"lost": rank, "words": f"{words} (on {where})"})

    # -- what only the first rank of a host has lines for --------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        text = json.dumps(message).encode()
        with self._sending:
            for line in self._lines.values():
                # A line that is full or broken is the watch's to judge.
                with suppress(OSError):
                    rest = _LENGTH.pack(len(text)) + text
                    sent = line.send(rest)
                    patience = wire.until(time.monotonic() + 1.0)
                    wire.send_all(line, [rest[sent:]], patience)

    def _watch(self) -> None:
        heard = {line: bytearray() for line in self._lines.values()}
        hosts = {line: host for host, line in self._lines.items()}
        with selectors.DefaultSelector() as selector:
            for line in heard:
                selector.register(line, selectors.EVENT_READ)
            next_beat = 0.0
            while selector.get_map():
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self._send(self._beat())
                self._look_here()
                for key, _ in selector.select(min(LOOK_SECONDS, next_beat - now)):
                    speaker: Any = key.fileobj
                    if not self._hear(hosts[speaker], speaker, heard[speaker]):
                        selector.unregister(speaker)

    def _beat(self) -> dict[str, Any]:
        """Where this host's ranks are, by this host's clock."""
        states = {rank: self._health.heartbeat_of(rank) for rank in self.placement.here}
        ranks = {str(rank): asdict(state) for rank, state in states.items() if state}
        return {"now": time.monotonic(), "ranks": ranks}

    def _look_here(self) -> None:
        """A rank of this host that ended while all others compute, or that another rank here has missed."""
        self._known()
        for rank in self.placement.here:
            pid = self._host.known_pid(rank)
            if pid and not is_alive(pid) and not self._closing:
                self._host.lost(pid)

    def _hear(self, host: int, line: socket.socket, buffer: bytearray) -> bool:
        """False when nothing more will come."""
        try:
            got = line.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self._judge(host, error)
            return False
        buffer += got
        if not got:
            self._judge(host, None)
            return False
        while len(buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer)
            if length > LONGEST_BEAT or len(buffer) < _LENGTH.size + length:
                return length <= LONGEST_BEAT
            message = json.loads(buffer[_LENGTH.size : _LENGTH.size + length])
            del buffer[: _LENGTH.size + length]
            if not self._understand(message):
                return False
        return True

    def _understand(self, message: dict[str, Any]) -> bool:
        if "lost" in message:
            self._verdict.declare(int(message["lost"]), str(message["words"]))
        folder = self._health.folder
        if "ranks" in message and folder is not None:
            later = time.monotonic() - message["now"]
            for name, state in message["ranks"].items():
                self._mirror(folder, int(name), _by_our_clock(Heartbeat(**state), later))
        return "farewell" not in message

    def _mirror(self, folder: Path, rank: int, state: Heartbeat) -> None:
        if rank not in self._mirrors:
            self._mirrors[rank] = HeartbeatFile(heartbeat_path(folder, rank))
        self._mirrors[rank].write(state)

    def _place_of(self, rank: int) -> str:
        heartbeat = self._health.heartbeat_of(rank) if rank in self._mirrors else None
        return f" in {heartbeat.position}" if heartbeat else ""

    def _judge(self, host: int, error: OSError | None) -> None:
        if self._closing:
            return
        name, leader = self.network.name_of(host), self.placement.ranks_of(host)[0]
        if error is None or error.errno in ENDED:
            words = (
                f"rank {leader} on {name} has ended{self._place_of(leader)}; its log there says why"
            )
        else:
            words = (
                f"{name} cannot be reached for {self.placement.deadline:g} s "
                f"({error.strerror or os.strerror(error.errno or 0)}), rank {leader} was last seen"
                f"{self._place_of(leader)}; see the network between the hosts"
            )
        self._verdict.declare(leader, words)

    def close(self) -> None:
        """All ranks together, when nothing is under way any more."""
        self._closing = True
        self._send({"farewell": True})
        self.network.close()
