"""Writes and reads failure files, and finds the failure that came first.

A rank that fails writes `failure_RANK` into the status folder; for one that was killed, the process that started it
does. Each holds the whole sentence that the user reads.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from mindgrpo.errors import USER_ERROR_STATUS
from mindgrpo.health.heartbeat import heartbeat_path, read_heartbeat

SIGKILL = 9
LONGEST_MESSAGE = 500
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True)
class Failure:
    """`rank` is None where no rank is to blame; `time` is seconds since the epoch; `message` has no full stop.

    `is_consequence`: it only follows from the failure of another rank, and is never why the job ended.
    """

    rank: int | None
    time: float
    status: int
    message: str
    remedy: str = ""
    traceback: str = ""
    is_consequence: bool = False


def position_of(folder: Path, rank: int) -> str:
    """Such as ` in phase rollout of step 5`; empty for a program without heartbeats."""
    heartbeat = read_heartbeat(heartbeat_path(folder, rank))
    return f" in {heartbeat.position}" if heartbeat else ""


def chain(error: BaseException) -> list[BaseException]:
    """The exception and what it came from, outermost first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def failure_of_exception(folder: Path, rank: int, error: BaseException, status: int) -> Failure:
    """An exception, or one it came from, says by an attribute `is_consequence` that a peer was lost."""
    position, words = position_of(folder, rank), " ".join(str(error).split("\n\n")[0].split())
    if len(words) > LONGEST_MESSAGE:
        words = words[: LONGEST_MESSAGE - 3] + "..."
    if isinstance(error, SystemExit):
        more = "" if error.code is None or isinstance(error.code, int) else f": {words}"
        message = f"rank {rank} ended with status {status}{position}{more}"
        return Failure(rank, time.time(), status, message)
    name = type(error).__name__
    message = f"rank {rank} failed{position}: {name}: {words}".removesuffix(": ")
    lines = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    follows = any(getattr(link, "is_consequence", False) for link in chain(error))
    remedy = "its traceback is above"
    return Failure(rank, time.time(), status, message, remedy, lines, follows)


def describe_code(code: int) -> str:
    """An exit status in words; `code` is negative for a process that a signal killed."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def failure_of_code(folder: Path, rank: int, code: int, when: float) -> Failure:
    """A rank that ended without a word, as the process that started it saw it; see `describe_code`."""
    position = position_of(folder, rank) or " before its first phase"
    out_of_memory = "if it was not killed on purpose, the system was out of memory: see dmesg, and use less memory"
    remedy = out_of_memory if code == -SIGKILL else ""
    message = f"rank {rank} {describe_code(code)}{position}"
    return Failure(rank, when, max(1, code), message, remedy)


def write_failure(folder: Path, name: int | str, failure: Failure) -> None:
    """`name` is the rank's number, or `watchdog`. What was written first stays: a rank's own words win.

    A disk that is full hides only the file: ranks print how they fail.
    """
    path, partial = folder / f"failure_{name}", folder / f"partial_{name}_{os.getpid()}"
    with suppress(OSError):
        if not path.exists():
            partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
            partial.replace(path)


def read_failure(folder: Path, name: int | str) -> Failure | None:
    try:
        text = (folder / f"failure_{name}").read_text(encoding="utf-8")
        return Failure(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def first_failure(folder: Path) -> Failure | None:
    """Why the job ended; None if nothing in the status folder tells.

    The user's mistake (status 2) is every rank's, and the lowest one has printed it; a failure that follows from
    another is the answer only where nothing else is.
    """
    names = [path.name.partition("_")[2] for path in folder.glob("failure_*")]
    failures = [failure for name in names if (failure := read_failure(folder, name))]
    lowest = min(failures, key=lambda one: -1 if one.rank is None else one.rank, default=None)
    if lowest is not None and lowest.status == USER_ERROR_STATUS:
        return lowest
    return min(failures, key=lambda one: (one.is_consequence, one.time), default=None)
