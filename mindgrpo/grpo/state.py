"""Holds what a run works with on this rank (Run) and what its steps change besides weights (State)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from mindgrpo.algorithm.sample import PartialGroup
from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.format import Best
from mindgrpo.config import Config
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.grpo.roles import TrainedRoles

# Surrounds a phase, of which the name is known.
Phases = Callable[[str], AbstractContextManager[object]]
RolesT_co = TypeVar("RolesT_co", bound=TrainedRoles, covariant=True)


@dataclass(frozen=True)
class Run(Generic[RolesT_co]):
    """Holds what the steps of a run work with; the same on all ranks but for each one's part of the roles.

    `phases` surrounds each phase of a step.
    """

    config: Config
    backend: Backend
    inputs: Inputs
    roles: RolesT_co
    prompts: PromptSource
    num_steps: int
    phases: Phases = nullcontext

    def learning_rate(self, update: int) -> float:
        """Returns the rate of an update, counted from 0 over the run."""
        num_updates = self.num_steps * self.inputs.plan.batch.updates_per_step
        return self.config.actor_config.lr_schedule.rate(update, num_updates)


@dataclass
class State:
    """What a run has after `step` steps, besides its weights: saved and restored as one, the same on all ranks.

    A step changes it once, at its end, so that a run that is stopped within a step has the state before it. `position`
    prompts were taken from the data over all epochs, and `solved` are the numbers of rows that are not drawn again.
    `unfinished` are groups of partial rollouts, which continue in the next step, the oldest first; `baselines` those of
    rae by role. `open_row` has the metrics of the last step while its evaluation is still to be made, None otherwise.
    `best` is the best checkpoint on disk. `evaluations` are means by reward, the first of them from before the first
    step; `seconds` and `compiles` (graphs) are those of earlier sessions.
    """

    step: int = 0
    position: int = 0
    solved: frozenset[int] = frozenset()
    unfinished: tuple[PartialGroup, ...] = ()
    baselines: Mapping[str, float] = field(default_factory=dict)
    open_row: dict[str, Any] | None = None
    best: Best | None = None
    evaluations: list[dict[str, float | None]] = field(default_factory=list)
    first_step_seconds: float | None = None
    seconds: float = 0.0
    compiles: int = 0
