"""Keeps this rank's heartbeat, and says where the other ranks are, how one of them ended and how a run is resumed.

A thread writes the heartbeat twice a second and calls the checks that were added with `on_beat`.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindgrpo.errors import show
from mindgrpo.health.failure import first_failure
from mindgrpo.health.heartbeat import (
    Heartbeat,
    HeartbeatFile,
    heartbeat_path,
    heartbeats_in,
    read_heartbeat,
)
from mindgrpo.processes.job import STATUS_VARIABLE

BEAT_SECONDS = 0.5
# The launcher's processes may learn of a rank's end a little later than the ranks that wait for it.
CAUSE_SECONDS, CAUSE_POLL_SECONDS = 0.3, 0.02
# What precedes the program on the launcher's command line, quoted for a shell.
PREFIX_VARIABLE = "MINDGRPO_LAUNCH_PREFIX"
RESUME_FLAGS = ("--resume_training", "--rl_config.resume_training", "--output_dir")


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
        """Makes one and starts its thread; the launcher has put the status folder into `environment`."""
        folder = environment.get(STATUS_VARIABLE)
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
        """Removes the checks where a run is over, but perhaps not the process, which may be a notebook's."""
        self._checks.clear()

    def enter(self, phase: str) -> None:
        serial = self._state.serial + 1
        self._update(phase=phase, since=time.monotonic(), serial=serial, done=0, total=0)

    def progress(self, unit: str, done: int, total: int) -> None:
        """Records how far the phase is, in its `unit`; written at the next beat."""
        with self._lock:
            self._state = replace(self._state, unit=unit, done=done, total=total)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enters a phase inside the present one. An exception leaves it entered: that is where the rank failed."""
        before = self._state
        self.enter(name)
        yield
        serial = self._state.serial + 1
        self._update(phase=before.phase, since=before.since, serial=serial, done=0, total=0)

    @contextmanager
    def counting(self, unit: str, total: int, count: Callable[[], int]) -> Iterator[None]:
        """Reports progress by asking `count` how much is done, at every beat."""

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
        """Records the step that the rank is in; `step` counts from 1."""
        self._update(step=step)

    def waits(self, since: float) -> None:
        """Records since when this rank waits for another one, in monotonic seconds; 0: it does not."""
        self._waits_since.value = since

    @property
    def waits_address(self) -> int:
        """Returns the address of that number, a C double, for native code that waits."""
        return ctypes.addressof(self._waits_since)

    def heartbeat_of(self, rank: int) -> Heartbeat | None:
        """Returns the last heartbeat of a rank, alive or not; None if it is not known."""
        if rank == self.rank:
            return replace(self._state, waits_since=self._waits_since.value)
        return read_heartbeat(heartbeat_path(self.folder, rank)) if self.folder else None

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Returns the last heartbeats of all known ranks, this one among them."""
        others = heartbeats_in(self.folder) if self.folder else {}
        own = self.heartbeat_of(self.rank)
        return others | ({self.rank: own} if own else {})

    def report_output_directory(self, directory: Path) -> None:
        """Reports to the launcher where the run writes, so that it can start the job again from there."""
        if self.folder is not None and self.rank == 0:
            (self.folder / "directory").write_text(f"{directory.absolute()}\n", encoding="utf-8")

    def report_checkpoint(self, checkpoint: Path, command: str) -> None:
        """Reports to the launcher the newest checkpoint and the command that resumes from it."""
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
        """Returns the number of the signal that the launcher has received and passes on; 0 without one."""
        try:
            return int((self.folder / "signal").read_text()) if self.folder else 0
        except (OSError, ValueError):
            return 0

    def how_rank_ended(self, rank: int) -> str:
        """Says in which phase a rank ended, and the cause where another rank failed first; empty if not known."""
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
        show(sys.stdout, f"mindgrpo: {line}\n")
        if self.folder is not None and self.rank != 0:
            with suppress(OSError), (self.folder / "messages").open("a", encoding="utf-8") as lines:
                lines.write(f"mindgrpo: rank {self.rank}: {line}\n")


def _beat(of: weakref.ref[RankHealth]) -> None:
    """Beats until the object is gone: a process may have several runs, one after the other."""
    while True:
        time.sleep(BEAT_SECONDS)
        health = of()
        if health is None:
            return
        health.beat()
        del health


def resuming(command: Sequence[str], directory: Path | str) -> tuple[str, ...]:
    """Returns `command` without the words that say where to resume from, and then with the run in `directory`."""
    words, kept = list(command), []
    while words:
        word = words.pop(0)
        flag, equals, _ = word.partition("=")
        if flag not in RESUME_FLAGS:
            kept.append(word)
        elif not equals and words and not words[0].startswith("--"):
            words.pop(0)
    return (*kept, "--resume_training", "true", "--output_dir", str(directory))


def resume_command(
    argv: Sequence[str], orig_argv: Sequence[str], environment: Mapping[str, str], directory: Path
) -> str:
    """Returns the command that resumes this run, as the user would type it.

    `argv` and `orig_argv` are those of sys: the first counts where the launcher has started this.
    """
    prefix = environment.get(PREFIX_VARIABLE)
    command = shlex.join(resuming(argv if prefix else ("python", *orig_argv[1:]), directory))
    return f"{prefix} {command}" if prefix else command
