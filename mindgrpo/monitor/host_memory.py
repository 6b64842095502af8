"""Watches the host's memory during a run: records it, warns, and ends this run before the host runs out of it.

Runs in a thread of one rank per host. It reads the memory of the ranks' own processes and of the host, not of other
processes, and ends only its own process, which ends the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from mindgrpo.config.observation import MonitorConfig
from mindgrpo.errors import show

CGROUPS = {  # by the controller that /proc/self/cgroup names: folder, limit, use; of version 2, then of version 1
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}
# A warning is repeated only after the share was this far below the limit.
HYSTERESIS = 0.02


def process_rss() -> int:
    return int(psutil.Process().memory_info().rss)


def format_bytes(num_bytes: int | float) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class HostMemoryExhausted(RuntimeError):
    """Ends a run whose host uses more memory than the limit, if it was asked to."""


@dataclass(frozen=True)
class HostMemory:
    """Holds the bytes used by all programs together; those of the container, or job, if it has its own limit."""

    used: int
    total: int

    @property
    def available(self) -> int:
        return max(0, self.total - self.used)

    @property
    def share(self) -> float:
        return self.used / self.total


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Reads the memory that this process may use: the machine's, or what the tightest of its cgroups leaves of it."""
    whole = psutil.virtual_memory()
    machine = HostMemory(whole.total - whole.available, whole.total)
    return min([machine, *_containers(root)], key=lambda memory: memory.total)


def _containers(root: Path) -> Iterator[HostMemory]:
    """Yields the memory of the cgroups of this process that have a limit; in a container the root is its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    own: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    for controller, (folder, limit, use) in CGROUPS.items():
        top = root / folder
        inner = top / own.get(controller, "").lstrip("/")
        for group in (inner, *inner.parents):
            if (memory := _container(group, limit, use)) is not None:
                yield memory
            if group == top:
                break


def _container(folder: Path, limit: str, use: str) -> HostMemory | None:
    try:
        total = int((folder / limit).read_text())
        used = int((folder / use).read_text())
        lines = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    # Pages of files that the system drops before it runs out of memory.
    stat = dict(line.split() for line in lines)
    files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return HostMemory(max(0, used - files), total)


def _end_at_once() -> None:
    show(sys.stdout, "")
    os._exit(1)


class HostMemoryMonitor:
    """Checks the memory periodically; `processes` are the ranks of this host, `say` prints a line on the console.

    With protection, `exceeded` is set above the threshold, so that the run ends at its next step. Half-way from the
    threshold to the complete memory there may be no next step, and the thread calls `end`.
    """

    def __init__(
        self,
        settings: MonitorConfig,
        path: Path,
        processes: Mapping[int, int],
        say: Callable[[str], None],
        read: Callable[[], HostMemory] = host_memory,
        end: Callable[[], None] = _end_at_once,
    ) -> None:
        self._settings, self._path, self._say = settings, path, say
        self._read, self._end = read, end
        self._processes = {rank: psutil.Process(pid) for rank, pid in processes.items()}
        self._stopped = threading.Event()
        self._warned, self._writes = False, True
        self.step = 1
        self.exceeded: str | None = None
        self._thread = threading.Thread(target=self._watch, name="host memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        seconds = self._settings.seconds
        while not self._stopped.wait(seconds):
            self.look()

    def look(self) -> None:
        memory = self._read()
        rss = self._rss()
        if self._writes and self._settings.covers(self.step):
            self._write(memory, rss)
        limit = self._settings.host_max_memory_threshold
        if memory.share > limit:
            self._beyond(memory, rss)
        elif memory.share < limit - HYSTERESIS:
            self._warned = False

    def _rss(self) -> dict[int, int]:
        bytes_by_rank = dict.fromkeys(self._processes, 0)
        for rank, process in self._processes.items():
            with suppress(psutil.Error):
                bytes_by_rank[rank] = int(process.memory_info().rss)
        return bytes_by_rank

    def _write(self, memory: HostMemory, rss: Mapping[int, int]) -> None:
        row = {
            "time": time.time(),
            "step": self.step,
            "used": memory.used,
            "total": memory.total,
            "share": memory.share,
            "rss": {str(rank): size for rank, size in rss.items()},
        }
        try:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
        except OSError as error:
            # The thread still protects the host.
            self._writes = False
            self._say(f"  warning: {self._path} is not written any more: {error.strerror}")

    def _beyond(self, memory: HostMemory, rss: Mapping[int, int]) -> None:
        settings = self._settings
        limit = settings.host_max_memory_threshold
        words = (
            f"the host's memory is used to {memory.share:.1%} ({format_bytes(memory.used)} of "
            f"{format_bytes(memory.total)}, by this run's ranks {format_bytes(sum(rss.values()))}), "
            f"above monitor_config.host_max_memory_threshold {limit}"
        )
        if not self._warned:
            self._warned = True
            self._say(f"  warning: {words}")
        if not settings.host_memory_protection:
            return
        self.exceeded = words
        if memory.share > (1 + limit) / 2:
            self._say(f"  ending this run at once, without its model: {words}")
            self._end()
