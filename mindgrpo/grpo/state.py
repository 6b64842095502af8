"""A run's fixed components on this rank (Run), and the state besides weights that its steps change (State)."""

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

# Phase name -> the context manager that the phase runs in.
Phases = Callable[[str], AbstractContextManager[object]]
RolesT_co = TypeVar("RolesT_co", bound=TrainedRoles, covariant=True)


@dataclass(frozen=True)
class Run(Generic[RolesT_co]):
    """The components that the steps of a run use; equal on all ranks except for each rank's part of the roles.

    Each phase of a step runs inside `phases(name)`; `beside(name, seconds)` records work that ran beside phases until
    now.
    """

    config: Config
    backend: Backend
    inputs: Inputs
    roles: RolesT_co
    prompts: PromptSource
    num_steps: int
    phases: Phases = nullcontext
    beside: Callable[[str, float], None] = lambda name, seconds: None

    def learning_rate(self, update: int) -> float:
        """Returns the learning rate of an update, counted from 0 over the run."""
        return self.config.actor_config.lr_schedule.rate(update, self.num_updates)

    def critic_rate(self, update: int) -> float:
        """Returns the critic's learning rate of an update, counted from 0 over the run."""
        return self.config.critic_config.lr_schedule.rate(update, self.num_updates)

    @property
    def num_updates(self) -> int:
        return self.num_steps * self.inputs.plan.batch.updates_per_step


@dataclass
class State:
    """The resume state after `step` steps, besides weights; equal on all ranks, saved and restored as a whole.

    A step changes it only at its end, so a run that stops within a step has the state before it. `position` counts the
    prompts taken from the data over all epochs; `solved` are the indices of rows no longer drawn; `unfinished` are
    groups of partial rollouts to continue, oldest first; `baselines` are rae's, by role. `open_row` holds the last
    step's metrics until its evaluation is done, else None. `best` is the best checkpoint on disk. `evaluations` are
    means by reward, the first from before the first step. `seconds` and `compiles` (graphs) sum over earlier sessions.
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
