"""Ends a run whose rewards fail on every sample, step after step: nothing can be learnt from it."""

from __future__ import annotations

from mindgrpo.errors import UserError
from mindgrpo.rewards.scores import Scores


class RewardGuard:
    """`max_failed_steps` is how many steps in a row may fail; None: any number. The same on all ranks.

    A run of `num_steps` may not consist of such steps alone, however many are allowed.
    """

    def __init__(self, max_failed_steps: int | None, num_steps: int | None = None) -> None:
        self._max, self._num_steps, self._failed_steps = max_failed_steps, num_steps, 0

    def step_done(self, step: int, scores: Scores) -> None:
        """After step number `step`, from 1. Raises UserError with the functions' names and their last failures."""
        if not scores.failed.all():
            self._failed_steps = 0
            return
        self._failed_steps += 1
        count = self._failed_steps
        names = [name for name, errors in scores.errors.items() if errors]
        failed = f"reward function {', '.join(names)} failed on all samples of"
        reasons = f"in step {step} with: {'; '.join(scores.messages[name] for name in names)}"
        if count == self._num_steps:
            raise UserError(
                f"{failed} the run's {count} steps, {reasons}; nothing was learnt: correct the function."
            )
        if self._max is not None and count >= self._max:
            raise UserError(
                f"{failed} {count} steps in a row, {reasons}; correct the function, or raise "
                f"reward_config.max_failed_steps ({self._max})."
            )
