"""Ends a run whose reward function fails on every sample, step after step: nothing can be learnt from it."""

from __future__ import annotations

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.rewards.scores import Scores


class RewardGuard:
    """`max_failed_steps` is how many steps in a row may fail; None: any number. The same on all ranks."""

    def __init__(self, max_failed_steps: int | None) -> None:
        self._max, self._failed_steps = max_failed_steps, dict[str, int]()

    def step_done(self, step: int, scores: Scores) -> None:
        """After step number `step`, from 1. Raises UserError with the function's name and its last failure."""
        for name, values in scores.per_function.items():
            has_failed = scores.errors.get(name, 0) >= len(values) and bool(np.isnan(values).all())
            count = self._failed_steps[name] = (
                self._failed_steps.get(name, 0) + 1 if has_failed else 0
            )
            if self._max is not None and count >= self._max:
                raise UserError(
                    f"reward function {name} failed on all samples of {count} steps in a row, in step {step} with: "
                    f"{scores.messages[name]}; correct the function, or raise reward_config.max_failed_steps "
                    f"({self._max})."
                )
