"""Finds and ends the processes of one job.

Every process of a job inherits the job's status folder in its environment. Only processes that have it there are ever
signalled.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mindgrpo.processes.linux import IN_MEMORY, is_alive, remove_left_behind, shared_files_of

# In the environment of every process of a job: the folder for heartbeats and failures. It says whose they are.
STATUS_VARIABLE = "MINDGRPO_STATUS_DIR"
# Set for processes that end by themselves with their rank, and tidy up after what they have started.
ENDS_WITH_RANK_VARIABLE = "MINDGRPO_ENDS_WITH_RANK"
# In the status folder: a path a line, of files in shared memory and of folders.
LEFT_BEHIND = "left_behind_{rank}"
TIDY_SECONDS, TIDY_POLL_SECONDS = 1.5, 0.05


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
        self._kill(pid for pid, ends_with_rank in processes.items() if not ends_with_rank)
        left = self._wait_for(processes)
        self._kill(left)
        self._wait_for(left)
        remove_shared_files(self._name)
        remove_left_behind(left_behind)
        for listed in self._folder.glob(LEFT_BEHIND.format(rank="*")):
            remove_left_behind(listed.read_text(encoding="utf-8").splitlines())

    def _kill(self, processes: Iterable[int]) -> None:
        for pid in processes:
            self.signal(pid, signal.SIGKILL)

    def _wait_for(self, processes: Iterable[int]) -> set[int]:
        """Waits for these, and for what they start meanwhile; returns those that have not ended in TIDY_SECONDS."""
        until = time.monotonic() + TIDY_SECONDS
        # One that is ending has no environment any more.
        while (left := {*self.find(), *filter(is_alive, processes)}) and time.monotonic() < until:
            time.sleep(TIDY_POLL_SECONDS)
        return left


def remove_shared_files(job: str) -> None:
    """Removes what ranks that were killed while they met have left behind."""
    for folder in (IN_MEMORY, tempfile.gettempdir()):
        remove_left_behind(Path(folder).glob(f"mindgrpo-{job}-*"))
