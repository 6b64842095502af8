"""Asks Linux about processes: limits and kills them."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
PAGE = resource.getpagesize()
# What one large allocation may take before its process is seen and ended.
RESERVED_BYTES = 16 << 30


def adopt_orphans() -> None:
    """Becomes the parent of descendants whose parents end, in init's stead."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def limit_reserved(num_bytes: int) -> None:
    """Limits what this process may reserve to `num_bytes` beyond RESERVED_BYTES; then Python raises MemoryError.

    Memory in use is for others to watch: the system has no limit of it, and every thread reserves 8 MiB of stack.
    """
    hard, wanted = resource.getrlimit(resource.RLIMIT_DATA)[1], num_bytes + RESERVED_BYTES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def too_much_memory(num_bytes: int) -> str:
    """Says that a process, or several together, used more than `num_bytes`."""
    return f"more than reward_config.memory, {num_bytes >> 20} MiB"


def memory_of(pid: int) -> int:
    """Returns resident bytes that are no file's; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    # A process in its last moments shows less than it should.
    return max(0, int(fields[1]) - int(fields[2])) * PAGE if len(fields) > 2 else 0


def kill_children(spared: int = 0) -> bool:
    """Kills the processes whose parent this one is, and their groups; returns whether there were any."""
    pids = [child.pid for child in psutil.Process().children() if child.pid != spared]
    for pid in pids:
        kill_group(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return bool(pids)


def kill_group(leader: int) -> None:
    """Kills the process and what it started in its own group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def how_it_ended(wait_status: int) -> str:
    code = os.waitstatus_to_exitcode(wait_status)
    return f"exited with status {code}" if code >= 0 else f"was killed by signal {-code}"
