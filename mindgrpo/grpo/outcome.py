"""What came of a step: its batch, rewards and updates, and what was replaced, corrected or skipped on the way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.non_finite import NonFinite
from mindgrpo.algorithm.rollout_correction import RolloutCorrection
from mindgrpo.algorithm.types import TrainBatch
from mindgrpo.backend.rank_consistency import digest
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


def step_digests(batch: TrainBatch, rewards: np.ndarray) -> dict[str, str]:
    """Of a step's batch before the update, by what a user calls each."""
    rollout = batch.rollout
    weights = batch.token_advantages, batch.rollout_is_weights
    return {
        "prompts": digest(rollout.prompt_ids),
        "completions": digest(rollout.completion_ids, rollout.finish_reasons, rollout.action_mask),
        "the generator's log-probs": digest(rollout.generator_logps, rollout.weights_version),
        "rewards": digest(rewards),
        "the reference's log-probs": digest(batch.reference_logps),
        "the policy's log-probs": digest(batch.old_logps),
        "advantages": digest(batch.advantages, *weights),
        "samples that count": digest(batch.sample_mask),
    }
