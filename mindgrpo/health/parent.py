"""Ends a process with the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def set_parent_death_signal(number: int) -> None:
    """This process gets the signal when the one that started it ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """This process is killed when `parent`, which started it, ends; at once if it has ended."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
