"""A rank's phase and heartbeat in a few bytes of mapped memory: a file survives the rank that wrote it.

One thread writes the phase and another the beat. Never waits for a disk. Refuses to keep history.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

RECORD_BYTES = 512
MAGIC = b"MGR1"
_HEAD = struct.Struct("<4s4xq")
_BEAT = struct.Struct("<Qd")
_TURN = struct.Struct("<I")
_WAITS = struct.Struct("<d")
_PHASE = struct.Struct("<iId32sd96s")
_BEAT_AT = _HEAD.size
_TURN_AT = _BEAT_AT + _BEAT.size
_WAITS_AT = _TURN_AT + 8
# Two places by turns: one is whole at every instant, also when its writer is killed.
_PHASE_AT = tuple(_WAITS_AT + _WAITS.size + i * -(-_PHASE.size // 8) * 8 for i in range(2))
READ_ATTEMPTS = 1000
COMPILE = "compile"


@dataclass(frozen=True)
class Snapshot:
    """Times are CLOCK_MONOTONIC seconds, the same clock for all processes of a host.

    `serial` counts phases entered, so that of ranks that do the same the one behind can be told. `graph` is what is
    being compiled inside of the phase, since `graph_since`; empty for nothing. `waits_since` is 0 for a rank that, as
    far as that is told, waits for no other. `step` counts from 1, 0 is before it.
    """

    pid: int
    beats: int
    beat_at: float
    step: int
    serial: int
    since: float
    phase: str
    graph_since: float = 0.0
    graph: str = ""
    waits_since: float = 0.0

    @property
    def kind(self) -> str:
        """The phase, or `compile` while a graph is compiled in it."""
        return COMPILE if self.graph else self.phase

    @property
    def place(self) -> str:
        """Such as `phase rollout of step 5`."""
        when = f"of step {self.step}" if self.step else "before step 1"
        if self.graph:
            return f"phase {COMPILE} (graph {self.graph}, in {self.phase} {when})"
        return f"phase {self.phase} {when}"


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"phase_{rank}"


def ranks_in(folder: Path) -> list[int]:
    """Those of this host, of which there may be many more elsewhere."""
    return [int(path.name.rpartition("_")[2]) for path in folder.glob("phase_*")]


def _memory(path: Path | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, RECORD_BYTES)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        # Written, not only sized: a page that the disk has no room for ends who touches it.
        os.write(descriptor, bytes(RECORD_BYTES))
        return mmap.mmap(descriptor, RECORD_BYTES)
    finally:
        os.close(descriptor)


class Record:
    """This rank's own; kept in memory where `path` is None or cannot be written."""

    def __init__(self, path: Path | None) -> None:
        try:
            self._memory = _memory(path)
        except OSError:
            self._memory = _memory(None)
        self._beats = 0
        self._turn = 0
        self._state = Snapshot(os.getpid(), 0, 0.0, 0, 0, time.monotonic(), "start")
        self.beat()
        self._write()
        # Last: who reads a record that says so reads all of it.
        _HEAD.pack_into(self._memory, 0, MAGIC, os.getpid())

    def beat(self) -> None:
        self._beats += 1
        _BEAT.pack_into(self._memory, _BEAT_AT, self._beats, time.monotonic())

    def waits(self, since: float) -> None:
        _WAITS.pack_into(self._memory, _WAITS_AT, since)

    @property
    def waits_address(self) -> int:
        """Of the same figure, a double, for code that is not Python."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + _WAITS_AT

    def enter(self, phase: str) -> tuple[str, float]:
        """Returns what `resume` takes."""
        before = self._state
        self._set(replace(before, phase=phase, since=time.monotonic(), serial=before.serial + 1))
        return before.phase, before.since

    def resume(self, before: tuple[str, float]) -> None:
        phase, since = before
        serial = self._state.serial + 1
        self._set(replace(self._state, phase=phase, since=since, serial=serial))

    def at_step(self, step: int) -> None:
        self._set(replace(self._state, step=step))

    def compiling(self, graph: str) -> None:
        """An empty name: nothing any more."""
        self._set(replace(self._state, graph=graph, graph_since=time.monotonic()))

    def _set(self, state: Snapshot) -> None:
        self._state = state
        self._write()

    def _write(self) -> None:
        state = self._state
        self._turn += 1
        _PHASE.pack_into(
            self._memory,
            _PHASE_AT[self._turn % 2],
            state.step,
            state.serial,
            state.since,
            state.phase.encode()[:31],
            state.graph_since,
            state.graph.encode()[:95],
        )
        _TURN.pack_into(self._memory, _TURN_AT, self._turn)

    def read(self) -> Snapshot:
        found = snapshot_of(self._memory)
        assert found is not None
        return found


class Mirror(Record):
    """The record of a rank of another host, kept here by whoever hears of it, so that all of this host can read it."""

    def show(self, state: Snapshot) -> None:
        """Its times are by this host's clock."""
        self._set(state)
        self.waits(state.waits_since)
        _BEAT.pack_into(self._memory, _BEAT_AT, state.beats, state.beat_at)


class Reader:
    """Another rank's record; mapped at the first `read` that finds it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: mmap.mmap | None = None

    def read(self) -> Snapshot | None:
        """None while there is nothing to read."""
        if self._memory is None:
            try:
                with self._path.open("rb") as file:
                    self._memory = mmap.mmap(file.fileno(), RECORD_BYTES, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                return None
        return snapshot_of(self._memory)


def snapshot_of(memory: mmap.mmap) -> Snapshot | None:
    magic, pid = _HEAD.unpack_from(memory, 0)
    if magic != MAGIC:
        return None
    for _ in range(READ_ATTEMPTS):
        (turn,) = _TURN.unpack_from(memory, _TURN_AT)
        step, serial, since, phase, graph_since, graph = _PHASE.unpack_from(
            memory, _PHASE_AT[turn % 2]
        )
        if _TURN.unpack_from(memory, _TURN_AT)[0] == turn:
            break
    beats, beat_at = _BEAT.unpack_from(memory, _BEAT_AT)
    (waits,) = _WAITS.unpack_from(memory, _WAITS_AT)
    return Snapshot(
        pid, beats, beat_at, step, serial, since, _text(phase), graph_since, _text(graph), waits
    )


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
