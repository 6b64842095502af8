"""Records where the time of a run goes, in the Trace Event Format that chrome://tracing and Perfetto open.

Each rank has a file, and rank 0 one of all ranks. Clocks are the host's, so the ranks of a host are aligned.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindgrpo.monitor.host_memory import process_rss

Event = dict[str, Any]
MICROSECONDS = 1e6


class PhaseTrace:
    """Collects the events of one rank: of all phases or of some (`phases`), and of every step."""

    def __init__(
        self,
        rank: int,
        phases: frozenset[str] | None = None,
        with_memory: bool = False,
        with_processor: bool = True,
    ) -> None:
        self.events: list[Event] = []
        self._rank, self._phases = rank, phases
        self._with_memory, self._with_processor = with_memory, with_processor
        # A clock that never jumps, started at the time that other ranks know too.
        self._start = time.time() - time.perf_counter()
        self._name("process_name", f"rank {rank}")
        self._name("thread_name", "phases")

    def _name(self, kind: str, name: str) -> None:
        self._add("M", kind, args={"name": name})

    def _add(self, kind: str, name: str, **more: Any) -> None:
        self.events.append({"ph": kind, "name": name, "pid": self._rank, "tid": 0, **more})

    def now(self) -> float:
        """Returns microseconds since the epoch."""
        return (self._start + time.perf_counter()) * MICROSECONDS

    def wants(self, phase: str) -> bool:
        return self._phases is None or phase in self._phases

    @contextmanager
    def span(self, name: str, kind: str = "phase") -> Iterator[None]:
        """Records the enclosed code as one bar; bars inside it are shown below it."""
        started, used = self.now(), os.times()
        self._memory(started)
        try:
            yield
        finally:
            ended, then = self.now(), os.times()
            args = {}
            if self._with_processor:
                args = {"user_s": then.user - used.user, "system_s": then.system - used.system}
            self._add("X", name, cat=kind, ts=started, dur=ended - started, args=args)
            self._memory(ended)

    def bar(self, name: str, kind: str, seconds: float) -> None:
        """Records a bar of `seconds` that ends now."""
        ended = self.now()
        self._add(
            "X", name, cat=kind, ts=ended - seconds * MICROSECONDS, dur=seconds * MICROSECONDS
        )

    def _memory(self, when: float) -> None:
        if self._with_memory:
            self._add("C", "memory", ts=when, args={"rss": process_rss()})


def write_trace(path: Path, events: Sequence[Event]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"})
    path.write_text(text + "\n", encoding="utf-8")
