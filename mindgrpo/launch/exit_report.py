"""Says why a job ended, from the status folder and the logs of ranks, msrun and MindSpore's cluster.

MindSpore's scheduler, on host 0, writes which ranks it has not heard of. MindSpore in a rank, on any host, writes that
the scheduler does not answer or says that ranks are lost, and ends its communication and then the rank, which fails
where a sum waits: the launcher has to report why.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindgrpo.errors import USER_ERROR_STATUS
from mindgrpo.health.failure import (
    RankFailure,
    failure_of_code,
    first_failure,
    position_of,
    write_failure,
)
from mindgrpo.health.heartbeat import heartbeats_in
from mindgrpo.health.watchdog import is_silent
from mindgrpo.launch.log_follower import FollowedFile
from mindgrpo.launch.options import Options
from mindgrpo.processes.child import describe_code

NUM_LAST_LINES = 30
NUM_MSRUN_LINES = 20
MSRUN_LOST = re.compile(r"Worker process (\d+) exit with exception\. Error code: (-\d+)")
CLUSTER_NAME = "cluster"
REGISTERED = re.compile(r"rank id: (\d+), .*hostname: (\S+), ip: (\S+) is registered successfully")
SILENT = re.compile(r"UpdateTopoState\] The node: (\d+) is timed out")
NO_ANSWER = "Heartbeat] Failed to send heartbeat message to meta server node"
GIVES_UP = "Callback on exception is called."
LOGGED_AT = re.compile(r"\):(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d)\.(\d{3})")
# A rank that gives up longer after the last missing answer has reached the scheduler again in between.
RECENT_SECONDS = 15.0


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
    """Returns lines of the log that the screen has not shown; it shows the log of this host's first rank."""
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
    if first.status == USER_ERROR_STATUS and first.rank is not None:
        # Every rank says it; that of the screen may have been ended before it wrote that it failed.
        shown = _text(worker_log(logs, first_rank))
        own = _text(worker_log(logs, first.rank)).splitlines()
        sentences = [line for line in own if line.startswith("mindgrpo: ")]
        if sentences or first.rank == first_rank:
            return [one for one in dict.fromkeys(sentences) if one not in shown], USER_ERROR_STATUS
    words = [words for words in (first.message, first.remedy, f"full logs: {logs}") if words]
    return [*_evidence(logs, first_rank, first), f"mindgrpo: {'; '.join(words)}"], first.status


@dataclass
class ClusterNews:
    """Collects what the logs of one host have reported so far.

    `addresses` are of ranks, such as `node2, 10.0.0.2`; `lost_at` is when the first bad line was written, in seconds
    since the epoch.
    """

    addresses: dict[int, str] = field(default_factory=dict)
    silent_ranks: set[int] = field(default_factory=set)
    has_no_scheduler: bool = False
    lost_at: float | None = None
    _unanswered_at: float = 0.0

    def read(self, line: str) -> None:
        if match := REGISTERED.search(line):
            self.addresses[int(match[1])] = f"{match[2]}, {match[3]}"
        elif match := SILENT.search(line):
            self.silent_ranks.add(int(match[1]))
            self._lose(logged_at(line))
        elif NO_ANSWER in line:
            self._unanswered_at = logged_at(line)
        elif GIVES_UP in line:
            when = logged_at(line)
            self.has_no_scheduler |= when - self._unanswered_at < RECENT_SECONDS
            self._lose(when)

    def _lose(self, when: float) -> None:
        self.lost_at = when if self.lost_at is None else min(when, self.lost_at)


def logged_at(line: str) -> float:
    """Returns seconds since the epoch; now for a line without a time."""
    match = LOGGED_AT.search(line)
    if match is None:
        return time.time()
    return time.mktime(time.strptime(match[1], "%Y-%m-%d-%H:%M:%S")) + int(match[2]) / 1000


def numbers(ranks: Iterable[int]) -> str:
    """Returns words such as `rank 3`, `ranks 2 and 3` or `ranks 4 to 7`."""
    ordered = sorted(ranks)
    first, last = ordered[0], ordered[-1]
    if len(ordered) == 1:
        return f"rank {first}"
    if len(ordered) > 2 and last - first == len(ordered) - 1:
        return f"ranks {first} to {last}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {last}"


def describe_host(options: Options, index: int, addresses: Mapping[int, str]) -> str:
    """Returns words such as `host 1 (node2, 10.0.0.2, ranks 8 to 15)`; host 0's address is known."""
    ranks = range(index * options.num_local_ranks, (index + 1) * options.num_local_ranks)
    known = [addresses[rank] for rank in ranks if rank in addresses][:1]
    if not known and index == 0 and options.hosts.master is not None:
        known = [options.hosts.master[0]]
    return f"host {index} ({', '.join([*known, numbers(ranks)])})"


def failure_of_cluster(options: Options, news: ClusterNews, stopped: Sequence[int]) -> RankFailure:
    """Describes bad news in the job's last line; `stopped` are ranks of this host without a heartbeat."""
    when = news.lost_at or time.time()
    own, first = options.hosts.host_index, describe_host(options, 0, news.addresses)
    remedy = "its own last line and logs say more, if it still runs"
    silent = sorted(news.silent_ranks)
    lost = sorted({rank // options.num_local_ranks for rank in silent})
    if silent and lost != [own]:
        hosts = " and ".join(describe_host(options, index, news.addresses) for index in lost)
        verb = "is" if len(lost) == 1 else "are"
        message = f"{hosts} {verb} lost: {numbers(silent)} ended or cannot be reached"
        return RankFailure(silent[0], when, 1, message, remedy)
    if news.has_no_scheduler:
        return RankFailure(0, when, 1, f"{first} is lost: it ended or cannot be reached", remedy)
    if silent := silent or sorted(stopped):
        host = describe_host(options, own, news.addresses)
        message = f"{numbers(silent)} of this host, {host}, gave no sign of life"
        return RankFailure(silent[0], when, 1, message)
    if options.hosts.num_hosts == 2:
        message = f"{first} is lost: a rank there ended or cannot be reached"
        return RankFailure(0, when, 1, message, remedy)
    message = f"a rank of another host ended or cannot be reached, as {first} was the first to see"
    return RankFailure(0, when, 1, message, "the last line of that host names it")


class ClusterWatch:
    """Follows the logs of this host's scheduler and ranks, and writes a failure for what they report."""

    def __init__(self, options: Options, logs: Path) -> None:
        self._options, self._folder = options, logs / "status"
        ranks = range(options.first_rank, options.first_rank + options.num_local_ranks)
        # The scheduler's last: when a rank of host 0 gives up, it has written why.
        paths = [*(worker_log(logs, rank) for rank in ranks), logs / "scheduler.log"]
        self._files = {FollowedFile(path): b"" for path in paths}
        self._news = ClusterNews()

    def look(self) -> None:
        """Reads what is new; the first failure, on this host or another, stays the reason."""
        if self._news.lost_at is not None:
            return
        for file, rest in self._files.items():
            while chunk := file.read():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._news.read(line.decode(errors="replace"))
            self._files[file] = rest
        if self._news.lost_at is not None:
            now, beats = time.monotonic(), heartbeats_in(self._folder)
            stopped = [rank for rank, beat in beats.items() if is_silent(beat, now)]
            write_failure(
                self._folder, CLUSTER_NAME, failure_of_cluster(self._options, self._news, stopped)
            )
