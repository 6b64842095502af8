"""This rank among the ranks of its host: tells where it is, and knows where the others are.

A thread beats twice a second and runs what is to be looked at as often. Several hosts see each other's ranks through
a subclass that also overrides `of`. Refuses to wait for anybody.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mindgrpo.health import exit_report as verdict
from mindgrpo.health.heartbeat import Reader, Record, Snapshot, path_of, ranks_in

BEAT_SECONDS = 0.5
# How long the launcher's processes may take to write down how a rank ended.
WORD_OF_END_SECONDS = 0.3
WORD_OF_END_NAP = 0.02


class Presence:
    """`folder` is the launcher's status folder; None keeps this rank's record in memory, where no other sees it."""

    def __init__(self, rank: int, world_size: int, folder: Path | None) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, folder
        self._record = Record(path_of(folder, rank) if folder else None)
        self._others: dict[int, Reader] = {}
        self._looks: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @classmethod
    def of_process(cls, rank: int, world_size: int, environment: Mapping[str, str]) -> Presence:
        folder = environment.get("MINDGRPO_STATUS_DIR")
        presence = cls(rank, world_size, Path(folder) if folder else None)
        presence._thread.start()
        return presence

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._record.beat()
            for look in [*self._looks]:
                look()

    def every_beat(self, look: Callable[[], None]) -> None:
        """Calls `look` from the thread, twice a second until the process ends."""
        self._looks.append(look)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self._record.enter(name)
        yield
        # Not after an exception: where it was raised is what will be asked.
        self._record.resume(before)

    def now(self, phase: str) -> None:
        """Between the phases that `phase` surrounds."""
        self._record.enter(phase)

    @contextmanager
    def compiling(self, graph: str) -> Iterator[None]:
        self._record.compiling(graph)
        yield
        self._record.compiling("")

    def waits(self, since: float) -> None:
        """For another rank, since then by the monotonic clock; 0: no more."""
        self._record.waits(since)

    @property
    def waits_address(self) -> int:
        return self._record.waits_address

    def at_step(self, step: int) -> None:
        """`step` counts from 1."""
        self._record.at_step(step)

    def tell_directory(self, directory: Path) -> None:
        """Where the run writes, so that the launcher can go on with it."""
        if self.folder is not None and self.rank == 0:
            (self.folder / "directory").write_text(f"{directory.absolute()}\n", encoding="utf-8")

    def of(self, rank: int) -> Snapshot | None:
        """Where another rank is, or was when it ended; None where that cannot be known."""
        if rank == self.rank:
            return self._record.read()
        if self.folder is None:
            return None
        if rank not in self._others:
            self._others[rank] = Reader(path_of(self.folder, rank))
        return self._others[rank].read()

    def known(self) -> dict[int, Snapshot]:
        """All ranks that can be seen, this one among them."""
        here = ranks_in(self.folder) if self.folder else []
        found = ((rank, self.of(rank)) for rank in {self.rank, *here})
        return {rank: snapshot for rank, snapshot in found if snapshot}

    def ending_of(self, rank: int) -> str:
        """What is known of how a rank ended, and why if that was another's fault; empty for nothing."""
        cause = self._cause()
        last = self.of(rank)
        place = f"rank {rank} has ended in {last.place}" if last else ""
        if cause is None:
            return place
        if cause.rank in (rank, None):
            return cause.what
        return f"{place or f'rank {rank} has ended'}, after {cause.what}"

    def _cause(self) -> verdict.Cause | None:
        """Waits a moment for the launcher's processes, who may hear of an end a little later."""
        if self.folder is None:
            return None
        until = time.monotonic() + WORD_OF_END_SECONDS
        while True:
            cause = verdict.find_cause(self.folder)
            if cause is not None and cause.what:
                return cause
            if time.monotonic() > until:
                return None
            time.sleep(WORD_OF_END_NAP)

    def say(self, line: str) -> None:
        """To this rank's log and to the screen, which has rank 0's log and what others put in a file."""
        sys.stdout.write(f"mindgrpo: {line}\n")
        sys.stdout.flush()
        if self.folder is not None and self.rank != 0:
            with suppress(OSError), (self.folder / "told").open("a", encoding="utf-8") as told:
                told.write(f"mindgrpo: rank {self.rank}: {line}\n")
