"""Why a job ended: which rank failed first, in which phase, and what its user can do; read from the status folder.

What follows from a lost peer is never the cause, however early it was written down. Run by launch.sh as a program:
tells the end of a job and gives its status. Refuses to guess: a rank that left nothing is told as just that.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.health import failure as failures
from mindgrpo.health.failure import Failure
from mindgrpo.health.heartbeat import Reader, path_of

USERS_ERROR = 2
SIGKILL = 9
NUM_LAST_LINES = 30
NUM_LINES_OF_MSRUN = 20
MSRUN_LOST = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-?\d+)")
# What worker.py and fork_server.py write of a rank: a word, a number, and the time.
LINE = re.compile(r"(pid|status|ended) (-?\d+)(?: ([\d.]+))?")


@dataclass(frozen=True)
class Ending:
    """What is known of how a rank ended: the status it wrote, or the code that its parent saw (-9: by signal 9)."""

    rank: int
    pid: int = 0
    status: int | None = None
    code: int | None = None
    time: float = 0.0
    orphaned: bool = False


@dataclass(frozen=True)
class Cause:
    """`rank` is None where no rank is to blame. `what` is a sentence without its subject's full stop."""

    rank: int | None
    status: int
    what: str
    remedy: str = ""
    has_traceback: bool = False


def read_ending(path: Path) -> Ending:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = {match[1]: match for match in map(LINE.fullmatch, reversed(lines)) if match}
    number = {word: int(match[2]) for word, match in found.items() if match[2]}
    times = [float(found[word][3] or 0) for word in ("status", "ended") if word in number]
    return Ending(
        rank=int(path.name.rpartition("_")[2]),
        pid=number.get("pid", 0),
        status=number.get("status"),
        code=number.get("ended"),
        time=min(times, default=0.0),
        orphaned=any(line.startswith("orphaned") for line in lines),
    )


def read_endings(folder: Path) -> list[Ending]:
    paths = folder.glob("rank_*")
    return sorted((read_ending(path) for path in paths), key=lambda ending: ending.rank)


def place_of(folder: Path, rank: int) -> str:
    """Such as ` in phase rollout of step 5`; empty for a program that says nothing of phases."""
    found = Reader(path_of(folder, rank)).read()
    return f" in {found.place}" if found else ""


def ended_by(code: int) -> str:
    """An exit status in words; Python tells a signal as -9, the shell as 137."""
    number = -code if code < 0 else code - 128
    if code < 0 or 128 < code < 160:
        return f"was killed by signal {number}"
    return f"ended with status {code}"


def _by_signal(folder: Path, rank: int, code: int) -> Cause:
    place = place_of(folder, rank) or " before its first phase"
    what = f"rank {rank} {ended_by(code)}{place}"
    remedy = ""
    if -code == SIGKILL:
        remedy = "if nobody did that, the system was short of memory: see dmesg, and use less"
    return Cause(rank, 1, what, remedy)


def _by_failure(folder: Path, ending: Ending, failure: Failure | None) -> Cause:
    place, status = place_of(folder, ending.rank), ending.status or 1
    if failure is None or failure.message.startswith("SystemExit"):
        said = "" if failure is None else failure.message.removeprefix("SystemExit").lstrip(": ")
        more = f": {said}" if said and not said.isdecimal() else ""
        return Cause(
            ending.rank, status, f"rank {ending.rank} ended with status {status}{place}{more}"
        )
    what = f"rank {ending.rank} failed{place}: {failure.message}"
    return Cause(ending.rank, status, what, "its traceback is above", has_traceback=True)


def stopped(folder: Path) -> Cause | None:
    """The end that a deadline has put to the job."""
    try:
        told = json.loads((folder / "stopped").read_text(encoding="utf-8"))
        return Cause(told["rank"], 1, told["sentence"], told["remedy"])
    except (OSError, ValueError, KeyError):
        return None


def _own_cause(folder: Path, ending: Ending, lost: int) -> tuple[bool, float, Cause] | None:
    """(whether it only follows from another, when, what) of a rank that did not end well."""
    if ending.status:
        failure = failures.read(folder, ending.rank)
        follows = failure is not None and failure.is_consequence
        when = failure.time if failure else ending.time
        return follows, when, _by_failure(folder, ending, failure)
    if ending.status is None and ending.code:
        return False, ending.time, _by_signal(folder, ending.rank, ending.code)
    if ending.status is None and lost < 0:
        return False, 0.0, _by_signal(folder, ending.rank, lost)
    return None


