"""Draws rollouts that end before every completion does: unfinished ones continue in the next step, by its weights.

A completion is drawn in chunks; a token keeps the version of the weights that wrote it. Kimi k1.5 (arXiv:2501.12599,
section 2.6.2) names this partial rollout. The oldest groups come first, and a group that has become too old is waited
for. `draw_partial` is a function of its arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.sample import LENGTH, PartialGroup, Request, Rollout, Sample
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config.arithmetic import BatchPlan
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.replicas import Replicas

# Draws a chunk for each sample of a round.
Complete = Callable[[Sequence[Request]], list[Sample]]
# What becomes of the samples, by number, that a round has drawn: turns that have ended are answered.
Answer = Callable[[Mapping[int, Sample]], Mapping[int, Sample]]


@dataclass(frozen=True)
class PartialLimits:
    """Limits of a rollout, which ends with `groups` whole groups, or with one and `token_budget` tokens drawn (None: no
    budget), once no unfinished group is `max_staleness` steps old. Every round draws `chunk` tokens of each completion.
    """

    groups: int
    chunk: int
    max_tokens: int
    max_staleness: int
    token_budget: int | None = None


@dataclass(frozen=True)
class PartialOutcome:
    """Holds the complete `groups`, at most as many as were wanted, and the `unfinished` ones, which continue; complete
    ones that were too many are among these. `rounds` of chunks were drawn, `tokens` in all."""

    groups: tuple[PartialGroup, ...]
    unfinished: tuple[PartialGroup, ...]
    rounds: int
    tokens: int

    def rollout(self) -> Rollout:
        """Returns the samples of the groups that are whole, numbered from 0."""
        numbered = [(i, sample) for i, g in enumerate(self.groups) for sample in g.samples]
        return Rollout(tuple(sample for _, sample in numbered), tuple(i for i, _ in numbered))


@dataclass(frozen=True)
class PartialMetrics:
    """A partial rollout in numbers: of the weights of `version`, over `rounds` of chunks.

    `groups` were complete, `unfinished_groups` with `unfinished_tokens` continue. Ages, of the complete ones, are in
    steps; `stale_tokens` is the share of their tokens that older weights wrote.
    """

    version: int
    rounds: int
    groups: int
    unfinished_groups: int
    unfinished_tokens: int
    age_mean: float
    age_max: int
    stale_tokens: float


def draw_partial(
    groups: Sequence[PartialGroup],
    limits: PartialLimits,
    step: int,
    complete: Complete,
    answer: Answer | None = None,
) -> PartialOutcome:
    """Draws chunks of all unfinished samples of `groups`, the oldest first, until step number `step` has enough.

    `answer` is that of conversations; without it a completion is one turn.
    """
    running = list(groups)
    rounds, drawn = 0, 0
    while not _is_enough(running, limits, step, drawn):
        requests: list[Request] = []
        first = 0
        for group in running:
            requests += group.requests(first, limits.chunk, limits.max_tokens, rounds)
            first += len(group.samples)
        chunks = complete(requests)
        samples = [sample for group in running for sample in group.samples]
        grown: Mapping[int, Sample] = {
            chunk.number: _with_chunk(samples[chunk.number], chunk, limits.max_tokens)
            for chunk in chunks
        }
        running = _with_samples(running, grown if answer is None else answer(grown))
        drawn += sum(len(chunk.tokens) for chunk in chunks)
        rounds += 1
    whole = [group for group in running if group.is_whole][: limits.groups]
    taken = {group.position for group in whole}
    rest = tuple(group for group in running if group.position not in taken)
    return PartialOutcome(tuple(whole), rest, rounds, drawn)


def _is_enough(
    running: Sequence[PartialGroup], limits: PartialLimits, step: int, drawn: int
) -> bool:
    if any(step - g.step >= limits.max_staleness and not g.is_whole for g in running):
        return False
    whole = sum(group.is_whole for group in running)
    is_spent = limits.token_budget is not None and drawn >= limits.token_budget
    return whole >= limits.groups or (is_spent and whole > 0)


def _with_chunk(sample: Sample, chunk: Sample, max_tokens: int) -> Sample:
    grown = sample.with_written(chunk)
    is_cut = chunk.finish_reason == LENGTH and len(grown.tokens) < max_tokens
    return replace(grown, finish_reason=None) if is_cut else grown


def _with_samples(
    running: Sequence[PartialGroup], grown: Mapping[int, Sample]
) -> list[PartialGroup]:
    groups, first = [], 0
    for group in running:
        samples = tuple(grown.get(first + i, sample) for i, sample in enumerate(group.samples))
        groups.append(replace(group, samples=samples))
        first += len(group.samples)
    return groups


@dataclass(frozen=True)
class PartialSettings:
    """`under_way` prompts of `num_generations` samples each are drawn at a time."""

    limits: PartialLimits
    under_way: int
    num_generations: int

    @classmethod
    def of(cls, batch: BatchPlan) -> PartialSettings | None:
        """Reads the settings; None where the configuration asks for whole rollouts."""
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
    """Fills up the prompts under way, draws until a step has enough, and keeps the rest; the same on every rank.

    `unfinished` groups continue in the next step, the oldest first; `metrics` are of the last rollout.
    """

    def __init__(
        self,
        settings: PartialSettings,
        prompts: PromptSource,
        replicas: Replicas,
        unfinished: tuple[PartialGroup, ...] = (),
    ) -> None:
        self._settings, self._prompts, self._replicas = settings, prompts, replicas
        self.unfinished = unfinished
        self.metrics: PartialMetrics | None = None
        self._groups: list[PartialGroup] = []

    def begin_step(self, step: int) -> list[np.ndarray]:
        """Takes the step's prompts; returns int32 [n] each: all prompts in progress and the tokens of their samples."""
        settings = self._settings
        # A run that was resumed with fewer prompts under way may have more than these.
        fresh = self._prompts.next_positions(max(0, settings.under_way - len(self.unfinished)))
        begun = (
            PartialGroup.begun(position, prompt.ids, step, settings.num_generations)
            for position, prompt in zip(fresh, self._prompts.at(fresh), strict=True)
        )
        self._groups = [*self.unfinished, *begun]
        return [part for g in self._groups for part in (g.prompt, *(s.tokens for s in g.samples))]

    @property
    def prompts(self) -> list[np.ndarray]:
        """Returns the ids of the prompts in progress, int32 [n] each."""
        return [group.prompt for group in self._groups]

    def generate(self, sampling: SamplingParams, key: SeedKey, version: int) -> Rollout:
        """Draws whole groups by weights of `version` and of those before; all ranks together, after `begin_step`."""
        limits = self._settings.limits

        def complete(requests: Sequence[Request]) -> list[Sample]:
            return self._replicas.complete(requests, sampling, key, version)

        def answer(drawn: Mapping[int, Sample]) -> Mapping[int, Sample]:
            return self._replicas.next_turns(drawn, limits.max_tokens)

        outcome = draw_partial(self._groups, limits, key.step, complete, answer)
        self.unfinished, self._groups = outcome.unfinished, []
        self._prompts.assign([group.position for group in outcome.groups])
        self.metrics = _metrics(outcome, key.step, version)
        return outcome.rollout()


def _metrics(outcome: PartialOutcome, step: int, version: int) -> PartialMetrics:
    ages = [step - group.step for group in outcome.groups]
    samples = [sample for group in outcome.groups for sample in group.samples]
    versions = np.concatenate([s.versions[s.action_mask] for s in samples])
    return PartialMetrics(
        version=version,
        rounds=outcome.rounds,
        groups=len(outcome.groups),
        unfinished_groups=len(outcome.unfinished),
        unfinished_tokens=sum(group.num_tokens for group in outcome.unfinished),
        age_mean=float(np.mean(ages)),
        age_max=max(ages),
        stale_tokens=float((versions != version).mean()) if versions.size else 0.0,
    )
