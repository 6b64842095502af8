"""Detects a phase that takes longer than its limit, and warns of it or ends the job.

Time in which any rank compiles counts for the phase `compile` and not for the phase in which other ranks wait for it. A
rank without a heartbeat may be stopped or starved rather than dead. The rank that ends the job writes a failure file
for all and the position of its threads to its log; ranks that see the file end too. The launcher
ends those that cannot.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from mindgrpo.errors import show
from mindgrpo.health.failure import RankFailure, read_failure, write_failure
from mindgrpo.health.heartbeat import COMPILE, IDLE, Heartbeat
from mindgrpo.health.rank_health import RankHealth

# A heart that beats twice a second may miss some beats while its host is busy.
SILENT_SECONDS = 5.0
# A longer time between two checks was no part of a phase: the machine was suspended.
LONGEST_CHECK_SECONDS = 3.0
NUM_NAMED_RANKS = 4
DEFAULT = "default"
KEY = "monitor_config.phase_deadline_seconds"
Action = Literal["off", "warn", "stop"]
NAME = "watchdog"


@dataclass(frozen=True)
class Overdue:
    """Describes a phase beyond its limit; `missing` are ranks that others wait for, empty if none stands out."""

    kind: str
    missing: tuple[int, ...]
    sentence: str


class HangDetector:
    """Watches from one rank. `limits`: seconds by phase, and under `default` for every other phase."""

    def __init__(self, rank: int, limits: Mapping[str, float]) -> None:
        self._rank, self._limits = rank, dict(limits)
        self._checked_at: float | None = None
        self._phase: tuple[int, str] | None = None
        self._spent = self._next = 0.0

    def check(self, now: float, ranks: Mapping[int, Heartbeat]) -> Overdue | None:
        """Returns a phase that is overdue once at its limit, again at twice that time, and so on.

        Only the lowest rank that has a heartbeat returns it, so that a job reports it once.
        """
        own = ranks[self._rank]
        elapsed = min(now - (self._checked_at or now), LONGEST_CHECK_SECONDS)
        self._checked_at = now
        limit = None if own.kind == IDLE else self._limits.get(own.kind, self._limits.get(DEFAULT))
        if self._phase != (own.serial, own.graph):
            self._phase, self._spent, self._next = (own.serial, own.graph), 0.0, limit or 0.0
            return None
        if own.kind == COMPILE or not any(other.kind == COMPILE for other in ranks.values()):
            self._spent += elapsed
        if limit is None or self._spent < self._next:
            return None
        self._next = 2 * self._spent
        if self._rank != min(rank for rank, other in ranks.items() if not is_silent(other, now)):
            return None
        missing = ranks_waited_for(now, ranks)
        exceeded = f"{own.position} has taken {self._spent:.0f} s ({KEY} is {limit:g})"
        sentence = f"{exceeded}: {_describe(now, {rank: ranks[rank] for rank in missing})}"
        return Overdue(own.kind, missing, sentence)


def is_silent(heartbeat: Heartbeat, now: float) -> bool:
    return now - heartbeat.beat_at > SILENT_SECONDS


def ranks_waited_for(now: float, ranks: Mapping[int, Heartbeat]) -> tuple[int, ...]:
    """Returns ranks without a heartbeat; else those that do not wait; else those furthest behind, if not all."""
    silent = tuple(rank for rank, other in sorted(ranks.items()) if is_silent(other, now))
    if silent:
        return silent
    busy = tuple(rank for rank, other in sorted(ranks.items()) if not other.waits_since)
    if 0 < len(busy) < len(ranks):
        return busy
    last = min(other.serial for other in ranks.values())
    behind = tuple(rank for rank, other in sorted(ranks.items()) if other.serial == last)
    return behind if len(behind) < len(ranks) else ()


def _describe(now: float, missing: Mapping[int, Heartbeat]) -> str:
    if not missing:
        return "every rank is in it with a heartbeat, and none stands out"
    words = []
    for rank, other in list(missing.items())[:NUM_NAMED_RANKS]:
        seconds = max(0.0, other.seconds(now))
        age = now - other.beat_at
        silence = f", no heartbeat for {age:.0f} s" if is_silent(other, now) else ""
        words.append(f"rank {rank} ({other.position} since {seconds:.0f} s{silence})")
    more = len(missing) - len(words)
    return f"waiting for {', '.join(words)}" + (f" and {more} more" if more else "")


class Watchdog:
    """Checks all ranks at every heartbeat. `end` is called with a sentence and does not return."""

    def __init__(
        self,
        health: RankHealth,
        limits: Mapping[str, float],
        action: Action,
        end: Callable[[str], NoReturn] | None = None,
    ) -> None:
        self._health, self._action = health, action
        self._end = end or self._end_process
        self._detector = HangDetector(health.rank, limits)

    def check(self) -> None:
        folder = self._health.folder
        if folder is not None and read_failure(folder, NAME):
            self._end("another rank has ended this job")
        overdue = self._detector.check(time.monotonic(), self._health.heartbeats())
        if overdue is None:
            return
        if self._action == "stop":
            self._stop(overdue)
        self._health.say(f"warning: {overdue.sentence}")

    def _stop(self, overdue: Overdue) -> NoReturn:
        sentence = f"{overdue.sentence}, and the job was ended"
        remedy = f"if that is not a hang, raise {KEY} or set phase_deadline_action to warn"
        rank = overdue.missing[0] if overdue.missing else None
        if self._health.folder is not None:
            # Before every other failure, whatever ranks may have raised while they waited.
            write_failure(self._health.folder, NAME, RankFailure(rank, 0.0, 1, sentence, remedy))
        self._end(sentence)

    def _end_process(self, sentence: str) -> NoReturn:
        show(sys.stderr, f"mindgrpo: {sentence}; every thread of this rank is at:\n")
        with suppress(OSError, ValueError, AttributeError):  # of standard error that is closed
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        folder, rank = self._health.folder, self._health.rank
        if folder is not None:
            failure = RankFailure(rank, time.time(), 1, sentence, is_consequence=True)
            write_failure(folder, rank, failure)
        os._exit(1)
