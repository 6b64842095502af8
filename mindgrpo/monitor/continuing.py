"""A run's files where it goes on: rows after its checkpoint are put aside, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from mindgrpo.checkpoint.folders import move_aside

# What a run writes into its folder, except checkpoints.
ROWS = ("metrics.jsonl", "evaluations.jsonl", "eval_completions.jsonl")
RUN_FILES = (
    *ROWS,
    "completions.jsonl",
    "per_token.jsonl",
    "config_resolved.yaml",
    "reward_output.txt",
    "reward_curve.png",
    "report.html",
    "summary.json",
    "tensorboard",
    "trackers",
    "hf",
    "adapter",
)


def cut_after(path: Path, step: int) -> int:
    """Moves the rows of steps above `step` (and a half line at the end) to PATH.after_step_N; how many."""
    start, count = _first_after(path, step)
    if not count:
        return 0
    with (
        path.open("r+b") as rows,
        path.with_name(f"{path.name}.after_step_{step}").open("ab") as aside,
    ):
        rows.seek(start)
        shutil.copyfileobj(rows, aside)
        aside.flush()
        os.fsync(aside.fileno())
        rows.truncate(start)
    return count


def copy_until(path: Path, step: int, target: Path) -> None:
    """Copies the rows up to `step` to TARGET, if there is such a file and TARGET is free."""
    if not path.exists() or target.exists():
        return
    size, _ = _first_after(path, step)
    shutil.copyfile(path, target)
    os.truncate(target, size)


def _first_after(path: Path, step: int) -> tuple[int, int]:
    """(bytes before the first row above `step`, how many rows there are from it on)."""
    offset = count = 0
    with path.open("rb") as rows:
        for row in rows:
            if count or not row.endswith(b"\n") or _step_of(row) > step:
                count += 1
            else:
                offset += len(row)
    return offset, count


def _step_of(row: bytes) -> float:
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def put_earlier_aside(directory: Path) -> Path | None:
    """Moves what a run left here that never came to a checkpoint into a folder of its own; None where nothing is."""
    leftover = [directory / name for name in RUN_FILES if (directory / name).exists()]
    if not leftover:
        return None
    number = 1
    while (aside := directory / f"earlier_{number}").exists():
        number += 1
    aside.mkdir()
    for path in leftover:
        path.rename(aside / path.name)
    return aside


def rename_aside(path: Path, label: str) -> Path | None:
    """PATH as PATH.label (and a number where that is taken); None where there is no PATH."""
    return move_aside(path, label) if path.exists() else None
