"""process.json: which process writes a run's folder, so that another one can tell whether the run still goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mindgrpo.health.heartbeat import Heartbeat, read_heartbeat

NAME = "process.json"


@dataclass(frozen=True)
class RunProcess:
    """`started` tells it from a later process of the same number; `heartbeat` is None where nothing launched it."""

    host: str
    pid: int
    started: float
    heartbeat: str | None

    @property
    def is_here(self) -> bool:
        return self.host == os.uname().nodename

    @property
    def is_alive(self) -> bool | None:
        """None on another host, from where it cannot be seen."""
        if not self.is_here:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def last_heartbeat(self) -> Heartbeat | None:
        if self.heartbeat is None or not self.is_here:
            return None
        return read_heartbeat(Path(self.heartbeat))


def write_process(directory: Path, heartbeat: Path | None) -> None:
    """This process is the one that writes to `directory`."""
    own = RunProcess(
        os.uname().nodename,
        os.getpid(),
        psutil.Process().create_time(),
        str(heartbeat) if heartbeat is not None else None,
    )
    (directory / NAME).write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")


def read_process(directory: Path) -> RunProcess | None:
    """None where there is none, or only the beginning of one."""
    try:
        return RunProcess(**json.loads((directory / NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
