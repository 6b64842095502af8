"""Rollouts that end before every completion does: what is unfinished goes on in the next step, under its weights.

A completion is drawn in chunks; a token keeps the version of the weights that wrote it. Kimi k1.5 (arXiv:2501.12599,
section 2.6.2) names this partial rollout. The oldest groups come first, and a group that has become too old is waited
for. All functions of the arguments: nothing here knows a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.types import LENGTH, Completion, Rollout
from mindgrpo.rollout.engine import Request

# Makes the completions of a round, of which number `turn`, from 0, is given.
Complete = Callable[[Sequence[Request], int], list[Completion]]


@dataclass(frozen=True)
class PartialSample:
    """A completion so far: `tokens` int32, `logps` float32 and `versions` int32, each [n]; no reason: unfinished."""

    tokens: np.ndarray
    logps: np.ndarray
    versions: np.ndarray
    finish_reason: str | None = None

    @classmethod
    def empty(cls) -> PartialSample:
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))

    def with_chunk(self, chunk: Completion, max_tokens: int) -> PartialSample:
        versions = np.full(len(chunk.tokens), chunk.version, np.int32)
        tokens = np.concatenate([self.tokens, chunk.tokens])
        is_cut = chunk.finish_reason == LENGTH and len(tokens) < max_tokens
        return PartialSample(
            tokens,
            np.concatenate([self.logps, chunk.logps]),
            np.concatenate([self.versions, versions]),
            None if is_cut else chunk.finish_reason,
        )


@dataclass(frozen=True)
class PartialGroup:
    """The samples of a prompt, which is number `position` in the run's order; begun in step number `step`, from 0."""

    position: int
    prompt: np.ndarray
    step: int
    samples: tuple[PartialSample, ...]

    @classmethod
    def begun(cls, position: int, prompt: np.ndarray, step: int, size: int) -> PartialGroup:
        prompt = np.asarray(prompt, np.int32)
        return cls(position, prompt, step, (PartialSample.empty(),) * size)

    @property
    def is_whole(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def requests(self, first: int, chunk: int, max_tokens: int) -> list[Request]:
        """For a further chunk of each unfinished sample, numbered from `first`; fresh ones share their prompt."""
        requests, fresh = [], []
        for i, sample in enumerate(self.samples):
            if sample.finish_reason is not None:
                continue
            if not len(sample.tokens):
                fresh.append(first + i)
                continue
            room = max_tokens - len(sample.tokens)
            context = np.concatenate([self.prompt, sample.tokens])
            requests.append(Request(context, (first + i,), (min(chunk, room),)))
        if fresh:
            limits = (min(chunk, max_tokens),) * len(fresh)
            requests.append(Request(self.prompt, tuple(fresh), limits))
        return requests


@dataclass(frozen=True)
class PartialLimits:
    """Of a rollout: it ends with `groups` whole groups, or with one and `token_budget` tokens drawn (None: no budget),
    once no unfinished group is `max_staleness` steps old. Between looks every completion gets `chunk` tokens."""

    groups: int
    chunk: int
    max_tokens: int
    max_staleness: int
    token_budget: int | None = None


@dataclass(frozen=True)
class PartialOutcome:
    """`groups` are whole, at most as many as were wanted; `unfinished` go on, whole ones that were too many among
    them. `rounds` of chunks were drawn, `tokens` in all."""

    groups: tuple[PartialGroup, ...]
    unfinished: tuple[PartialGroup, ...]
    rounds: int
    tokens: int

    def rollout(self) -> Rollout:
        """Of the whole groups, numbered from 0."""
        samples = [(i, g, s) for i, g in enumerate(self.groups) for s in g.samples]
        return Rollout(
            prompt_ids=tuple(group.prompt for _, group, _ in samples),
            completion_ids=tuple(sample.tokens for _, _, sample in samples),
            finish_reasons=tuple(sample.finish_reason or LENGTH for _, _, sample in samples),
            generator_logps=tuple(sample.logps for _, _, sample in samples),
            group_ids=tuple(i for i, _, _ in samples),
            action_mask=tuple(np.ones(len(sample.tokens), bool) for _, _, sample in samples),
            weights_version=tuple(sample.versions for _, _, sample in samples),
            messages=((),) * len(samples),
        )


def draw_partial(
    groups: Sequence[PartialGroup], limits: PartialLimits, step: int, complete: Complete
) -> PartialOutcome:
    """Draws chunks of all unfinished samples of `groups`, the oldest first, until step number `step` has enough."""
    running = list(groups)
    rounds, drawn = 0, 0
    while not _is_enough(running, limits, step, drawn):
        requests: list[Request] = []
        first = 0
        for group in running:
            requests += group.requests(first, limits.chunk, limits.max_tokens)
            first += len(group.samples)
        chunks = {c.sample: c for c in complete(requests, rounds)}
        running = _with_chunks(running, chunks, limits.max_tokens)
        drawn += sum(len(chunk.tokens) for chunk in chunks.values())
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


def _with_chunks(
    running: Sequence[PartialGroup], chunks: dict[int, Completion], max_tokens: int
) -> list[PartialGroup]:
    grown, first = [], 0
    for group in running:
        samples = tuple(
            sample.with_chunk(chunks[first + i], max_tokens) if first + i in chunks else sample
            for i, sample in enumerate(group.samples)
        )
        grown.append(replace(group, samples=samples))
        first += len(group.samples)
    return grown
