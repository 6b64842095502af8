"""Marks the processes of a job, says whether one is alive, ends it with its parent (Linux), removes what it leaves."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# In the environment of every process of a job: the folder for heartbeats and failures. It says whose they are.
STATUS_VARIABLE = "MINDGRPO_STATUS_DIR"
# Set for processes that end by themselves with their rank, and tidy up after what they have started.
ENDS_WITH_RANK_VARIABLE = "MINDGRPO_ENDS_WITH_RANK"
# Signals that end a job.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# In the status folder: a path a line, of files in shared memory and of folders.
LEFT_BEHIND = "left_behind_{rank}"
IN_MEMORY = "/dev/shm/"
PR_SET_PDEATHSIG = 1


def is_alive(pid: int) -> bool:
    """Returns False for a process that has ended, also while nobody has collected its status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def set_parent_death_signal(number: int) -> None:
    """Sends this process the signal when the one that started it ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """Kills this process when `parent`, which started it, ends; at once if it has ended."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def shared_files_of(processes: Iterable[int]) -> list[str]:
    """Lists files in shared memory that these processes have mapped; none for those that have ended."""
    mapped: set[str] = set()
    for pid in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            mapped |= {line[line.index(IN_MEMORY) :] for line in lines if IN_MEMORY in line}
    return sorted(path for path in mapped if not path.endswith(" (deleted)"))


def remove_left_behind(paths: Iterable[str | Path]) -> None:
    """Removes files and folders; those that are gone, or another user's, are left out."""
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
