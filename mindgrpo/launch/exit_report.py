"""Words the end of a job: the last lines that its user sees, and its exit status, from the log and status folders."""

from __future__ import annotations

import re
import time
from pathlib import Path

from mindgrpo.errors import USER_ERROR_STATUS
from mindgrpo.health.failure import (
    RankFailure,
    describe_code,
    failure_of_code,
    first_failure,
    position_of,
    write_failure,
)

NUM_LAST_LINES = 30
NUM_MSRUN_LINES = 20
MSRUN_LOST = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-\d+)")


def worker_log(logs: Path, rank: int) -> Path:
    return logs / f"worker_{rank}.log"


def worker_pids(folder: Path) -> dict[int, int]:
    """Reads process ids of the started workers, by rank, from the status folder's files `rank_RANK`."""
    pids = {}
    for path in folder.glob("rank_*"):
        words = path.read_text(errors="replace").split()
        if len(words) == 2 and words[1].isdecimal():
            pids[int(path.name.rpartition("_")[2])] = int(words[1])
    return pids


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def newest_checkpoint(folder: Path) -> list[str]:
    """Says what a job that was ended at once had saved, and the command that resumes it."""
    lines = _text(folder / "checkpoint").splitlines()
    if len(lines) != 2:
        return ["stopped at once: nothing was saved"]
    return [f"stopped at once; saved: {lines[0]}", f"resume with: {lines[1]}"]


def _write_what_msrun_saw(logs: Path) -> None:
    """Writes failures that only msrun's log has: of ranks that were killed and that no fork server had started."""
    ranks = {pid: rank for rank, pid in worker_pids(logs / "status").items()}
    for pid, code in MSRUN_LOST.findall(_text(logs / "msrun.log")):
        rank = ranks.get(int(pid))
        if rank is not None:
            # msrun reports the first rank that it sees end.
            failure = failure_of_code(logs / "status", rank, int(code), 0.0)
            write_failure(logs / "status", rank, failure)


def _of_the_job(logs: Path, num_ranks: int, code: int) -> RankFailure:
    """Describes how the main process ended, msrun or the only rank, for a job whose ranks left nothing."""
    folder = logs / "status"
    if num_ranks == 1:
        return failure_of_code(folder, 0, code, time.time())
    message = f"msrun {describe_code(code)} before a rank did{position_of(folder, 0)}"
    return RankFailure(None, time.time(), 1, message)


def _evidence(logs: Path, first_rank: int, failure: RankFailure) -> list[str]:
    """Lines of the log that the screen has not shown; it shows the log of this host's first rank."""
    rank = failure.rank
    if rank is None:
        lines = _text(logs / "msrun.log").splitlines()[-NUM_MSRUN_LINES:]
        return ["mindgrpo: the last lines of msrun:", *lines] if lines else []
    if rank == first_rank:
        return []
    if failure.traceback and failure.traceback in _text(worker_log(logs, first_rank)):
        return []
    log = worker_log(logs, rank)
    # Full logs move aside; the newest of them has the same name and .1.
    older = _text(log.with_name(f"{log.name}.1")).splitlines()
    lines = [*older, *_text(log).splitlines()][-NUM_LAST_LINES:]
    return [f"mindgrpo: the last lines of rank {rank}:", *lines] if lines else []


def traceback_of_first_failure(folder: Path) -> str:
    """Returns the first failure's traceback, for the log of a rank that failed in consequence; empty without one."""
    first = first_failure(folder)
    if first is None or first.is_consequence or not first.traceback:
        return ""
    return f"\nmindgrpo: {first.message}:\n{first.traceback}"


def report(logs: Path, num_ranks: int, first_rank: int, code: int) -> tuple[list[str], int]:
    """Returns the lines that end a job, and its exit status: that of the rank that failed first.

    `first_rank` is this host's; `code` is how msrun, or the only rank, ended (-9: by signal 9).
    """
    _write_what_msrun_saw(logs)
    first = first_failure(logs / "status")
    if first is None:
        if code == 0:
            return [], 0
        first = _of_the_job(logs, num_ranks, code)
    if first.status == USER_ERROR_STATUS and first.rank == first_rank:
        return [], USER_ERROR_STATUS
    words = [words for words in (first.message, first.remedy, f"full logs: {logs}") if words]
    return [*_evidence(logs, first_rank, first), f"mindgrpo: {'; '.join(words)}"], first.status
