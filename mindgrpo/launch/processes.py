"""Starts, finds and ends the processes of one job.

Every process of a job inherits the job's status folder in its environment. Only processes that have it there are ever
signalled.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.health.processes import (
    ENDS_WITH_RANK_VARIABLE,
    IN_MEMORY,
    LEFT_BEHIND,
    STATUS_VARIABLE,
    end_with_parent,
    is_alive,
    remove_left_behind,
    shared_files_of,
)
from mindgrpo.launch.plan import PlannedProcess

TIDY_SECONDS, TIDY_POLL_SECONDS = 1.5, 0.05


def start_process(
    process: PlannedProcess, stdin: Any = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Starts it in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone.

    It ends with the launcher. Where a cluster's scheduler signals every process of a job to end, only the launcher and
    the ranks, which listen again, take it as meant for them.
    """
    launcher = os.getpid()

    def prepare() -> None:
        end_with_parent(launcher)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    log = 2 if process.log is None else os.open(process.log, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        return subprocess.Popen(
            process.command,
            env=process.environment,
            stdin=stdin,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=prepare,
        )
    finally:
        if process.log is not None:
            os.close(log)


class JobProcesses:
    """Finds the processes of one job, however they were started and whatever their parent is by now."""

    def __init__(self, name: str, status_folder: Path) -> None:
        self._name, self._folder = name, status_folder
        self._mark = f"\0{STATUS_VARIABLE}={status_folder}\0".encode()

    def _environment_of(self, pid: int | str) -> bytes:
        """Reads it; empty for a process that has ended, or is another user's."""
        try:
            return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return b""

    def owns(self, pid: int) -> bool:
        return self._mark in self._environment_of(pid)

    def find(self) -> dict[int, bool]:
        """Returns process ids, and whether each ends with its rank by itself."""
        environments = {
            int(entry.name): self._environment_of(entry.name)
            for entry in os.scandir("/proc")
            if entry.name.isdecimal()
        }
        tidy = f"\0{ENDS_WITH_RANK_VARIABLE}=".encode()
        return {pid: tidy in text for pid, text in environments.items() if self._mark in text}

    def signal(self, pid: int, number: int) -> None:
        if self.owns(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_all(self) -> None:
        """Kills ranks and what holds them, and a moment later what has not ended with them.

        Waits until they are gone: the system takes a moment to take their memory back, which the next start needs.
        """
        (self._folder / "ending").touch()  # what ends from here on is not a cause
        processes = self.find()
        left_behind = shared_files_of(processes)
        for pid, ends_with_rank in processes.items():
            if not ends_with_rank:
                self.signal(pid, signal.SIGKILL)
        until = time.monotonic() + TIDY_SECONDS
        # One that is ending has no environment any more.
        while (left := {*self.find(), *filter(is_alive, processes)}) and time.monotonic() < until:
            time.sleep(TIDY_POLL_SECONDS)
        for pid in left:
            self.signal(pid, signal.SIGKILL)
        remove_shared_files(self._name)
        remove_left_behind(left_behind)
        for listed in self._folder.glob(LEFT_BEHIND.format(rank="*")):
            remove_left_behind(listed.read_text(encoding="utf-8").splitlines())


def remove_shared_files(job: str) -> None:
    """Removes what ranks that were killed while they met have left behind."""
    for folder in (IN_MEMORY, tempfile.gettempdir()):
        remove_left_behind(Path(folder).glob(f"mindgrpo-{job}-*"))
