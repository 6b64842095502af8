"""A run's page when the run ends, written by a process of its own: the rank does not hold what it reads."""

from __future__ import annotations

from pathlib import Path

from mindgrpo.monitor.child_program import start_program, wait_for_program
from mindgrpo.report.write import FILE_NAME

LONGEST_WRITING = 60.0


def write_at_end(folder: Path) -> tuple[Path, str | None]:
    """The page's path, and a sentence where it was not written within LONGEST_WRITING."""
    path = folder / FILE_NAME
    process = start_program("mindgrpo.report.write", [str(folder)])
    why = wait_for_program(process, LONGEST_WRITING)
    return path, None if why is None else f"{path} was not written: {why}"
