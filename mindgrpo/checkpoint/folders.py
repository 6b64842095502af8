"""Where checkpoints lie in a run's folder, and which of them may be whole.

Refuses to look into them: a folder counts as a checkpoint by its name alone.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step_(\d{6,12})")
_LEFT_OVER = re.compile(r"\.step_\d{6,12}\.(partial|deleted)")


def folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step_{step:06d}"


def partial_of(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return run / CHECKPOINTS / f".step_{step:06d}.partial"


def steps_in(run: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder, ascending."""
    try:
        entries = list((run / CHECKPOINTS).iterdir())
    except OSError:
        return []
    found = (_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir())
    return sorted({int(match[1]) for match in found if match})


def is_checkpoint(folder: Path) -> bool:
    return folder.parent.name == CHECKPOINTS and _NAME.fullmatch(folder.name) is not None


def delete(run: Path, step: int) -> None:
    """Takes its name away first, so that no half of a checkpoint is ever found under it. Raises OSError."""
    folder = folder_of(run, step)
    doomed = folder.with_name(f".{folder.name}.deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_left_overs(run: Path) -> None:
    """What killed runs have left half written or half deleted."""
    with contextlib.suppress(OSError):
        for entry in (run / CHECKPOINTS).iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def set_aside(run: Path, step: int) -> Path:
    """Renames a checkpoint so that it is found no more, and is not lost either. Raises OSError."""
    return move_aside(folder_of(run, step), "set_aside")


def move_aside(path: Path, word: str) -> Path:
    """Renames `path` to its name with `word`, and a number where that is taken. Raises OSError."""
    number = 1
    while True:
        target = path.with_name(f"{path.name}.{word}" + (f"_{number}" if number > 1 else ""))
        if not target.exists():
            return path.rename(target)
        number += 1
