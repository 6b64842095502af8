"""What processes of a rank leave behind where they are killed, listed for whoever outlives them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

# In the status folder: a path a line, of files in shared memory and of folders.
LEFT_BEHIND = "left_behind_{rank}"


def remove_left_behind(paths: Iterable[str]) -> None:
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
