"""SwanLab. SWANLAB_MODE, SWANLAB_LOG_DIR and the other variables of the package count."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import swanlab

from mindgrpo.monitor.trackers.contract import Row, TrackedRun
from mindgrpo.monitor.trackers.tables import as_text


class SwanlabTracker:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or secrets.token_hex(8)
        own = {} if _names_a_folder() else {"log_dir": str(run.folder)}
        self._run = swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=self.id,
            resume="allow",
            config=dict(run.config),
            # What this process takes is not what the run takes.
            settings=swanlab.Settings(probe={"monitor": False}),
            **own,
        )

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Row]) -> None:
        values: dict[str, Any] = dict(figures)
        if completions:
            values["completions"] = [swanlab.Text(as_text(row)) for row in completions]
        self._run.log(values, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._run.finish("crashed", error="the run ended without a summary")
        else:
            self._run.finish()


def _names_a_folder() -> bool:
    return any(os.environ.get(name) for name in ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"))
