"""Draws a run's prompts in an order that is a function of (seed, epoch) alone.

Steps follow one another through the epochs without losing a row, so how far a run is in its data is one number, and
setting that number resumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import Rollout
from mindgrpo.data.prompts import Prompt, PromptSet


@dataclass
class DataSampler:
    """`position` counts the prompts drawn since the start of the run, over all epochs."""

    prompts: PromptSet
    seed: int
    position: int = 0

    def take(self, count: int) -> list[Prompt]:
        """Draws the next `count` prompts, for a step or in place of some that the step cannot use."""
        positions = range(self.position, self.position + count)
        self.position += count
        return self.at(positions)

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """Returns the prompts that are drawn at these positions."""
        size = len(self.prompts)
        epochs = {position // size for position in positions}
        orders = {epoch: epoch_order(size, self.seed, epoch) for epoch in epochs}
        return [self.prompts[int(orders[at // size][at % size])] for at in positions]

    @property
    def epoch(self) -> int:
        """Returns the epoch of the next prompt, counted from 0."""
        return self.position // len(self.prompts)


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of `size` indices, int64."""
    # One counter-based stream for each (seed, epoch): nothing to carry over, so nothing to resume.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)


class PromptSource:
    """Takes the next prompts of `sampler`, `prompts_per_step` at the start of a step, and numbers them by group."""

    def __init__(self, sampler: DataSampler, prompts_per_step: int) -> None:
        self.sampler = sampler
        self._prompts_per_step = prompts_per_step
        self._by_group: list[Prompt] = []

    def begin_step(self, step: int) -> list[np.ndarray]:
        """Returns the token ids, int32 [n], of the prompts of groups 0, 1, ... of step number `step`."""
        self._by_group = self.sampler.take(self._prompts_per_step)
        return [prompt.ids for prompt in self._by_group]

    def replace(self, groups: Sequence[int]) -> list[np.ndarray]:
        """Gives these groups the next prompts in order and returns their token ids, int32 [n]."""
        fresh = self.sampler.take(len(groups))
        for group, prompt in zip(groups, fresh, strict=True):
            self._by_group[group] = prompt
        return [prompt.ids for prompt in fresh]

    def take(self, count: int) -> range:
        """Draws the next `count` prompts and returns their positions in the run's order."""
        begin = self.sampler.position
        self.sampler.take(count)
        return range(begin, begin + count)

    def token_ids(self, positions: Sequence[int]) -> list[np.ndarray]:
        """Returns the token ids, int32 [n], of the prompts at these positions."""
        return [prompt.ids for prompt in self.sampler.at(positions)]

    def assign(self, positions: Sequence[int]) -> None:
        """Assigns the prompts at these positions to groups 0, 1, ..."""
        self._by_group = self.sampler.at(positions)

    def row(self, group: int) -> dict[str, Any]:
        """Returns the data set's row with which an environment of the group's samples begins."""
        return self._by_group[group].row

    def owners(self, rollout: Rollout) -> list[Prompt]:
        """Returns the prompt of each sample."""
        return [self._by_group[group] for group in rollout.group_ids]
