"""How a rank failed, written down for those who are left: the exception, where it was raised, its traceback.

An exception that says `is_consequence` (a peer was lost) is never the cause of a job's end. Refuses to judge whose
failure came first: exit_report.py does.
"""

from __future__ import annotations

import json
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

LONGEST_MESSAGE = 500
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True)
class Failure:
    """`time` is seconds since the epoch; `message` is one line, such as `ValueError: broken here`."""

    rank: int
    time: float
    message: str
    traceback: str
    is_consequence: bool


def chain(error: BaseException) -> list[BaseException]:
    """The exception and what it came from, outermost first."""
    found: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in found:
        found.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found


def is_consequence(error: BaseException) -> bool:
    return any(getattr(link, "is_consequence", False) for link in chain(error))


def one_line(error: BaseException) -> str:
    words = " ".join(str(error).split("\n\n")[0].split())
    text = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return text if len(text) <= LONGEST_MESSAGE else text[: LONGEST_MESSAGE - 3] + "..."


def of_exception(rank: int, error: BaseException) -> Failure:
    lines = "".join(traceback.format_exception(error))
    return Failure(
        rank, time.time(), one_line(error), lines[-LONGEST_TRACEBACK:], is_consequence(error)
    )


def _path(folder: Path, rank: int) -> Path:
    return folder / f"failure_{rank}"


def write(folder: Path, failure: Failure) -> None:
    """Whole or not at all, and silent where it cannot: the failure itself must still be told."""
    path = _path(folder, failure.rank)
    partial = path.with_suffix(".partial")
    with suppress(OSError):
        partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        partial.replace(path)


def read(folder: Path, rank: int) -> Failure | None:
    try:
        return Failure(**json.loads(_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