def find_cause(folder: Path, lost: Mapping[int, int] | None = None) -> Cause | None:
    """The first failure that is no other's consequence; None where nothing tells.

    `lost` are processes that msrun saw end, with their codes: all there is of a killed rank that nobody forked.
    """
    endings = read_endings(folder)
    if endings and endings[0].status == USERS_ERROR:
        # The user's mistake is every rank's, and the first rank of this host has told it.
        return Cause(endings[0].rank, USERS_ERROR, "")
    by_deadline = stopped(folder)
    if by_deadline:
        return by_deadline
    found = [_own_cause(folder, ending, (lost or {}).get(ending.pid, 0)) for ending in endings]
    first = min((told for told in found if told), key=lambda told: told[:2], default=None)
    if first:
        return first[2]
    if any(ending.orphaned for ending in endings):
        what = f"the process that forks the ranks has ended; rank 0 was{place_of(folder, 0)}"
        return Cause(None, 1, what.removesuffix("; rank 0 was"), "fork_server.log may say why")
    return None


def seen_by_msrun(log: Path) -> dict[int, int]:
    try:
        return {int(pid): int(code) for pid, code in MSRUN_LOST.findall(log.read_text())}
    except OSError:
        return {}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _last_lines(path: Path, count: int) -> list[str]:
    return _text(path).splitlines()[-count:]


def _evidence(logs: Path, cause: Cause) -> list[str]:
    """What the screen does not show yet: it has rank 0's output."""
    if cause.rank is None:
        lines = _last_lines(logs / "msrun.log", NUM_LINES_OF_MSRUN)
        return ["mindgrpo: the last lines of msrun:", *lines] if lines else []
    if cause.rank == 0:
        return []
    log = logs / f"worker_{cause.rank}.log"
    lines = _last_lines(log, NUM_LAST_LINES)
    if len(lines) < NUM_LAST_LINES:
        # Full logs move aside; the newest of them has the same name and .1.
        lines = _last_lines(log.with_name(f"{log.name}.1"), NUM_LAST_LINES - len(lines)) + lines
    failure = failures.read(logs / "status", cause.rank)
    if failure and failure.traceback in _text(logs / "worker_0.log"):
        return []
    return [f"mindgrpo: the last lines of rank {cause.rank}:", *lines] if lines else []


def traceback_of_cause(folder: Path) -> str:
    """For a rank whose own failure only follows: what it follows from, where that has a traceback."""
    cause = find_cause(folder)
    if cause is None or cause.rank is None or not cause.has_traceback:
        return ""
    failure = failures.read(folder, cause.rank)
    return f"\nmindgrpo: {cause.what}:\n{failure.traceback}" if failure else ""


def tell(logs: Path, ended: int) -> tuple[list[str], int]:
    """The lines that end a job, and its status; `ended` is how msrun, or the only rank, ended."""
    folder = logs / "status"
    cause = find_cause(folder, seen_by_msrun(logs / "msrun.log"))
    if cause is None and ended == 0:
        return [], 0
    known = [ending.rank for ending in read_endings(folder)]
    if cause is None and known == [0] and not (logs / "scheduler.log").exists():
        what = f"rank 0 {ended_by(ended)}{place_of(folder, 0)}"
        cause = Cause(0, 1 if ended > 128 else ended, what)
    if cause is None:
        cause = Cause(None, 1, f"msrun {ended_by(ended)} before a rank did{place_of(folder, 0)}")
    if cause.status == USERS_ERROR and not cause.what:
        return [], USERS_ERROR
    remedy = "; ".join(words for words in (cause.remedy, f"full logs: {logs}") if words)
    return [*_evidence(logs, cause), f"mindgrpo: {cause.what}; {remedy}"], cause.status


def furthest_step(folder: Path) -> int:
    found = (Reader(path).read() for path in folder.glob("phase_*"))
    return max((snapshot.step for snapshot in found if snapshot), default=0)


def main() -> int:
    logs, ended = Path(sys.argv[1]), int(sys.argv[2])
    lines, status = tell(logs, ended)
    (logs / "status" / "step").write_text(f"{furthest_step(logs / 'status')}\n")
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
