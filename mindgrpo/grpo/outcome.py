"""What came of a step: its batch, rewards and updates, and what was replaced, corrected or skipped on the way."""

from __future__ import annotations

from dataclasses import dataclass

from mindgrpo.algorithm.non_finite import NonFinite
from mindgrpo.algorithm.rollout_correction import RolloutCorrection
from mindgrpo.algorithm.types import TrainBatch
from mindgrpo.grpo.scoring import Scored
from mindgrpo.rollout.stats import RolloutStats
from mindgrpo.training.update import UpdateReport


@dataclass(frozen=True)
class SkippedUpdate:
    """Update number `update` of a step (from 0), over samples `members`, not made for the `cause` on `rank`."""

    update: int
    members: list[int]
    lr: float
    cause: NonFinite
    rank: int


@dataclass(frozen=True)
class Resampling:
    """Dynamic sampling in numbers: `groups` were replaced over `rounds`; `sampled_mean` is the reward of all samples
    that were drawn, the replaced ones too: that of the step's own is biased by the choice. None where none is known.
    """

    rounds: int
    groups: int
    sampled_mean: float | None


@dataclass(frozen=True)
class PartialFigures:
    """A partial rollout in numbers: of the weights of `version`, over `rounds` of chunks.

    `groups` were whole, `unfinished_groups` with `unfinished_tokens` go on. Ages, of the whole ones, are in steps;
    `stale_tokens` is the share of their tokens that older weights wrote.
    """

    version: int
    rounds: int
    groups: int
    unfinished_groups: int
    unfinished_tokens: int
    age_mean: float
    age_max: int
    stale_tokens: float


@dataclass(frozen=True)
class StepOutcome:
    """`reports` are of the updates that were made; `lr` is the last update's.

    `seconds` by phase on this rank, and of the whole under "step". `stats` are this rank's, of all the step's rollouts.
    `resampling` is None without dynamic sampling, `correction` without a correction for the generator,
    `partial` where every rollout is whole.
    """

    batch: TrainBatch
    scored: Scored
    reports: list[UpdateReport]
    lr: float
    seconds: dict[str, float]
    stats: RolloutStats
    skipped: list[SkippedUpdate]
    resampling: Resampling | None = None
    correction: RolloutCorrection | None = None
    partial: PartialFigures | None = None
