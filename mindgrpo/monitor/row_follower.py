"""Reads a file of JSON lines that another process is still writing: whole lines only, each of them once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class RowFollower:
    """A file that is missing has no rows yet; one that has become shorter is read from its beginning again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields what was added since the last call; a half line at the end waits for its other half."""
        with suppress(FileNotFoundError), self._path.open("rb") as lines:
            if os.fstat(lines.fileno()).st_size < self._offset:
                self._offset = 0
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row


class StepFollower:
    """A run's steps as they are finished, each of them once and in order, also where a resumed run repeats some."""

    def __init__(self, directory: Path, after: int = -1) -> None:
        """`after`: the last step that is known already; the evaluation before the first one is step 0."""
        self.last = after
        self._metrics = RowFollower(directory / "metrics.jsonl")
        self._evaluations = RowFollower(directory / "evaluations.jsonl")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the new rows of metrics.jsonl, after that of an evaluation before the first step."""
        # Evaluations of later steps are in the rows of these as well.
        start = (row for row in self._evaluations.rows() if row.get("step") == 0)
        for row in (*start, *self._metrics.rows()):
            if row.get("step", -1) > self.last:
                self.last = row["step"]
                yield row
