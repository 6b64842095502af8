"""Writes and reads heartbeat files: which phase a rank is in, and when it was last alive.

A rank rewrites its file `heartbeat_RANK` in the status folder whenever its phase changes and twice a second. The file
outlives the rank, so that it tells in which phase a rank was killed.
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


@dataclass(frozen=True)
class Heartbeat:
    """Where a rank is. Times are seconds of CLOCK_MONOTONIC, the same clock for all processes of a host.

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
        """The phase, or `compile` while a graph is compiled in it."""
        return COMPILE if self.graph else self.phase

    @property
    def position(self) -> str:
        """Such as `phase rollout of step 5`."""
        when = f"of step {self.step}" if self.step else "before step 1"
        if self.graph:
            return f"phase {COMPILE} (graph {self.graph}, in {self.phase} {when})"
        return f"phase {self.phase} {when}"


def heartbeat_path(folder: Path, rank: int) -> Path:
    return folder / f"heartbeat_{rank}"


def heartbeats_in(folder: Path) -> dict[int, Heartbeat]:
    """The last heartbeat of every rank that has written to this host's status folder."""
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
    """Shows a reader that it has read one write and not parts of two, wherever the writer was meanwhile."""
    return b"%08x" % zlib.crc32(fields)


def read_heartbeat(path: Path) -> Heartbeat | None:
    """The last heartbeat written; None if there is none."""
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
