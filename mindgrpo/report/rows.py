"""Files of rows, one JSON object a line, read by step; a line that is half or no object is counted and passed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mindgrpo.strict_files import lines_of, row_of

Row = dict[str, Any]

# Runs write the step first: a file of many steps is indexed without reading its rows.
_STEP = re.compile(rb'\{"step": ?(\d{1,15})[,}]')


def parsed(line: bytes) -> Row | None:
    """Returns None for anything but a JSON object with a whole number as its step."""
    row = row_of(line)
    return None if row is None or type(row.get("step")) is not int else row


class RowFile:
    """The lines of a file by step, as they are when this is made; of a file that is not there, none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bad = 0
        self._spans: dict[int, list[tuple[int, int]]] = {}
        if not path.is_file():
            return
        with path.open("rb") as lines:
            for offset, line in lines_of(lines):
                step = _step_of(line)
                if step is not None:
                    self._spans.setdefault(step, []).append((offset, len(line)))
                elif line.strip():
                    self.num_bad += 1

    @property
    def steps(self) -> list[int]:
        return sorted(self._spans)

    @property
    def num_rows(self) -> int:
        return sum(map(len, self._spans.values()))

    def count(self, step: int) -> int:
        return len(self._spans.get(step, []))

    def of_step(self, step: int) -> list[Row | None]:
        """In the order of the file; None stands for a damaged row, so that the others keep their numbers."""
        spans = self._spans.get(step, [])
        if not spans:
            return []
        with self.path.open("rb") as lines:
            rows = []
            for offset, size in spans:
                lines.seek(offset)
                rows.append(parsed(lines.read(size)))
        self.num_bad += rows.count(None)
        return rows

    def all(self) -> list[Row]:
        """In the order of steps."""
        return [row for step in self.steps for row in self.of_step(step) if row is not None]


def _step_of(line: bytes) -> int | None:
    match = _STEP.match(line) if line.endswith(b"}\n") else None
    if match:
        return int(match[1])
    row = parsed(line)
    return None if row is None else int(row["step"])
