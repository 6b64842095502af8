"""Reads in the logs of MindSpore's cluster which ranks and hosts it has lost.

The scheduler, on host 0, writes which ranks it has not heard of. MindSpore in a rank, on any host, writes that the
scheduler does not answer or says that ranks are lost, and ends its communication and then
the rank, which fails where a sum waits: the launcher has to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mindgrpo.health.failure import RankFailure, write_failure
from mindgrpo.health.heartbeat import heartbeats_in
from mindgrpo.health.watchdog import is_silent
from mindgrpo.launch.exit_report import worker_log
from mindgrpo.launch.log_follower import FollowedFile
from mindgrpo.launch.options import Options

NAME = "cluster"
REGISTERED = re.compile(r"rank id: (\d+), .*hostname: (\S+), ip: (\S+) is registered successfully")
SILENT = re.compile(r"UpdateTopoState\] The node: (\d+) is timed out")
NO_ANSWER = "Heartbeat] Failed to send heartbeat message to meta server node"
GIVES_UP = "Callback on exception is called."
LOGGED_AT = re.compile(r"\):(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d)\.(\d{3})")
# A rank that gives up longer after the last missing answer has reached the scheduler again in between.
RECENT_SECONDS = 15.0


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


def failure_of(options: Options, news: ClusterNews, stopped: Sequence[int]) -> RankFailure:
    """Words bad news for the last line; `stopped` are ranks of this host without a heartbeat."""
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
        """Reads what is new; whatever failed first, on this host or another, stays the reason."""
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
            write_failure(self._folder, NAME, failure_of(self._options, self._news, stopped))
