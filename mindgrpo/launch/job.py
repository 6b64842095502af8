"""Runs one start of a job: checks what it is given, starts its processes, waits for their end, ends what is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO

from mindgrpo.health.heartbeat import heartbeat_path, read_heartbeat
from mindgrpo.health.live_line import LiveLine
from mindgrpo.launch import exit_report
from mindgrpo.launch.cluster_watch import ClusterWatch
from mindgrpo.launch.log_follower import LogFollower
from mindgrpo.launch.options import Options
from mindgrpo.launch.plan import JobPlan
from mindgrpo.launch.processes import JobProcesses, start_process
from mindgrpo.launch.signals import Signals

POLL_SECONDS = 0.2
# How long what is left of a job may take to end by itself once a rank has failed.
SETTLE_SECONDS = 2.0


def show(*lines: str) -> None:
    """On standard error, whoever still reads it."""
    with suppress(OSError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def say(sentence: str) -> None:
    show(f"mindgrpo: {sentence}")


class CheckFailed(Exception):
    """The check of what the job is given ended with `status`, and has printed why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Job:
    """`run` returns the exit status; `is_stopped` tells that a signal ended the job."""

    def __init__(self, plan: JobPlan, options: Options, signals: Signals) -> None:
        self._plan, self._options, self._signals = plan, options, signals
        self._processes = JobProcesses(plan.name, plan.status_folder)
        self._live_line = LiveLine()
        self.is_stopped = False

    def run(self) -> int:
        """Raises CheckFailed."""
        logs, first_rank = self._plan.logs, self._options.first_rank
        shown = (exit_report.worker_log(logs, first_rank), self._plan.status_folder / "messages")
        follower = LogFollower(shown, doing=self._doing)
        try:
            with self._start_fork_server() as standard_input:
                self._check()
                main = None
                if not self._signals.received:
                    say(self._plan.headline)
                    main = start_process(self._plan.main, standard_input)
            # After all processes: one that is forked beside a thread may inherit a lock that nobody opens.
            follower.start()
            code = self._wait(main) if main else None
            if code is None:
                self._stop(main)
        finally:
            self._processes.end_all()
            follower.finish()
        # A screen that is held holds this up too, until it is released or there is another signal.
        while follower.is_alive() and len(self._signals.received) < 2:
            follower.join(POLL_SECONDS)
        if code is None:
            self.is_stopped = True
            if len(self._signals.received) > 1:
                for line in exit_report.newest_checkpoint(self._plan.status_folder):
                    say(line)
            say(f"stopped; full logs: {logs}")
            return 128 + self._signals.received[0]
        lines, status = exit_report.report(logs, self._options.num_ranks, first_rank, code)
        show(*lines)
        return status

    def _doing(self) -> str:
        """What the first rank of this host is doing."""
        heartbeat = read_heartbeat(
            heartbeat_path(self._plan.status_folder, self._options.first_rank)
        )
        return self._live_line.text(heartbeat, time.monotonic()) if heartbeat else ""

    def _start_fork_server(self) -> socket.socket | IO[str]:
        """Returns what the main process gets as standard input, which all workers inherit from it.

        It leads to the fork server. It has no name, so that only processes of the job can ask for a rank, which runs
        any program.
        """
        if self._plan.fork_server is None:
            return open(os.devnull)
        workers_end, servers_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with servers_end:
            start_process(self._plan.fork_server, servers_end)
        return workers_end

    def _check(self) -> None:
        """Beside the fork server, which imports meanwhile. Returns early for a signal."""
        if self._plan.check is None:
            return
        check = start_process(self._plan.check)
        while check.poll() is None and not self._signals.received:
            self._signals.wait(POLL_SECONDS)
        if check.returncode:
            raise CheckFailed(max(1, check.returncode))

    def _wait(self, main: subprocess.Popen[bytes]) -> int | None:
        """The code with which the main process ended; None for a signal to this one."""
        failed_at = None
        several = self._options.hosts.num_hosts > 1
        watch = ClusterWatch(self._options, self._plan.logs) if several else None
        while (code := main.poll()) is None:
            if self._signals.received:
                return None
            if watch is not None:
                watch.look()
            if failed_at is None and self._has_failed():
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > SETTLE_SECONDS:
                self._processes.end_all()
            self._signals.wait(POLL_SECONDS)
        if watch is not None:
            watch.look()  # ranks may have ended right after what their logs say last
        return code

    def _has_failed(self) -> bool:
        """Whether a rank has, while others may still wait for it."""
        if any(self._plan.status_folder.glob("failure_*")):
            return True
        try:
            return b"exit with exception" in (self._plan.logs / "msrun.log").read_bytes()
        except OSError:
            return False

    def _stop(self, main: subprocess.Popen[bytes] | None) -> None:
        """Tells the ranks to end, and waits for them until there is a second signal."""
        if main is None:
            return
        say(f"stopping the {self._options.num_local_ranks} ranks of this job (once more: at once)")
        # MindSpore turns a SIGINT that a rank receives into SIGTERM.
        (self._plan.status_folder / "signal").write_text(f"{self._signals.received[0]}\n")
        signalled: set[int] = set()
        until = time.monotonic() + self._options.stop_seconds
        while time.monotonic() < until and len(self._signals.received) < 2:
            pids = exit_report.worker_pids(self._plan.status_folder).values()
            workers = {pid for pid in pids if self._processes.owns(pid)}
            for pid in workers - signalled:
                self._processes.signal(pid, self._signals.received[0])
            signalled |= workers
            if not workers:
                return
            self._signals.wait(POLL_SECONDS)
