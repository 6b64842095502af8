"""Partial rollouts of a run: fills up the prompts under way, draws until a step has enough, and keeps the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from mindgrpo.algorithm.types import Completion, Rollout
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.config.arithmetic import BatchPlan
from mindgrpo.grpo.outcome import PartialFigures
from mindgrpo.grpo.rollout import Replicas
from mindgrpo.rollout.engine import Request, SeedKey
from mindgrpo.rollout.partial import PartialGroup, PartialLimits, PartialOutcome, draw_partial
from mindgrpo.rollout.sample import Sample
from mindgrpo.rollout.stats import RolloutStats


class Positions(Protocol):
    """Prompts by their number in the run's order: grpo/prompt_source.py, or a test."""

    def take(self, count: int) -> Sequence[int]: ...
    def token_ids(self, positions: Sequence[int]) -> list[np.ndarray]: ...
    def assign(self, positions: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class PartialSettings:
    """`under_way` prompts of `num_generations` samples each are drawn at a time."""

    limits: PartialLimits
    under_way: int
    num_generations: int

    @classmethod
    def of(cls, batch: BatchPlan) -> PartialSettings | None:
        """None where the configuration asks for whole rollouts."""
        rl = batch.config.rl_config
        if not rl.partial_rollout:
            return None
        limits = PartialLimits(
            batch.prompts_per_step,
            rl.rollout_chunk,
            batch.config.generate_config.sampling_config.max_tokens,
            rl.staleness_limit,
            rl.rollout_token_budget,
        )
        return cls(limits, batch.prompts_under_way, rl.num_generations)


class PartialRollouts:
    """`unfinished` groups go on in the next step, the oldest first; they are the same on every rank.

    `figures` and `stats`, of this rank's engine, are of the last rollout.
    """

    def __init__(self, settings: PartialSettings, positions: Positions, replicas: Replicas) -> None:
        self._settings, self._positions, self._replicas = settings, positions, replicas
        self.unfinished: tuple[PartialGroup, ...] = ()
        self.figures: PartialFigures | None = None
        self.stats = RolloutStats(0, 0, 0, 0)
        self._groups: list[PartialGroup] = []

    def begin_step(self, step: int) -> list[np.ndarray]:
        """Token ids int32 [n] of what is under way in step number `step`: prompts, and what is there of samples."""
        settings = self._settings
        # A run that was resumed with fewer prompts under way may have more than these.
        fresh = self._positions.take(max(0, settings.under_way - len(self.unfinished)))
        prompts = self._positions.token_ids(fresh)
        begun = (
            PartialGroup.begun(position, prompt, step, settings.num_generations)
            for position, prompt in zip(fresh, prompts, strict=True)
        )
        self._groups = [*self.unfinished, *begun]
        return [part for g in self._groups for part in (g.prompt, *(s.tokens for s in g.samples))]

    def generate(self, sampling: SamplingParams, key: SeedKey, version: int) -> Rollout:
        """Whole groups by weights of `version` and of those before; all ranks together, after `begin_step`."""
        rounds: list[RolloutStats] = []

        def complete(requests: Sequence[Request], turn: int) -> list[Completion]:
            completions = self._replicas.complete(
                requests, sampling, replace(key, turn=turn), version
            )
            rounds.append(self._replicas.stats)
            return completions

        def answer(drawn: Mapping[int, Sample]) -> Mapping[int, Sample]:
            return self._replicas.next_turns(drawn, limits.max_tokens, version)

        limits = self._settings.limits
        outcome = draw_partial(self._groups, limits, key.step, complete, answer)
        self.stats = RolloutStats.total(rounds) if rounds else RolloutStats(0, 0, 0, 0)
        self.unfinished, self._groups = outcome.unfinished, []
        self._positions.assign([group.position for group in outcome.groups])
        self.figures = _figures(outcome, key.step, version)
        return outcome.rollout()


def _figures(outcome: PartialOutcome, step: int, version: int) -> PartialFigures:
    ages = [step - group.step for group in outcome.groups]
    samples = [sample for group in outcome.groups for sample in group.samples]
    versions = np.concatenate([s.versions[s.action_mask] for s in samples])
    return PartialFigures(
        version=version,
        rounds=outcome.rounds,
        groups=len(outcome.groups),
        unfinished_groups=len(outcome.unfinished),
        unfinished_tokens=sum(group.num_tokens for group in outcome.unfinished),
        age_mean=float(np.mean(ages)),
        age_max=max(ages),
        stale_tokens=float((versions != version).mean()) if versions.size else 0.0,
    )
