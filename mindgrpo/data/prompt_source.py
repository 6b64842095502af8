"""Gives steps their prompts, in an order that is a function of (seed, epoch) alone.

Steps follow one another through the epochs without losing a row, so how far a run is in its data is one number, and
setting that number, and the rows that are not to be drawn again, resumes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mindgrpo.data.prompts import Prompt, PromptSet


class PromptSource:
    """Takes the next of `prompts`, `prompts_per_step` at the start of a step, and numbers them by group.

    `position` counts the prompts drawn or passed over since the start of the run, over all epochs. `solved` are the
    numbers of rows that are passed over; once these are all, they are none again.
    """

    def __init__(
        self, prompts: PromptSet, seed: int, prompts_per_step: int, position: int = 0
    ) -> None:
        self._prompts, self._seed, self.position = prompts, seed, position
        self._prompts_per_step = prompts_per_step
        self._by_group: list[Prompt] = []
        self.solved: set[int] = set()

    def begin_step(self, step: int) -> list[Prompt]:
        """Draws the prompts of groups 0, 1, ... of step number `step`."""
        self._by_group = self.take(self._prompts_per_step)
        return list(self._by_group)

    def replace(self, groups: Sequence[int]) -> list[Prompt]:
        """Draws the next prompts in order for these groups, in place of the ones that they had."""
        fresh = self.take(len(groups))
        for group, prompt in zip(groups, fresh, strict=True):
            self._by_group[group] = prompt
        return fresh

    def assign(self, positions: Sequence[int]) -> None:
        """Gives groups 0, 1, ... the prompts at these positions."""
        self._by_group = self.at(positions)

    def owners(self, group_ids: Sequence[int]) -> list[Prompt]:
        """Returns the prompts of these groups, for example of a rollout's `group_ids`."""
        return [self._by_group[group] for group in group_ids]

    def take(self, count: int) -> list[Prompt]:
        """Draws the next `count` prompts."""
        return self.at(self.next_positions(count))

    def solve(self, groups: Sequence[int]) -> None:
        """Passes over the rows of these groups from now on."""
        self.solved.update(prompt.index for prompt in self.owners(groups))

    def next_positions(self, count: int) -> Sequence[int]:
        """Takes the next `count` prompts in the run's order and returns their positions."""
        if len(self.solved) >= len(self._prompts):
            self.solved.clear()
        if not self.solved:
            begin, self.position = self.position, self.position + count
            return list(range(begin, self.position))
        indices = self._prompts.indices
        is_solved = np.zeros(int(indices.max()) + 1, bool)
        is_solved[np.fromiter(self.solved, np.int64, len(self.solved))] = True
        taken: list[int] = []
        while len(taken) < count:
            rest = self._order(self.epoch)[self.position % len(self._prompts) :]
            ahead = np.flatnonzero(~is_solved[indices[rest]])[: count - len(taken)]
            taken += (ahead + self.position).tolist()
            is_enough = len(taken) == count
            self.position = taken[-1] + 1 if is_enough else self.position + len(rest)
        return taken

    def at(self, positions: Sequence[int]) -> list[Prompt]:
        """Returns the prompts that are drawn at these positions."""
        size = len(self._prompts)
        return [self._prompts[int(self._order(at // size)[at % size])] for at in positions]

    def _order(self, epoch: int) -> np.ndarray:
        return epoch_order(len(self._prompts), self._seed, epoch)

    @property
    def epoch(self) -> int:
        """Returns the epoch of the next prompt, counted from 0."""
        return self.position // len(self._prompts)


# Each step asks for the order of one epoch, or of two, and of a large data set a permutation takes long.
@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of `size` indices, int64, which cannot be written to."""
    # One counter-based stream for each (seed, epoch): nothing to carry over, so nothing to resume.
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(size)
    order.setflags(write=False)
    return order
