"""Decides which processes a start of a job has, with their commands and environments. Pure: nothing is started here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindgrpo.errors import counted
from mindgrpo.health.rank_health import PREFIX_VARIABLE
from mindgrpo.launch.options import Options, cluster_variables, has_config
from mindgrpo.processes.job import STATUS_VARIABLE

SET_HERE_VARIABLE = "MINDGRPO_DEFAULTS"
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("worker.py")
FORK_SERVER = Path(__file__).with_name("fork_server.py")
# Not `-m`, which would let modules of the present folder replace those of the standard library.
RUN_VERB = (
    "-c",
    "import sys; sys.path[:] = filter(None, sys.path); from mindgrpo.cli.verbs import main; sys.exit(main())",
)
# What a user sets wins.
DEFAULTS = {
    "GLOG_v": "3",
    # Larger blocks go back to the system when freed, so that memory given up shows.
    "MALLOC_MMAP_THRESHOLD_": "1048576",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class LocalHost:
    """Holds what a plan also depends on: this launcher's Python, its id, the path of msrun, and the cores.

    `columns` is the width of its terminal, if it has one, which ranks cannot see; `variables` are for its devices.
    """

    python: str
    pid: int
    msrun: str
    num_cores: int
    columns: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedProcess:
    """Says how a process is started; `log` takes what the process prints; None: the launcher's standard error."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path | None = None


@dataclass(frozen=True)
class JobPlan:
    """Describes one start of a job. `check` and `fork_server` run first; `main` is msrun, or the only rank's worker."""

    name: str
    logs: Path
    check: PlannedProcess | None
    fork_server: PlannedProcess | None
    main: PlannedProcess
    headline: str

    @property
    def status_folder(self) -> Path:
        return self.logs / "status"

    @property
    def check_words(self) -> tuple[str, ...]:
        """Returns the verb of `check` and its arguments."""
        return self.check.command[len(RUN_VERB) + 1 :] if self.check else ()


def make_plan(
    options: Options,
    environment: Mapping[str, str],
    host: LocalHost,
    logs: Path,
    port: int | None,
    started_at: float,
) -> JobPlan:
    """Plans a start. `port` is msrun's scheduler's, None for one rank; `started_at` is seconds since the epoch."""
    name = f"{host.pid}-{logs.name.rpartition('-')[2]}"
    ours = _environment(options, environment, host) | {
        STATUS_VARIABLE: str(logs / "status"),
        "MINDGRPO_JOB": name,
        "MINDGRPO_LAUNCHED_AT": f"{started_at:.6f}",
        PREFIX_VARIABLE: _prefix(options, environment),
    }
    arguments = options.arguments
    check = fork_server = None
    if has_config(arguments):
        words = ("check", "--quiet", "--ranks", str(options.num_ranks), *arguments)
        check = PlannedProcess((host.python, *RUN_VERB, *words), ours)
    if environment.get("MINDGRPO_FORK") != "0":
        has_msrun = options.num_ranks > 1
        has_scheduler = has_msrun and options.hosts.host_index == 0
        num_processes = options.num_local_ranks + has_msrun + has_scheduler + (check is not None)
        command = (host.python, str(FORK_SERVER), str(num_processes), *arguments)
        fork_server = PlannedProcess(command, ours, logs / "fork_server.log")
    main = PlannedProcess(
        _main_command(options, host, logs, port),
        ours,
        logs / ("worker_0.log" if options.num_ranks == 1 else "msrun.log"),
    )
    return JobPlan(name, logs, check, fork_server, main, _headline(options, port, logs))


def _environment(
    options: Options, environment: Mapping[str, str], host: LocalHost
) -> dict[str, str]:
    num_threads = max(1, host.num_cores // options.num_local_ranks)
    ours = {**DEFAULTS, **cluster_variables(options.hosts.num_hosts), **host.variables}
    ours["OMP_NUM_THREADS"] = str(num_threads)
    # Processes that are not ranks, such as vLLM's, are started without them.
    ours[SET_HERE_VARIABLE] = " ".join(name for name in ours if not environment.get(name))
    users = {name: value for name, value in environment.items() if name != SET_HERE_VARIABLE}
    ours |= {name: value for name, value in users.items() if value or name not in ours}
    ours["PYTHONUNBUFFERED"] = "1"
    if host.columns is not None:
        ours["COLUMNS"] = str(host.columns)
    root = PACKAGE_FOLDER.parent
    if root.name not in ("site-packages", "dist-packages"):
        ours["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), ours.get("PYTHONPATH"))))
    ours.pop("MINDGRPO_RANKS_PER_HOST", None)
    if options.hosts.num_hosts > 1:
        ours["MINDGRPO_RANKS_PER_HOST"] = str(options.num_local_ranks)
    return ours


def _prefix(options: Options, environment: Mapping[str, str]) -> str:
    """Returns the launcher's command line up to the program; a script says how it calls the launcher."""
    hosts = options.hosts
    flags = ["--ranks", str(options.num_ranks)]
    if options.max_restarts:
        flags += ["--max_restarts", str(options.max_restarts)]
    if options.cluster != "msrun":
        flags += ["--cluster", options.cluster]
    elif hosts.master is not None:
        address, port = hosts.master
        flags += ["--hosts", str(hosts.num_hosts), "--host_index", str(hosts.host_index)]
        flags += ["--master", f"{address}:{port}"]
    return f"{environment.get('MINDGRPO_LAUNCHER') or 'mindgrpo launch'} {shlex.join(flags)} --"


def _main_command(
    options: Options, host: LocalHost, logs: Path, port: int | None
) -> tuple[str, ...]:
    if options.num_ranks == 1:
        return (host.python, str(WORKER), *options.command)
    several: tuple[str, ...] = ()
    if options.hosts.master is not None:
        address, _ = options.hosts.master
        several = (f"--master_addr={address}", f"--node_rank={options.hosts.host_index}")
    return (
        host.python,
        str(WORKER),
        host.msrun,
        f"--worker_num={options.num_ranks}",
        f"--local_worker_num={options.num_local_ranks}",
        f"--master_port={port}",
        *several,
        "--join=True",
        f"--log_dir={logs}",
        # No rank has this number: msrun shows no log.
        f"--tail_worker_log={options.num_ranks}",
        "--",
        str(WORKER),
        *options.command,
    )


def _headline(options: Options, port: int | None, logs: Path) -> str:
    num_ranks, hosts = options.num_ranks, options.hosts
    if hosts.master is not None:
        address, port = hosts.master
        return (
            f"host {hosts.host_index} of {hosts.num_hosts}: {options.num_local_ranks} of {num_ranks} ranks, meeting at "
            f"{address}:{port}, full logs: {logs}"
        )
    where = "" if num_ranks == 1 else f" on port {port}"
    return f"{counted(num_ranks, 'rank')}{where}, full logs: {logs}"
