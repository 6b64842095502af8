"""Counts updates that were not made because a number is not finite, keeps their batch, and ends a run after too many.

No more than MOST_DUMPS batches of a run are kept: they are large, and alike.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindgrpo.backend.contract import Backend
from mindgrpo.config import Config
from mindgrpo.errors import CannotWrite
from mindgrpo.grpo.metrics import StepOutcome
from mindgrpo.run import batch_dump as dump

MOST_DUMPS = 5


class TooManySkipped(RuntimeError):
    """Nothing is learnt any more."""


class NanGuard:
    """`directory` is the run's; `write_weights` writes the policy's into a new folder, all ranks together."""

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
        """Metrics of step number `step` (from 0); all ranks together. Raises TooManySkipped."""
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
        kept = None
        if self._backend.rank == outcome.skipped[0].rank:
            kept = self._dump(step, outcome, version)
        # What is damaged may be one rank's alone: its batch is the one to look at.
        kept = self._backend.world.gather_objects(kept)[outcome.skipped[0].rank]
        if self._backend.rank == 0:
            moved = weights if has_weights else None
            try:
                dump.write(folder, kept, self._directory / dump.CONFIG, moved)
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
            finish_reasons=list(batch.rollout.finish_reasons),
            groups=list(batch.rollout.group_ids),
            texts=outcome.scored.texts,
        )
        return dump.Dump(about, batch, {"total": scores.total, **scores.per_function})
