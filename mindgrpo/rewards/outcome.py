"""How scoring a sample can end: a number, None, or one of a few kinds of failure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mindgrpo.workers.protocol import (
    BAD_RESULT,
    EXIT,
    MEMORY,
    NOT_FINITE,
    RAISED,
    REFUSED,
    TIMEOUT,
    CallFailure,
    from_message,
    to_message,
)

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


Outcome = float | None | CallFailure


def to_json(outcome: Outcome) -> dict[str, Any]:
    message = to_message(outcome)
    return {**message, "counts": outcome.counts} if isinstance(outcome, Score) else message


def from_json(message: Mapping[str, Any]) -> Outcome:
    """Raises KeyError, TypeError or ValueError for what `to_json` did not make."""
    outcome: Outcome = from_message(message)
    if isinstance(outcome, CallFailure) or "counts" not in message:
        return outcome
    return Score(message["value"], dict(message["counts"]))


@dataclass
class RewardResult:
    """What became of a function's samples, by index.

    `together_failure` is why they could not be scored in one call; `seconds` the time until the last was scored.
    """

    values: dict[int, float | None] = field(default_factory=dict)
    failures: dict[int, CallFailure] = field(default_factory=dict)
    together_failure: CallFailure | None = None
    printed: str = ""
    printed_bytes: int = 0
    seconds: float = 0.0
    restarts: int = 0

    def record(self, index: int, outcome: Outcome) -> None:
        if isinstance(outcome, CallFailure):
            self.failures[index] = outcome
        else:
            self.values[index] = outcome

    def rest(self, indices: Sequence[int]) -> list[int]:
        """Return those without an outcome."""
        return [i for i in indices if i not in self.values and i not in self.failures]

    def fail(self, indices: Sequence[int], failure: CallFailure) -> None:
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
