"""Updates that were not made for a number that is not finite: counted, their batch kept, and an end after too many.

Refuses to keep more than a few batches of a run: they are large, and alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.backend.contract import Backend
from mindgrpo.config import Config
from mindgrpo.grpo.step import Skip, StepOutcome
from mindgrpo.run import batch_dump as dump

MOST_DUMPS = 5


class TooManySkipped(RuntimeError):
    """Nothing is learnt any more."""


class SkippedUpdates:
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

    def step_done(
        self, step: int, outcome: StepOutcome, num_updates: int, version: int
    ) -> dict[str, Any]:
        """Figures of step number `step` (from 0) of `num_updates`; all ranks. Raises TooManySkipped."""
        skipped = {skip.update: skip for skip in outcome.skipped}
        if skipped:
            self._tell(step, list(skipped.values()), num_updates)
            dump_folder = self._keep(step, outcome, version)
        for update in range(num_updates):
            self._in_a_row = self._in_a_row + 1 if update in skipped else 0
            if self._in_a_row > self._rl.max_skipped_updates:
                raise TooManySkipped(
                    f"{self._in_a_row} updates in a row were skipped (rl_config.max_skipped_updates is "
                    f"{self._rl.max_skipped_updates}), in step {step + 1} for {skipped[update].found}; "
                    + (
                        f"python -m mindgrpo replay {dump_folder} shows the batch"
                        if dump_folder
                        else ""
                    )
                )
        return {"skipped_updates": len(skipped)}

    def _tell(self, step: int, skipped: Sequence[Skip], num_updates: int) -> None:
        first = skipped[0]
        self._say(
            f"  warning: step {step + 1}: {len(skipped)} of {num_updates} updates skipped, weights stay as they were: "
            f"{first.found}, first on rank {first.rank}"
        )

    def _keep(self, step: int, outcome: StepOutcome, version: int) -> Path | None:
        if self._dumps == MOST_DUMPS:
            return None
        self._dumps += 1
        folder = self._directory / "dumps" / f"step_{step + 1:06d}"
        weights = folder.with_name(folder.name + ".weights")
        if self._rl.dump_weights:
            self._write_weights(weights)
        kept = None
        if self._backend.rank == outcome.skipped[0].rank:
            kept = self._dump(step, outcome, version)
        # What is damaged may be one rank's alone: its batch is the one to look at.
        kept = self._backend.world.gather_objects(kept)[outcome.skipped[0].rank]
        if self._backend.rank == 0:
            moved = weights if self._rl.dump_weights else None
            try:
                dump.write(folder, kept, self._directory / dump.CONFIG, moved)
            except OSError as error:
                self._say(f"  warning: the batch is not kept: {folder}: {error.strerror}")
            else:
                self._say(f"  the batch is kept: python -m mindgrpo replay {folder}")
        return folder

    def _dump(self, step: int, outcome: StepOutcome, version: int) -> dump.Dump:
        skip, samples, scores = outcome.skipped[0], outcome.samples, outcome.scored.scores
        about = dump.About(
            found=str(skip.found),
            step=step + 1,
            update=skip.update,
            members=skip.members,
            lr=skip.lr,
            weights_version=version,
            finish_reasons=samples.finish_reasons,
            groups=samples.groups,
            texts=outcome.scored.texts,
        )
        return dump.Dump(about, samples, {"total": scores.total, **scores.per_function})
