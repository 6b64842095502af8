"""What evaluations found, on disk: evaluations.jsonl, one object each, and eval_completions.jsonl, one a sample.

Every object has the step that it belongs to. Refuses to shorten a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.evaluation import Outcome


def write_evaluation(
    folder: Path, step: int, outcomes: Sequence[Outcome], with_completions: bool
) -> None:
    """Appends to both files in `folder`."""
    figures: dict[str, Any] = {"step": step}
    for outcome in outcomes:
        figures |= outcome.figures()
    append(folder / "evaluations.jsonl", [figures])
    if with_completions:
        write_completions(folder / "eval_completions.jsonl", step, outcomes)


def write_completions(path: Path, step: int, outcomes: Sequence[Outcome]) -> None:
    append(path, ({"step": step, **row} for outcome in outcomes for row in outcome.rows()))


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    with path.open("a", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
