"""Keeps this rank's heartbeat, and tells where the other ranks are and how one of them ended.

A thread writes the heartbeat twice a second and calls the checks that were added with `on_beat`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindgrpo.health.failure import first_failure
from mindgrpo.health.heartbeat import (
    Heartbeat,
    HeartbeatFile,
    heartbeat_path,
    heartbeats_in,
    read_heartbeat,
)

BEAT_SECONDS = 0.5
# The launcher's processes may learn of a rank's end a little later than the ranks that wait for it.
CAUSE_SECONDS, CAUSE_POLL_SECONDS = 0.3, 0.02


class RankHealth:
    """This rank among the ranks of its host. `folder` is the job's status folder; None without a launcher."""

    def __init__(self, rank: int, world_size: int, folder: Path | None) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._file = HeartbeatFile(heartbeat_path(folder, rank)) if folder else None
        self._lock = threading.Lock()
        self._waits_since = ctypes.c_double(0.0)
        self._checks: list[Callable[[], None]] = []
        now = time.monotonic()
        self._state = Heartbeat(os.getpid(), now, "start", now)
        self._update()

    @classmethod
    def of_process(cls, rank: int, world_size: int, environment: Mapping[str, str]) -> RankHealth:
        """Starts the thread too; the launcher has put the status folder into `environment`."""
        folder = environment.get("MINDGRPO_STATUS_DIR")
        health = cls(rank, world_size, Path(folder) if folder else None)
        beating = (weakref.ref(health),)
        threading.Thread(target=_beat, args=beating, name="heartbeat", daemon=True).start()
        return health

    @property
    def heartbeat_file(self) -> Path | None:
        return heartbeat_path(self.folder, self.rank) if self.folder else None

    def beat(self) -> None:
        self._update(beat_at=time.monotonic())
        for check in [*self._checks]:
            check()

    def _update(self, **changes: Any) -> None:
        with self._lock:
            waits = self._waits_since.value
            self._state = replace(self._state, waits_since=waits, **changes)
            if self._file is not None:
                self._file.write(self._state)

    def on_beat(self, check: Callable[[], None]) -> None:
        """Calls `check` from the heartbeat's thread, twice a second until the process ends."""
        self._checks.append(check)

    def end_checks(self) -> None:
        """Where a run is over, but perhaps not the process, which may be a notebook's."""
        self._checks.clear()

    def enter(self, phase: str) -> None:
        serial = self._state.serial + 1
        self._update(phase=phase, since=time.monotonic(), serial=serial, done=0, total=0)

    def progress(self, unit: str, done: int, total: int) -> None:
        """How far the phase is, in its `unit`. Written at the next beat."""
        with self._lock:
            self._state = replace(self._state, unit=unit, done=done, total=total)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase inside the present one. An exception leaves it entered: that is where the rank failed."""
        before = self._state
        self.enter(name)
        yield
        serial = self._state.serial + 1
        self._update(phase=before.phase, since=before.since, serial=serial, done=0, total=0)

    @contextmanager
    def counting(self, unit: str, total: int, count: Callable[[], int]) -> Iterator[None]:
        """As `progress`, for what tells how much is done when it is asked, at every beat."""

        def check() -> None:
            self.progress(unit, count(), total)

        self._checks.append(check)
        try:
            yield
        finally:
            with suppress(ValueError):
                self._checks.remove(check)

    @contextmanager
    def compiling(self, graph: str) -> Iterator[None]:
        self._update(graph=graph, graph_since=time.monotonic())
        yield
        self._update(graph="")

    def at_step(self, step: int) -> None:
        """`step` counts from 1."""
        self._update(step=step)

    def waits(self, since: float) -> None:
        """Since when this rank waits for another one (monotonic seconds); 0: it does not. Told at the next beat."""
        self._waits_since.value = since

    @property
    def waits_address(self) -> int:
        """The address of that number, a C double, for native code that waits."""
        return ctypes.addressof(self._waits_since)

    def heartbeat_of(self, rank: int) -> Heartbeat | None:
        """The last heartbeat of a rank, alive or not; None if it is not known."""
        if rank == self.rank:
            return replace(self._state, waits_since=self._waits_since.value)
        return read_heartbeat(heartbeat_path(self.folder, rank)) if self.folder else None

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Of all ranks that are known, this one among them."""
        others = heartbeats_in(self.folder) if self.folder else {}
        own = self.heartbeat_of(self.rank)
        return others | ({self.rank: own} if own else {})

    def tell_output_directory(self, directory: Path) -> None:
        """Tells the launcher where the run writes, so that it can start the job again from there."""
        if self.folder is not None and self.rank == 0:
            (self.folder / "directory").write_text(f"{directory.absolute()}\n", encoding="utf-8")

    def tell_checkpoint(self, checkpoint: Path, command: str) -> None:
        """Tells the launcher of the newest checkpoint and of the command that resumes from it."""
        if self.folder is not None and self.rank == 0:
            text, partial = (
                f"{checkpoint.absolute()}\n{command}\n",
                self.folder / "partial_checkpoint",
            )
            # Where the disk is full, the launcher knows of the one before.
            with suppress(OSError):
                partial.write_text(text, encoding="utf-8")
                partial.replace(self.folder / "checkpoint")

    def signal_of_launcher(self) -> int:
        """The number of the signal that the launcher has received and passes on; 0 without one."""
        try:
            return int((self.folder / "signal").read_text()) if self.folder else 0
        except (OSError, ValueError):
            return 0

    def how_rank_ended(self, rank: int) -> str:
        """A sentence's part with the phase, and the cause where another rank failed first; empty if not known."""
        last = self.heartbeat_of(rank)
        ended = f"rank {rank} has ended" + (f" in {last.position}" if last else "")
        until = time.monotonic() + CAUSE_SECONDS
        while self.folder is not None and time.monotonic() < until:
            cause = first_failure(self.folder)
            if cause is not None:
                same = cause.rank in (rank, None)
                return cause.message if same else f"{ended}, after {cause.message}"
            time.sleep(CAUSE_POLL_SECONDS)
        return ended if last else ""

    def say(self, line: str) -> None:
        """Prints a line to this rank's log and on the screen, which shows the log of rank 0 and the file `messages`."""
        sys.stdout.write(f"mindgrpo: {line}\n")
        sys.stdout.flush()
        if self.folder is not None and self.rank != 0:
            with suppress(OSError), (self.folder / "messages").open("a", encoding="utf-8") as lines:
                lines.write(f"mindgrpo: rank {self.rank}: {line}\n")


def _beat(of: weakref.ref[RankHealth]) -> None:
    """Until it is gone with what it is the health of: a process may have several runs, one after the other."""
    while True:
        time.sleep(BEAT_SECONDS)
        health = of()
        if health is None:
            return
        health.beat()
        del health
