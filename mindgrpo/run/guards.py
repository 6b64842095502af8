"""Ends a run whose numbers are not finite, or whose rewards fail, in too many consecutive updates or steps.

Batches of skipped updates are dumped, at most MOST_DUMPS per run, because they are large and alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.remote_arrays import gathered_arrays
from mindgrpo.config import Config
from mindgrpo.errors import CannotWrite, UserError
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.rewards.scores import Scores
from mindgrpo.run import batch_dump as dump

MOST_DUMPS = 5


class TooManySkipped(RuntimeError):
    """Raised after more than max_skipped_updates consecutive updates were skipped."""


class NanGuard:
    """Ends a run after too many consecutive updates were skipped because of non-finite numbers, and dumps batches.

    `directory` is the run's folder; `write_weights` writes the policy's weights into a new folder, collectively.
    """

    def __init__(
        self,
        config: Config,
        backend: Backend,
        directory: Path,
        say: Callable[[str], None],
        write_weights: Callable[[Path], None],
    ) -> None:
        self._rl, self._backend, self._directory = config.rl_config, backend, directory
        self._say, self._write_weights = say, write_weights
        self._in_a_row = self._dumps = 0

    def step_done(self, step: int, outcome: StepOutcome, version: int) -> dict[str, Any]:
        """Counts the skipped updates of step `step` (from 0) and returns metrics. Collective. Raises TooManySkipped."""
        num_updates = len(outcome.reports) + len(outcome.skipped)
        skipped = {skip.update: skip for skip in outcome.skipped}
        if skipped:
            first = outcome.skipped[0]
            self._say(
                f"  warning: step {step + 1}: {len(skipped)} of {num_updates} updates skipped, weights stay as they "
                f"were: {first.cause}, first on rank {first.rank}"
            )
            dump_folder = self._keep(step, outcome, version)
        for update in range(num_updates):
            self._in_a_row = self._in_a_row + 1 if update in skipped else 0
            if self._in_a_row > self._rl.max_skipped_updates:
                shows = f"; python -m mindgrpo replay {dump_folder} shows the batch"
                raise TooManySkipped(
                    f"{self._in_a_row} updates in a row were skipped (rl_config.max_skipped_updates is "
                    f"{self._rl.max_skipped_updates}), in step {step + 1} for {skipped[update].cause}"
                    + (shows if dump_folder else "")
                )
        return {"skipped_updates": len(skipped)}

    def _keep(self, step: int, outcome: StepOutcome, version: int) -> Path | None:
        if self._dumps == MOST_DUMPS:
            return None
        self._dumps += 1
        folder = self._directory / "dumps" / f"step_{step + 1:06d}"
        weights = folder.with_name(folder.name + ".weights")
        has_weights = False
        if self._rl.dump_weights:
            try:
                self._write_weights(weights)
                has_weights = True
            except CannotWrite as failed:
                self._say(f"  warning: the weights are not kept: {failed}")
        kept, arrays = None, gathered_arrays(outcome.batch.rollout, self._backend.world)
        if self._backend.rank == outcome.skipped[0].rank:
            kept = self._dump(step, outcome, version)
        # Damage may be on one rank only, whose batch is then the one to dump.
        kept = self._backend.world.gather_objects(kept)[outcome.skipped[0].rank]
        if self._backend.rank == 0:
            moved = weights if has_weights else None
            try:
                whole = dump.with_arrays(kept, arrays)
                dump.write(folder, whole, self._directory / dump.CONFIG, moved)
            except OSError as error:
                self._say(f"  warning: the batch is not kept: {folder}: {error.strerror}")
            else:
                self._say(f"  the batch is kept: python -m mindgrpo replay {folder}")
        return folder

    def _dump(self, step: int, outcome: StepOutcome, version: int) -> dump.Dump:
        skip, batch, scores = outcome.skipped[0], outcome.batch, outcome.scored.scores
        about = dump.About(
            cause=str(skip.cause),
            step=step + 1,
            update=skip.update,
            members=skip.members,
            lr=skip.lr,
            weights_version=version,
            # Each update makes a version, and none was skipped before the first.
            updates=version - len(outcome.reports) + skip.update,
            finish_reasons=list(batch.rollout.finish_reasons),
            groups=list(batch.rollout.group_ids),
            texts=outcome.scored.texts,
        )
        return dump.Dump(about, batch, {"total": scores.total, **scores.per_function})


class RewardGuard:
    """Ends a run in which no sample could be scored for `max_failed_steps` consecutive steps (None: no limit).

    All ranks count alike. A run of `num_steps` without a single scored step also ends with an error.
    """

    def __init__(self, max_failed_steps: int | None, num_steps: int | None = None) -> None:
        self._max, self._num_steps, self._failed_steps = max_failed_steps, num_steps, 0

    def step_done(self, step: int, scores: Scores) -> None:
        """Counts step `step` (from 1). Raises UserError with the functions' names and last failures."""
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
