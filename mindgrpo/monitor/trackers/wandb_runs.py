"""Weights & Biases. WANDB_MODE, WANDB_DIR and the other variables of the package count."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from mindgrpo.monitor.trackers.contract import Row, TrackedRun
from mindgrpo.monitor.trackers.tables import cells_of, columns_of


class WandbTracker:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.folder,
            # What this process prints is the tracker's own log, and what it takes is not the run's.
            settings=wandb.Settings(console="off", x_disable_stats=True),
        )
        self._run.config.update(dict(run.config), allow_val_change=True)

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Row]) -> None:
        values: dict[str, Any] = dict(figures)
        if completions:
            columns = columns_of(completions)
            values["completions"] = wandb.Table([*columns], cells_of(completions, columns))
        self._run.log(values, step=step, commit=True)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.summary.update({"summary": dict(summary)} if summary else {})
        self._run.finish(exit_code=1 if summary is None else 0)
