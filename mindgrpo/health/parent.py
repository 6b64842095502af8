"""Whether a process is there, and how it ends with the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

PR_SET_PDEATHSIG = 1


def is_alive(pid: int) -> bool:
    """False for a process that has ended, also while nobody has collected its status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def set_parent_death_signal(number: int) -> None:
    """This process gets the signal when the one that started it ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """This process is killed when `parent`, which started it, ends; at once if it has ended."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
