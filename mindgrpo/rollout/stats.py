"""What a rollout cost beside what it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RolloutStats:
    """`tokens` that were asked for, `rows` computed for them, `places` in slots over all steps, `prompt_tokens`
    computed."""

    tokens: int
    rows: int
    places: int
    prompt_tokens: int

    @classmethod
    def total(cls, usages: Sequence[RolloutStats]) -> RolloutStats:
        columns = zip(*((u.tokens, u.rows, u.places, u.prompt_tokens) for u in usages), strict=True)
        return cls(*(sum(column) for column in columns))

    @property
    def wasted(self) -> float:
        """Share of rows that made no token of any sample."""
        return 1.0 - self.tokens / self.rows if self.rows else 0.0

    @property
    def occupancy(self) -> float:
        """Share of slots that were in use, averaged over steps."""
        return self.rows / self.places if self.places else 0.0
