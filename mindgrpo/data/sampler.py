"""Draws a run's prompts in an order that is a function of (seed, epoch) alone.

Steps follow one another through the epochs without losing a row, so how far a run is in its data is one number, and
setting that number resumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
        """The prompts that are drawn at these positions."""
        size = len(self.prompts)
        epochs = {position // size for position in positions}
        orders = {epoch: epoch_order(size, self.seed, epoch) for epoch in epochs}
        return [self.prompts[int(orders[at // size][at % size])] for at in positions]

    @property
    def epoch(self) -> int:
        """Of the next prompt, from 0."""
        return self.position // len(self.prompts)


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of `size` indices, int64."""
    # One counter-based stream for each (seed, epoch): nothing to carry over, so nothing to resume.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(size)
