"""How scoring a sample can end: a number, None, or one of a few kinds of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RAISED, BAD_RESULT, NOT_FINITE = "exceptions", "bad_results", "nan"
TIMEOUT, EXIT, MEMORY = "timeouts", "exits", "memory"
REFUSED = "refused"
KINDS = (RAISED, BAD_RESULT, NOT_FINITE, TIMEOUT, EXIT, MEMORY)
IN_WORDS = {
    RAISED: "raised",
    BAD_RESULT: "returned something else",
    NOT_FINITE: "not finite",
    TIMEOUT: "timed out",
    EXIT: "ended their process",
    MEMORY: "ran out of memory",
    REFUSED: "refused",
}


class Score(float):
    """A reward with counts of what happened on the way, which become metrics of its function."""

    counts: Mapping[str, int]

    def __new__(cls, value: float, counts: Mapping[str, int]) -> Score:
        score = super().__new__(cls, value)
        score.counts = counts
        return score


@dataclass(frozen=True)
class Failure:
    kind: str
    message: str


Outcome = float | None | Failure


def to_json(outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, Failure):
        return {"failed": [outcome.kind, outcome.message]}
    return {"value": outcome, "counts": getattr(outcome, "counts", None)}


def from_json(message: Mapping[str, Any]) -> Outcome:
    """Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    if "failed" in message:
        return Failure(*message["failed"])
    value, counts = message["value"], message["counts"]
    return value if counts is None else Score(value, dict(counts))


@dataclass
class RewardResult:
    """What became of a function's samples, by index.

    `together_failure` is why they could not be scored in one call; `seconds` the time until the last was scored.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    together_failure: Failure | None = None
    printed: str = ""
    printed_bytes: int = 0
    seconds: float = 0.0
    restarts: int = 0

    def record(self, index: int, outcome: Outcome) -> None:
        if isinstance(outcome, Failure):
            self.failures[index] = outcome
        else:
            self.values[index] = outcome

    def rest(self, indices: Sequence[int]) -> list[int]:
        """Return those without an outcome."""
        return [i for i in indices if i not in self.values and i not in self.failures]

    def fail(self, indices: Sequence[int], failure: Failure) -> None:
        """Give `failure` to those without an outcome."""
        self.failures |= dict.fromkeys(self.rest(indices), failure)

    def add(self, other: RewardResult) -> None:
        self.values |= other.values
        self.failures |= other.failures
        self.together_failure = self.together_failure or other.together_failure
        self.printed += other.printed
        self.printed_bytes += other.printed_bytes
        self.restarts += other.restarts
        self.seconds = max(self.seconds, other.seconds)
