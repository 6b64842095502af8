"""Starts a job, waits for its end, ends what is left, and starts it again where it left off if that is allowed."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from mindgrpo.errors import UserError, counted
from mindgrpo.health.heartbeat import LiveLine, heartbeat_path, heartbeats_in, read_heartbeat
from mindgrpo.health.rank_health import resuming
from mindgrpo.launch import exit_report
from mindgrpo.launch.exit_report import ClusterWatch, worker_log
from mindgrpo.launch.log_follower import LogFollower
from mindgrpo.launch.options import JOB_PORTS, Options
from mindgrpo.launch.plan import JobPlan, LocalHost, PlannedProcess, make_plan
from mindgrpo.launch.worker import MSRUN, has_finished, request_fork
from mindgrpo.processes.child import Child
from mindgrpo.processes.job import JobProcesses
from mindgrpo.processes.linux import STOPPING

POLL_SECONDS = 0.2
# How long what is left of a job may take to end by itself once a rank has failed.
SETTLE_SECONDS = 2.0
NUM_PORTS_TRIED = 200
# Well; the user's mistake; stopped by Ctrl-C or SIGTERM.
NOT_STARTED_AGAIN = (0, 2, 130, 143)
MAX_STALLED_STARTS = 2
LONGEST_PAUSE_SECONDS = 10


class Signals:
    """Wakes the launcher for a signal to end, whose numbers are in `received`, and for the end of a child.

    Signals that this process was started to ignore do not count (SIGHUP under nohup, SIGINT in a script's background),
    nor does the second SIGTERM of a scheduler (`has_scheduler`): Slurm sends one to preempt a job and another to
    queue it again, and kills what has not ended in time.
    """

    def __init__(self, has_scheduler: bool = False) -> None:
        self.received: list[int] = []
        self._has_scheduler = has_scheduler
        self._reader, writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._receive)
        # With a handler of its own the end of a child writes to the pipe too.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_repeated = number == signal.SIGTERM and number in self.received
        if not (is_repeated and self._has_scheduler):
            self.received.append(number)

    def wait(self, seconds: float) -> None:
        """Waits for `seconds`, or until a signal has come or a child has ended."""
        if select.select([self._reader], [], [], seconds)[0]:
            os.read(self._reader, 4096)


def show(*lines: str) -> None:
    """Prints to standard error, even if nobody reads it any more."""
    with suppress(OSError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def say(sentence: str) -> None:
    show(f"mindgrpo: {sentence}")


def start_process(process: PlannedProcess, stdin: Any = subprocess.DEVNULL) -> Child:
    """Starts it. Where a cluster's scheduler signals every process of a job to end, only the launcher and the ranks,
    which listen again, take it as meant for them."""

    def ignore_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    log = 2 if process.log is None else os.open(process.log, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        return Child(
            process.command, process.environment, prepare=ignore_signals, log=log, stdin=stdin
        )
    finally:
        if process.log is not None:
            os.close(log)


class CheckFailed(Exception):
    """Says that the check of what the job is given ended with `status`, and has printed why."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Job:
    """Runs one start of a job; `is_stopped` says that a signal ended it."""

    def __init__(self, plan: JobPlan, options: Options, signals: Signals) -> None:
        self._plan, self._options, self._signals = plan, options, signals
        self._processes = JobProcesses(plan.name, plan.status_folder)
        self._live_line = LiveLine()
        self.is_stopped = False

    def run(self) -> int:
        """Returns the exit status. Raises CheckFailed."""
        logs, first_rank = self._plan.logs, self._options.first_rank
        shown = (exit_report.worker_log(logs, first_rank), self._plan.status_folder / "messages")
        follower = LogFollower(shown, doing=self._doing)
        try:
            with self._start_fork_server() as standard_input:
                self._check(standard_input)
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
        if self._has_finished():
            return 0
        lines, status = exit_report.report(logs, self._options.num_ranks, first_rank, code)
        show(*lines)
        return status

    def _doing(self) -> str:
        """Says what the first rank of this host is doing."""
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

    def _check(self, server: socket.socket | IO[str]) -> None:
        """Checks what the job is given, in a process that the fork server forks. Returns early for a signal."""
        if self._plan.check is None:
            return
        if isinstance(server, socket.socket):
            status = self._check_in_fork(server)
            if status is not None or self._signals.received:
                if status:
                    raise CheckFailed(max(1, status))
                return
        check = start_process(self._plan.check)
        while check.poll() is None and not self._signals.received:
            self._signals.wait(POLL_SECONDS)
        if check.returncode:
            raise CheckFailed(max(1, check.returncode))

    def _check_in_fork(self, server: socket.socket) -> int | None:
        """Returns the status of the check; None for a signal, or where the server has ended, as on devices."""
        assert self._plan.check is not None
        words, environment = self._plan.check_words, self._plan.check.environment
        try:
            with request_fork(
                server, words, environment, is_rank=False, streams=(0, 2, 2)
            ) as answers:
                answer = b""
                while not answer.endswith(b"\n") and not self._signals.received:
                    if select.select([answers], [], [], POLL_SECONDS)[0]:
                        received = answers.recv(16)
                        if not received:
                            return None
                        answer += received
        except OSError:
            return None
        return int(answer.strip(b"\0\n")) if answer.endswith(b"\n") else None

    def _wait(self, main: Child) -> int | None:
        """Waits for the main process and returns its exit code; None for a signal to this one."""
        over_at = None
        several = self._options.hosts.num_hosts > 1
        watch = ClusterWatch(self._options, self._plan.logs) if several else None
        while (code := main.poll()) is None:
            if self._signals.received:
                return None
            if watch is not None:
                watch.look()
            # MindSpore's scheduler waits for a rank that has crashed since it finished.
            is_over = not several and self._has_finished() and not self._workers()
            if over_at is None and (is_over or self._has_failed()):
                over_at = time.monotonic()
            if over_at is not None and time.monotonic() - over_at > SETTLE_SECONDS:
                self._processes.end_all()
            self._signals.wait(POLL_SECONDS)
        if watch is not None:
            watch.look()  # ranks may have ended right after what their logs say last
        return code

    def _has_failed(self) -> bool:
        """Says whether a rank has failed, while others may still wait for it."""
        if any(self._plan.status_folder.glob("failure_*")):
            return True
        try:
            return b"exit with exception" in (self._plan.logs / "msrun.log").read_bytes()
        except OSError:
            return False

    def _has_finished(self) -> bool:
        """Says whether the programs of all ranks of this host have ended well."""
        first, folder = self._options.first_rank, self._plan.status_folder
        return all(has_finished(folder, first + i) for i in range(self._options.num_local_ranks))

    def _workers(self) -> set[int]:
        """Returns the process ids of the workers that have not ended."""
        pids = exit_report.worker_pids(self._plan.status_folder).values()
        return {pid for pid in pids if self._processes.owns(pid)}

    def _stop(self, main: Child | None) -> None:
        """Tells the ranks to end, and waits for them until there is a second signal."""
        if main is None:
            return
        say(
            f"stopping {counted(self._options.num_local_ranks, 'rank')} of this job (once more: at once)"
        )
        # MindSpore turns a SIGINT that a rank receives into SIGTERM.
        (self._plan.status_folder / "signal").write_text(f"{self._signals.received[0]}\n")
        signalled: set[int] = set()
        until = time.monotonic() + self._options.stop_seconds
        while time.monotonic() < until and len(self._signals.received) < 2:
            workers = self._workers()
            for pid in workers - signalled:
                self._processes.signal(pid, self._signals.received[0])
            signalled |= workers
            if not workers:
                return
            self._signals.wait(POLL_SECONDS)


def launch(options: Options, environment: Mapping[str, str]) -> int:
    """Runs the job to its end and returns its exit status. Raises UserError before any rank starts."""
    environment, msrun = _with_programs_on_path(environment)
    signals = Signals(has_scheduler=options.cluster != "msrun")
    restarts = Restarts(options.max_restarts)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    # Not at the top of the file: who only reads the command line needs no backend.
    from mindgrpo.backend.targets import rank_variables

    num_cores = len(os.sched_getaffinity(0))
    host = LocalHost(sys.executable, os.getpid(), msrun, num_cores, columns, rank_variables())
    while True:
        started_at = time.time()
        port = _port(options)
        logs = _make_log_folder(options)
        plan = make_plan(options, environment, host, logs, port, started_at)
        job = Job(plan, options, signals)
        try:
            status = job.run()
        except CheckFailed as failed:
            # No rank started: the folder goes, and the one above if nothing else is in it.
            shutil.rmtree(logs, ignore_errors=True)
            with suppress(OSError):
                logs.parent.rmdir()
            return failed.status
        if job.is_stopped or status in NOT_STARTED_AGAIN:
            return status
        again = restarts.next_options(options, plan.status_folder)
        if again is None:
            return status
        options = again
        signals.wait(min(restarts.num_restarts, LONGEST_PAUSE_SECONDS))
        if signals.received:
            return 128 + signals.received[0]


@dataclass
class Restarts:
    """Counts how often a job was started again, how often it may be, and how far its starts came."""

    num_left: int
    num_restarts: int = 0
    furthest_step: int = -1
    num_stalled: int = 0

    def next_options(self, options: Options, status_folder: Path) -> Options | None:
        """Returns options of the next start, which resumes the run that this one reported; None if there is none."""
        if self.num_left == 0:
            return None
        step = max((one.step for one in heartbeats_in(status_folder).values()), default=0)
        self.num_stalled = 0 if step > self.furthest_step else self.num_stalled + 1
        self.furthest_step = max(step, self.furthest_step)
        if self.num_stalled >= MAX_STALLED_STARTS:
            say(
                f"not started again: the last two starts came no further than step {self.furthest_step}"
            )
            return None
        self.num_left, self.num_restarts = self.num_left - 1, self.num_restarts + 1
        again = f"start {self.num_restarts + 1}, {self.num_left} more after it"
        try:
            directory = (status_folder / "directory").read_text(encoding="utf-8").strip()
        except OSError:
            say(again)
            return options
        say(f"{again}, resumes the run in {directory}")
        return replace(options, command=resuming(options.command, directory))


def _with_programs_on_path(environment: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Puts this Python first on PATH, where msrun looks for it, also where its virtual environment is not active.

    Returns the environment, and the path of msrun.
    """
    folder, path = Path(sys.executable).parent, environment.get("PATH", os.defpath)
    python = shutil.which("python", path=path)
    if python is None or Path(python).parent.resolve() != folder.resolve():
        path = f"{folder}{os.pathsep}{path}"
    msrun = shutil.which(MSRUN, path=path)
    if msrun is None:
        raise UserError(
            f"there is no msrun beside {sys.executable} or on PATH: install MindSpore, which has it, with "
            "'pip install \"mindspore>=2.9,<2.11\"'."
        )
    return {**environment, "PATH": path}, str(Path(msrun).absolute())


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False


def _port(options: Options) -> int | None:
    if options.hosts.master is not None:
        return options.hosts.master[1]
    if options.num_ranks == 1:
        return None
    if options.port is not None:
        if _is_free(options.port):
            return options.port
        raise UserError(
            f"MINDGRPO_PORT={options.port} is in use by another process: set a free port or unset it."
        )
    port = next(filter(_is_free, random.sample(JOB_PORTS, NUM_PORTS_TRIED)), None)
    if port is None:
        raise UserError(
            f"none of {NUM_PORTS_TRIED} ports from {JOB_PORTS.start} to {JOB_PORTS.stop} is free: set MINDGRPO_PORT "
            "to a free one."
        )
    return port


def _make_log_folder(options: Options) -> Path:
    base = Path(options.log_folder)
    prefix = time.strftime("%Y%m%d-%H%M%S-")
    try:
        base.mkdir(parents=True, exist_ok=True)
        logs = Path(tempfile.mkdtemp(prefix=prefix, dir=base)).resolve()
    except OSError:
        raise UserError(
            f"the log folder {base} cannot be written: set MINDGRPO_LOG_DIR to a folder that can."
        ) from None
    (logs / "status").mkdir()
    log = worker_log(logs, options.first_rank)
    for path in (log, logs / "msrun.log", logs / "status" / "messages"):
        path.touch()
    return logs
