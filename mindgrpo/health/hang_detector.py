"""Which phase has taken too long, and which rank the others wait for. Pure: clocks and ranks are given.

Time in which any rank compiles is the compile's, not that of the phase in which the others wait for it. Refuses to
take a rank without a heartbeat for dead: it may be stopped, or its host be busy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindgrpo.health.heartbeat import COMPILE, Snapshot

# What a heart that beats twice a second may miss while a host is busy.
SILENT_SECONDS = 5.0
# A look that comes later than this was itself held up: by a stopped machine, not by a phase.
LONGEST_LOOK = 3.0
NUM_NAMED = 4
DEFAULT = "default"
KEY = "monitor_config.phase_deadline_seconds"


@dataclass(frozen=True)
class Overdue:
    """`missing` are the ranks waited for; empty where nothing sets one apart."""

    kind: str
    seconds: float
    limit: float
    missing: tuple[int, ...]
    sentence: str


class Deadlines:
    """One rank's look at all of them, again and again. `limits` are seconds by phase, and `default` for the others."""

    def __init__(self, rank: int, limits: Mapping[str, float]) -> None:
        self._rank, self._limits = rank, dict(limits)
        self._looked_at: float | None = None
        self._occurrence: tuple[int, str] | None = None
        self._spent = self._next = 0.0

    def look(self, now: float, ranks: Mapping[int, Snapshot]) -> Overdue | None:
        """Told once at the limit, again at twice the limit, and so on; by the first rank that is awake."""
        own = ranks[self._rank]
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_LOOK)
        self._looked_at = now
        limit = self._limits.get(own.kind, self._limits.get(DEFAULT))
        occurrence = (own.serial, own.graph)
        if occurrence != self._occurrence:
            self._occurrence, self._spent, self._next = occurrence, 0.0, limit or 0.0
            return None
        others_compile = any(other.kind == COMPILE for other in ranks.values())
        if own.kind == COMPILE or not others_compile:
            self._spent += passed
        if limit is None or self._spent < self._next:
            return None
        self._next = 2 * self._spent
        if self._rank != min(r for r, found in ranks.items() if not silent(found, now)):
            return None
        missing = waited_for(now, ranks)
        sentence = _sentence(own, self._spent, limit, now, {r: ranks[r] for r in missing})
        return Overdue(own.kind, self._spent, limit, missing, sentence)


def silent(found: Snapshot, now: float) -> bool:
    return now - found.beat_at > SILENT_SECONDS


def waited_for(now: float, ranks: Mapping[int, Snapshot]) -> tuple[int, ...]:
    """Ranks without a heartbeat; else those that wait for nobody; else those furthest behind. None: all are alike."""
    without = tuple(sorted(rank for rank, found in ranks.items() if silent(found, now)))
    if without:
        return without
    busy = tuple(sorted(rank for rank, found in ranks.items() if not found.waits_since))
    if 0 < len(busy) < len(ranks):
        return busy
    last = min(found.serial for found in ranks.values())
    behind = tuple(sorted(rank for rank, found in ranks.items() if found.serial == last))
    return behind if len(behind) < len(ranks) else ()


def _sentence(
    own: Snapshot, spent: float, limit: float, now: float, missing: Mapping[int, Snapshot]
) -> str:
    taken = f"{own.place} has taken {spent:.0f} s ({KEY} is {limit:g})"
    if not missing:
        return f"{taken}: every rank is in it with a heartbeat, and none stands out"
    words = []
    for rank, found in list(missing.items())[:NUM_NAMED]:
        since = found.graph_since if found.graph else found.since
        told = f"rank {rank} ({found.place} since {max(0.0, now - since):.0f} s"
        if silent(found, now):
            told += f", no heartbeat for {now - found.beat_at:.0f} s"
        words.append(told + ")")
    more = len(missing) - len(words)
    return f"{taken}: waiting for {', '.join(words)}" + (f" and {more} more" if more else "")
