"""Writes and reads heartbeat files: which phase a rank is in, and when it was last alive; describes one for a terminal.

A rank rewrites its file `heartbeat_RANK` in the status folder whenever its phase changes and twice a second. The file
outlives the rank, so that it says in which phase a rank was killed.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

FILE_BYTES = 1024
LONGEST_NAME = 64
NUM_READ_ATTEMPTS = 100
COMPILE = "compile"
SHORTEST_SECONDS = 2.0
CLEAR = "\r\033[K"
NAMES = {
    "start": "starting",
    "old_logps": "log-probs",
    "reference": "reference log-probs",
    "values": "critic's values",
    "update_critic": "critic's update",
    "close": "closing files",
}
# Between the phases of a step, and between making a trainer and `train`.
BETWEEN, IDLE = "loop", "idle"


@dataclass(frozen=True)
class Heartbeat:
    """Says where a rank is. Times are seconds of CLOCK_MONOTONIC, the same clock for all processes of a host.

    `serial` counts the phases entered: among ranks that run the same phases, the one behind has the lowest. `step`
    counts from 1; 0 is before the first. `graph` is being compiled inside the phase since `graph_since`; empty for
    none. `waits_since` is when the rank began to wait for another one; 0 if it does not wait. `done` of `total` `unit`
    (such as samples) of the phase are done; 0 of 0 where that is not known.
    """

    pid: int
    beat_at: float
    phase: str
    since: float
    step: int = 0
    serial: int = 0
    graph: str = ""
    graph_since: float = 0.0
    waits_since: float = 0.0
    done: int = 0
    total: int = 0
    unit: str = ""

    @property
    def kind(self) -> str:
        """Returns the phase, or `compile` while a graph is compiled in it."""
        return COMPILE if self.graph else self.phase

    @property
    def position(self) -> str:
        """Describes it, such as `phase rollout of step 5`."""
        when = f"of step {self.step}" if self.step else "before step 1"
        if self.graph:
            return f"phase {COMPILE} (graph {self.graph}, in {self.phase} {when})"
        return f"phase {self.phase} {when}"

    def seconds(self, now: float) -> float:
        """Returns how long the phase has taken, or the compilation in it."""
        return now - (self.graph_since if self.graph else self.since)


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat_{rank}"


def heartbeats_in(folder: Path) -> dict[int, Heartbeat]:
    """Reads the last heartbeat of every rank that has written to this host's status folder."""
    paths = {int(path.name.rpartition("_")[2]): path for path in folder.glob("heartbeat_*")}
    read = {rank: read_heartbeat(path) for rank, path in sorted(paths.items())}
    return {rank: heartbeat for rank, heartbeat in read.items() if heartbeat}


class HeartbeatFile:
    """Writes one rank's heartbeats. A file that cannot be made or written must not end a run, and is left out."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = path.open("wb", buffering=0)

    def write(self, heartbeat: Heartbeat) -> None:
        if self._file is None:
            return
        names = {"phase": heartbeat.phase[:LONGEST_NAME], "graph": heartbeat.graph[:LONGEST_NAME]}
        fields = json.dumps(vars(heartbeat) | names).encode()
        with suppress(OSError):
            os.pwrite(self._file.fileno(), (_checksum(fields) + fields).ljust(FILE_BYTES), 0)


def _checksum(fields: bytes) -> bytes:
    """Computes a checksum by which a reader knows that it has read one write and not parts of two."""
    return b"%08x" % zlib.crc32(fields)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """Reads the last heartbeat written; None if there is none."""
    for _ in range(NUM_READ_ATTEMPTS):
        try:
            written = path.read_bytes().rstrip()
            checksum, fields = written[:8], written[8:]
            if checksum == _checksum(fields):
                return Heartbeat(**json.loads(fields))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            continue
    return None


class LiveLine:
    """Says in one line what a rank is doing, how far it is and when that ends; remembers how long its phases took."""

    def __init__(self) -> None:
        self._last: Heartbeat | None = None
        self._seconds: dict[str, float] = {}

    def text(self, heartbeat: Heartbeat, now: float) -> str:
        """Describes a heartbeat; empty in the first seconds of a phase and between phases. `now`: CLOCK_MONOTONIC."""
        self._remember(heartbeat)
        seconds = heartbeat.seconds(now)
        if seconds < SHORTEST_SECONDS or heartbeat.kind in (BETWEEN, IDLE):
            return ""
        what = NAMES.get(heartbeat.phase, heartbeat.phase)
        if heartbeat.graph:
            what = f"compiling {heartbeat.graph}"
        step = f"step {heartbeat.step}: " if heartbeat.step else ""
        words = [f"  {step}{what} {seconds:.0f} s"]
        share = 0.0
        if heartbeat.total and not heartbeat.graph:
            words.append(f"{heartbeat.done} of {heartbeat.total} {heartbeat.unit}")
            share = heartbeat.done / heartbeat.total
        left = self._left(heartbeat, seconds, share)
        if left is not None:
            words.append(f"about {left:.0f} s left")
        return ", ".join(words)

    def _left(self, heartbeat: Heartbeat, seconds: float, share: float) -> float | None:
        """Estimates the seconds left by what is done of the phase, else by how long it took the last time."""
        if share > 0:
            return seconds * (1 - share) / share
        last = None if heartbeat.graph else self._seconds.get(heartbeat.phase)
        return last - seconds if last is not None and last > seconds else None

    def _remember(self, heartbeat: Heartbeat) -> None:
        last, self._last = self._last, heartbeat
        if last is not None and last.serial != heartbeat.serial:
            self._seconds[last.phase] = heartbeat.since - last.since
