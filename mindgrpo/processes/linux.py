"""Asks Linux about processes: whose child one is, its memory, time and files; ends it with its parent; kills groups."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

# Signals that end a job.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IN_MEMORY = "/dev/shm/"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAGE = resource.getpagesize()
# What one large allocation may take before its process is seen and ended.
RESERVED_BYTES = 16 << 30


class ProcessState(NamedTuple):
    """`letter` is Z or X for a process that has ended."""

    letter: str
    parent: int
    group: int


def state_of(pid: int) -> ProcessState | None:
    """Reads /proc; None where there is no such process."""
    try:
        letter, parent, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return ProcessState(letter, int(parent), int(group))


def states() -> dict[int, ProcessState]:
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal()]
    return {pid: state for pid in pids if (state := state_of(pid)) is not None}


def is_alive(pid: int) -> bool:
    """Returns False for a process that has ended, also while nobody has collected its status."""
    state = state_of(pid)
    return state is not None and state.letter not in "ZX"


def set_parent_death_signal(number: int) -> None:
    """Sends this process the signal when the one that started it ends; 0: none."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_parent(parent: int) -> None:
    """Kills this process when `parent`, which started it, ends; at once if it has ended."""
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Becomes the parent of descendants whose parents end, in init's stead."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_group(leader: int) -> None:
    """Kills the process and what it started in its own group."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(leader, signal.SIGKILL)


def kill_children(spared: int = 0) -> bool:
    """Kills the processes whose parent this one is, and their groups; returns whether there were any."""
    own = os.getpid()
    pids = [pid for pid, state in states().items() if state.parent == own and pid != spared]
    for pid in pids:
        kill_group(pid)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return bool(pids)


def memory_of(pid: int) -> int:
    """Returns resident bytes that are no file's; 0 for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    # A process in its last moments shows less than it should.
    return max(0, int(fields[1]) - int(fields[2])) * PAGE if len(fields) > 2 else 0


class TimeUsed(NamedTuple):
    """What this process has done by now, in seconds: `computed` or waited for a core to compute on, and what its
    `children` that have ended computed."""

    now: float
    computed: float
    children: float

    @classmethod
    def read(cls) -> TimeUsed:
        """Where the system does not say how long it waited for a core, it counts as computing all the time."""
        now = time.monotonic()
        own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        computed, children = (used.ru_utime + used.ru_stime for used in (own, others))
        try:
            waited = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return cls(now, now, children)
        return cls(now, computed + waited, children)


def limit_reserved(num_bytes: int) -> None:
    """Limits what this process may reserve to `num_bytes` beyond RESERVED_BYTES; then Python raises MemoryError.

    Memory in use is for others to watch: the system has no limit of it, and every thread reserves 8 MiB of stack.
    """
    hard, wanted = resource.getrlimit(resource.RLIMIT_DATA)[1], num_bytes + RESERVED_BYTES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (wanted, hard))


def leave_no_core() -> None:
    """Keeps a process that is about to crash, or to be killed, from writing a core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


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
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
