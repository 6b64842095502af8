"""Starts a job, and starts it again where it left off if it failed and that is allowed."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mindgrpo.errors import UserError
from mindgrpo.health.heartbeat import heartbeats_in
from mindgrpo.health.resume_command import resuming
from mindgrpo.launch.cluster import PORTS
from mindgrpo.launch.exit_report import worker_log
from mindgrpo.launch.job import CheckFailed, Job, say
from mindgrpo.launch.options import Options
from mindgrpo.launch.plan import LocalHost, make_plan
from mindgrpo.launch.signals import Signals

NUM_PORTS_TRIED = 200
# Well; the user's mistake; stopped by Ctrl-C or SIGTERM.
NOT_STARTED_AGAIN = (0, 2, 130, 143)
MAX_STALLED_STARTS = 2
LONGEST_PAUSE_SECONDS = 10


def launch(options: Options, environment: Mapping[str, str]) -> int:
    """Runs the job to its end and returns its exit status. Raises UserError before any rank starts."""
    environment = _with_programs_on_path(environment)
    signals = Signals(has_scheduler=options.cluster != "msrun")
    restarts = Restarts(options.max_restarts)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    # Not at the top of the file: whoever only reads the command line needs no backend.
    from mindgrpo.backend.targets import rank_variables

    num_cores = len(os.sched_getaffinity(0))
    host = LocalHost(sys.executable, os.getpid(), num_cores, columns, rank_variables())
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
    """How often a job was started again, how often it may be, and how far its starts came."""

    num_left: int
    num_restarts: int = 0
    furthest_step: int = -1
    num_stalled: int = 0

    def next_options(self, options: Options, status_folder: Path) -> Options | None:
        """Of the next start, which goes on with the run that this one told of; None if there is none."""
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
        directory = ""
        with suppress(OSError):
            directory = (status_folder / "directory").read_text(encoding="utf-8").strip()
        goes_on = f", resumes the run in {directory}" if directory else ""
        say(f"start {self.num_restarts + 1}, {self.num_left} more after it{goes_on}")
        if not directory:
            return options
        return replace(options, command=resuming(options.command, directory))


def _with_programs_on_path(environment: Mapping[str, str]) -> Mapping[str, str]:
    """msrun starts `python` from PATH: that has to be this one, also in a virtual environment that is not active."""
    folder, path = Path(sys.executable).parent, environment.get("PATH", os.defpath)
    python = shutil.which("python", path=path)
    if python is None or Path(python).parent.resolve() != folder.resolve():
        path = f"{folder}{os.pathsep}{path}"
    if shutil.which("msrun", path=path) is None:
        raise UserError(
            f"there is no msrun beside {sys.executable} or on PATH: install MindSpore, which has it, with "
            "'pip install mindspore==2.9.0'."
        )
    return {**environment, "PATH": path}


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


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
    port = next(filter(_is_free, random.sample(PORTS, NUM_PORTS_TRIED)), None)
    if port is None:
        raise UserError(
            f"none of {NUM_PORTS_TRIED} ports from {PORTS.start} to {PORTS.stop} is free: set MINDGRPO_PORT to a free "
            "one."
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
