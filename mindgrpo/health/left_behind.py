"""What processes of a rank leave behind where they are killed, listed for whoever outlives them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# In the status folder: a path a line, of files in shared memory and of folders.
LEFT_BEHIND = "left_behind_{rank}"
MAPPED = "/dev/shm/"


def shared_files_of(processes: Iterable[int]) -> list[str]:
    """Files in shared memory that these have mapped; of those that have ended, none."""
    mapped: set[str] = set()
    for pid in processes:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            mapped |= {line[line.index(MAPPED) :] for line in lines if MAPPED in line}
    return sorted(path for path in mapped if not path.endswith(" (deleted)"))


def remove_left_behind(paths: Iterable[str]) -> None:
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):  # gone, or another user's
                path.unlink()
