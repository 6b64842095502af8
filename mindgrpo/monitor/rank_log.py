"""Rotates the log file that the launcher gave this rank: full ones are renamed, and the oldest is deleted.

No line is cut: the file is renamed, and the next line is written to a new one. Output to anything else (a terminal, a
pipe, a file of the user's) is not affected.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mindgrpo.processes.job import STATUS_VARIABLE

NAME = re.compile(r"worker_\d+\.log")
OUTPUT, ERRORS = 1, 2


def own_log(environment: Mapping[str, str]) -> Path | None:
    """Returns the file of both standard outputs of this process, if it is in the job's log folder."""
    status = environment.get(STATUS_VARIABLE)
    if status is None:
        return None
    try:
        path = Path(os.readlink(f"/proc/self/fd/{OUTPUT}"))
        same = path.stat().st_ino == os.fstat(ERRORS).st_ino == os.fstat(OUTPUT).st_ino
    except OSError:
        return None
    ours = path.parent == Path(status).resolve().parent and NAME.fullmatch(path.name)
    return path if same and ours else None


def rotate(path: Path, max_bytes: int, backups: int) -> bool:
    """Renames `path` to `path`.1 once it has `max_bytes`, .1 to .2, and so on, and redirects output to a new file.

    At most `backups` (0 or more) older files are kept. Returns whether it rotated. Raises OSError.
    """
    if os.fstat(OUTPUT).st_size < max_bytes:
        return False
    for number in range(backups, 1, -1):
        older, newer = _numbered(path, number), _numbered(path, number - 1)
        if newer.exists():
            newer.replace(older)
    if backups:
        path.rename(_numbered(path, 1))
    else:
        path.unlink()
    fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    for descriptor in (OUTPUT, ERRORS):
        os.dup2(fresh, descriptor)
    os.close(fresh)
    return True


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
