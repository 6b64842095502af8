"""How scoring a sample can end: a number, None, or one of a few kinds of failure.

Refuses to turn a failure into a number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

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
}


@dataclass(frozen=True)
class Failure:
    kind: str
    message: str


@dataclass
class Tally:
    """What became of a function's samples, by place. `whole` is why they could not be scored together."""

    values: dict[int, float | None] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    whole: Failure | None = None
    printed: str = ""
    printed_bytes: int = 0
    seconds: float = 0.0
    restarts: int = 0

    def rest(self, places: Sequence[int]) -> list[int]:
        return [i for i in places if i not in self.values and i not in self.failures]

    def fail(self, places: Sequence[int], failure: Failure) -> None:
        self.failures |= dict.fromkeys(self.rest(places), failure)

    def add(self, other: Tally) -> None:
        self.values |= other.values
        self.failures |= other.failures
        self.whole = self.whole or other.whole
        self.printed += other.printed
        self.printed_bytes += other.printed_bytes
        self.restarts += other.restarts
        self.seconds = max(self.seconds, other.seconds)

    def counts(self) -> dict[str, int]:
        """Failures by kind, with `errors` their sum, and `none` where the function did not apply."""
        found = Counter(failure.kind for failure in self.failures.values())
        counts = {"errors": len(self.failures), **{kind: found[kind] for kind in KINDS}}
        counts[RAISED] += found[REFUSED]
        counts |= {"restarts": self.restarts, "printed_bytes": self.printed_bytes}
        return counts | {"none": sum(value is None for value in self.values.values())}

    def in_one_line(self) -> str:
        """Each kind of failure with its number and one example; else why a second try was needed; else ""."""
        examples: dict[str, str] = {}
        for failure in self.failures.values():
            examples.setdefault(failure.kind, failure.message)
        counts = Counter(failure.kind for failure in self.failures.values())
        if not counts and self.whole is not None:
            return f"all together: {self.whole.message}; each apart went well"
        return "; ".join(
            f"{counts[kind]} {IN_WORDS.get(kind, kind)}: {message}"
            for kind, message in examples.items()
        )
