"""Trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and the other variables of the package count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from mindgrpo.monitor.trackers.contract import Row, TrackedRun
from mindgrpo.monitor.trackers.tables import cells_of, columns_of


class TrackioTracker:
    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project,
            name=run.id or run.name,
            config=dict(run.config),
            resume="allow" if run.id else "never",
            embed=False,
        )
        self.id = str(self._run.name)  # by which the package resumes

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Row]) -> None:
        values: dict[str, Any] = dict(figures)
        if completions:
            columns = columns_of(completions)
            values["completions"] = trackio.Table(columns, cells_of(completions, columns))
        self._run.log(values, step=step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._run.finish()
