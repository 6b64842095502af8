"""Metrics as JSON lines and TensorBoard scalars. Refuses to hide a number that is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Figure = int | float | str | None


def plain(value: Any) -> Figure:
    """The JSON value of a figure; NumPy's scalars become Python's."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a figure is a number, a string or None, not {type(value).__name__}")


def finite_or_null(figures: Mapping[str, Any]) -> tuple[dict[str, Figure], list[str]]:
    """The figures with null for what JSON cannot hold, and the keys of those."""
    values = {key: plain(value) for key, value in figures.items()}
    nonfinite = [
        key
        for key, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    return values | dict.fromkeys(nonfinite), nonfinite


class MetricsWriter:
    """One object a step in DIRECTORY/metrics.jsonl, on disk when `write` returns."""

    def __init__(
        self,
        directory: Path,
        tensorboard_dir: Path | None,
        queue_size: int = 10,
        done_steps: int = 0,
    ) -> None:
        """`done_steps` of the run have been written before; TensorBoard forgets what came after them."""
        self.path = directory / "metrics.jsonl"
        self._lines = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard_dir is not None:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(
                logdir=str(tensorboard_dir),
                max_queue=queue_size,
                purge_step=done_steps + 1 if done_steps else None,
            )

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        values, nonfinite = finite_or_null({key: figures[key] for key in figures if key != "step"})
        row: dict[str, Any] = {"step": step, **values}
        if nonfinite:
            row["nonfinite"] = nonfinite
        self._lines.write(json.dumps(row, allow_nan=False) + "\n")
        self._lines.flush()
        if self._board is None:
            return
        for key in values:
            if not isinstance(figures[key], str) and figures[key] is not None:
                self._board.add_scalar(key, float(figures[key]), step)

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; the half line that a killed run may leave is passed."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise
    return rows
