"""Writes metrics as JSON lines and TensorBoard scalars, and samples as JSON lines; null for what is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mindgrpo.errors import writing
from mindgrpo.monitor.tensorboard import TensorBoard


def plain(value: Any) -> Any:
    """The JSON value of a figure, an array or a list of objects; NumPy's become Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        return [{**each} for each in value]
    if value is None or isinstance(value, int | float | str):
        return value
    raise TypeError(f"a figure is a number, a string or None, not {type(value).__name__}")


def finite_or_null(
    figures: Mapping[str, Any], prefix: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """The figures with null for what JSON cannot hold, and the keys of those; a mapping's figures likewise."""
    values: dict[str, Any] = {}
    nonfinite: list[str] = []
    for key, value in figures.items():
        if isinstance(value, Mapping):
            values[key], bad = finite_or_null(value, f"{prefix}{key}/")
            nonfinite += bad
            continue
        values[key] = plain(value)
        if isinstance(values[key], float) and not math.isfinite(values[key]):
            values[key] = None
            nonfinite.append(prefix + key)
    return values, nonfinite


def json_line(row: Mapping[str, Any]) -> str:
    """The row with the keys of what is not finite under `nonfinite`, if there is any."""
    values, nonfinite = finite_or_null(row)
    values |= {"nonfinite": nonfinite} if nonfinite else {}
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def append_rows(
    path: Path, step: int, rows: Iterable[Mapping[str, Any]], interval: int = 1
) -> None:
    """Appends rows of `step` to PATH at steps 1, 1 + interval, 1 + 2 x interval, ... Raises CannotWrite."""
    if (step - 1) % interval == 0:
        with writing(path), path.open("a", encoding="utf-8") as lines:
            lines.writelines(json_line({"step": step, **row}) for row in rows)


class MetricsWriter:
    """One object a step in DIRECTORY/metrics.jsonl, on disk when `write` returns."""

    def __init__(
        self,
        directory: Path,
        tensorboard_dir: Path | None,
        queue_size: int = 10,
        done_steps: int = 0,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`done_steps` of the run have been written before; see TensorBoard. Raises CannotWrite."""
        self.path = directory / "metrics.jsonl"
        with writing(self.path):
            self._lines = self.path.open("a", encoding="utf-8")
        self._board: TensorBoard | None = None
        if tensorboard_dir is not None:
            self._board = TensorBoard(tensorboard_dir, queue_size, done_steps, warn)

    def write(self, step: int, figures: Mapping[str, Any]) -> None:
        """Raises CannotWrite."""
        with writing(self.path):
            self._lines.write(json_line({"step": step, **figures}))
            self._lines.flush()
        if self._board is not None:
            self._board.write(step, figures)

    def close(self) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()


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
