"""Writes and reads failure files, and finds the failure that came first.

A rank that fails writes `failure_RANK` into the status folder; for one that was killed, the process that started it
does. Each holds the complete sentence that the user reads.
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
from mindgrpo.processes.child import describe_code

SIGKILL = 9
LONGEST_MESSAGE = 500
LONGEST_TRACEBACK = 20_000


@dataclass(frozen=True)
class RankFailure:
    """Says how a rank failed, in a `message` without full stop, and when, in seconds since the epoch.

    `rank` is None where none is to blame. `is_consequence`: it only follows from the failure of another rank, and is
    never why the job ended.
    """

    rank: int | None
    time: float
    status: int
    message: str
    remedy: str = ""
    traceback: str = ""
    is_consequence: bool = False


def position_of(folder: Path, rank: int) -> str:
    """Returns words such as ` in phase rollout of step 5`; empty for a program without heartbeats."""
    heartbeat = read_heartbeat(heartbeat_path(folder, rank))
    return f" in {heartbeat.position}" if heartbeat else ""


def chain(error: BaseException) -> list[BaseException]:
    """Returns the exception and what it came from, outermost first."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def failure_of_exception(folder: Path, rank: int, error: BaseException, status: int) -> RankFailure:
    """Describes a rank that `error` ended.

    The attribute `is_consequence` of the error or of one it came from says that a peer was lost.
    """
    position, words = position_of(folder, rank), " ".join(str(error).split("\n\n")[0].split())
    if len(words) > LONGEST_MESSAGE:
        words = words[: LONGEST_MESSAGE - 3] + "..."
    if isinstance(error, SystemExit):
        more = "" if error.code is None or isinstance(error.code, int) else f": {words}"
        message = f"rank {rank} ended with status {status}{position}{more}"
        return RankFailure(rank, time.time(), status, message)
    name = type(error).__name__
    message = f"rank {rank} failed{position}: {name}: {words}".removesuffix(": ")
    lines = "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
    follows = any(getattr(link, "is_consequence", False) for link in chain(error))
    remedy = "its traceback is above"
    return RankFailure(rank, time.time(), status, message, remedy, lines, follows)


def failure_of_code(folder: Path, rank: int, code: int, when: float) -> RankFailure:
    """Describes a rank that ended without a message, as the process that started it saw it; see `describe_code`."""
    position = position_of(folder, rank) or " before its first phase"
    out_of_memory = "if it was not killed on purpose, the system was out of memory: see dmesg, and use less memory"
    remedy = out_of_memory if code == -SIGKILL else ""
    message = f"rank {rank} {describe_code(code)}{position}"
    return RankFailure(rank, when, max(1, code), message, remedy)


def write_failure(folder: Path, name: int | str, failure: RankFailure) -> None:
    """Writes the file unless it is there: a rank's own message wins. `name` is the rank's number, or `watchdog`.

    A disk that is full hides only the file: ranks print how they fail.
    """
    path, partial = folder / f"failure_{name}", folder / f"partial_{name}_{os.getpid()}"
    with suppress(OSError):
        if not path.exists():
            partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
            partial.replace(path)


def read_failure(folder: Path, name: int | str) -> RankFailure | None:
    try:
        text = (folder / f"failure_{name}").read_text(encoding="utf-8")
        return RankFailure(**json.loads(text))
    except (OSError, ValueError, TypeError):
        return None


def first_failure(folder: Path) -> RankFailure | None:
    """Returns why the job ended; None if nothing in the status folder says.

    The user's mistake (status 2) is every rank's, and the lowest one has printed it; a failure that follows from
    another is the answer only where nothing else is.
    """
    names = [path.name.partition("_")[2] for path in folder.glob("failure_*")]
    failures = [failure for name in names if (failure := read_failure(folder, name))]
    lowest = min(failures, key=lambda one: -1 if one.rank is None else one.rank, default=None)
    if lowest is not None and lowest.status == USER_ERROR_STATUS:
        return lowest
    return min(failures, key=lambda one: (one.is_consequence, one.time), default=None)
