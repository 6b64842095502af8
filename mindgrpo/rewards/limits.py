"""How long and how large scoring may get."""

from __future__ import annotations

from dataclasses import dataclass

# What a step may lose to a function that hangs on all samples together, beside one deadline.
LONGEST_TOGETHER = 2.5


@dataclass(frozen=True)
class Limits:
    """`deadline`: seconds for one sample alone. `together`: for all of a step in one call, None for
    `deadline` and at most 2.5. `memory`: bytes a worker. `workers`: processes a function's samples are
    dealt to."""

    deadline: float = 10.0
    together: float | None = None
    memory: int = 2 << 30
    workers: int = 1

    @property
    def first_call(self) -> float:
        return min(self.deadline, LONGEST_TOGETHER) if self.together is None else self.together
