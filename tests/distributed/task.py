"""Prompts and rewards of the distributed job, the same on every rank: functions of numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import cases as c
import numpy as np

from mindgrpo.algorithm.sample import Rollout
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.scoring import Scored
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.environment import turns_of


def prompts() -> list[np.ndarray]:
    draw = np.random.RandomState(3)
    return [
        draw.randint(3, 67, draw.randint(2, c.MAX_PROMPT + 1)).astype(np.int32)
        for _ in range(c.NUM_PROMPTS)
    ]


def rewards(rollout: Rollout) -> np.ndarray:
    """float64 [samples], a function of the tokens alone."""
    ids = rollout.completion_ids
    return np.array([(tokens % 5 < 2).mean() + 0.01 * tokens[0] for tokens in ids])


def hits(rollout: Rollout) -> np.ndarray:
    """float64 [samples] of 0 and 1, in some groups all equal."""
    return np.array([float(tokens[0] % 3 == 0) for tokens in rollout.completion_ids])


class Task:
    """Every step's prompts, and rewards; a group that is replaced gets its prompt read backwards."""

    def __init__(self, has_hits: bool) -> None:
        self._reward = hits if has_hits else rewards
        self._taken = 0
        # By step, the positions of the prompts of partial rollouts.
        self.trained: list[list[int]] = []

    def begin_step(self, step: int) -> list[Any]:
        return self.at(range(c.NUM_PROMPTS))

    def replace(self, groups: Sequence[int]) -> list[Any]:
        return [
            SimpleNamespace(ids=prompts()[group][::-1], row={}, index=group) for group in groups
        ]

    def next_positions(self, count: int) -> range:
        begin, self._taken = self._taken, self._taken + count
        return range(begin, self._taken)

    def at(self, positions: Sequence[int]) -> list[Any]:
        own = prompts()
        return [SimpleNamespace(ids=own[at % c.NUM_PROMPTS], row={}, index=at) for at in positions]

    def assign(self, positions: Sequence[int]) -> None:
        self.trained.append([*positions])

    def owners(self, group_ids: Sequence[int]) -> list[Prompt]:
        return self.at(group_ids)

    def begin(self, rollout: Rollout, owners: Sequence[Prompt]) -> Callable[[], Scored]:
        scored = self.score(rollout, owners)
        return lambda: scored

    def score(self, rollout: Rollout, owners: Sequence[Prompt]) -> Scored:
        earned = self._reward(rollout)
        of_turns = [
            np.array([turn.get("reward", 0.0) for turn in turns_of(messages)])
            for messages in rollout.messages
        ]
        return Scored(Scores({}, earned, earned < 0), [], of_turns)
