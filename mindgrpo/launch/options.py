"""Checks the command line of `mindgrpo launch` and its variables; reads what a cluster's scheduler says in its place.

Slurm: one task a node of `srun` runs the launcher. The variables of the step count, not those of the job: a shell in
an allocation has only the latter, and a step may have fewer nodes than its job. AscendJob: MindCluster's operator sets
MindSpore's variables in every pod that has devices. Runs no programs, and reads no file.

MS_NODE_TIMEOUT means two things. In the scheduler it is how long a rank may be without a heartbeat, which a thread of
MindSpore's own sends, whatever the rank computes. In a rank, where no device has a limit of its own, it is how long a
sum waits for its neighbour, which may compile or score for minutes. So the variable is the scheduler's, and ranks have
PEER_SECONDS instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from mindgrpo.errors import UserError, whole_number

USAGE = (
    "usage: mindgrpo launch --ranks N [--max_restarts M] [--hosts H --host_index I --master ADDRESS:PORT | "
    "--cluster auto|msrun|slurm|ascendjob] -- PROGRAM [ARGUMENTS], or --config FILE [--key value ...] to train"
)
# Verbs that run on ranks without a program of the user's. A file of such a name is written ./train.
VERBS = ("train", "eval", "sft")
FLAGS = ("--ranks", "--max_restarts", "--hosts", "--host_index", "--master", "--cluster")
STOP_SECONDS = "60"
POSITIVE, PORTS = range(1, 10**5), range(1024, 65536)
CLUSTERS = ("msrun", "auto", "slurm", "ascendjob")
# Below the range from which the system takes ports for connections.
JOB_PORTS = range(10000, 32000)
# Steps of one job that run at once are on other ports, and far from those of the jobs that follow it.
STEP_STRIDE = 1009
STEP_NODES, STEP_TASKS = "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"
STEP_LIST, NODE_INDEX = "SLURM_STEP_NODELIST", "SLURM_NODEID"
ROLE, RANKS, LOCAL_RANKS, HOST_INDEX = "MS_ROLE", "MS_WORKER_NUM", "MS_LOCAL_WORKER", "MS_NODE_RANK"
ADDRESS, PORT = "MS_SCHED_HOST", "MS_SCHED_PORT"
ASCENDJOB = (ROLE, RANKS, LOCAL_RANKS, HOST_INDEX, ADDRESS, PORT)
# MindSpore would take them for its own: msrun sets them for each of its processes, and one rank has no cluster.
NOT_FOR_RANKS = frozenset((*ASCENDJOB, "MS_SERVER_NUM"))
FIRST_NAME = re.compile(r"(?:[^,\[\]\s]|\[[\d,-]+\])+")
SRUN = "start it with 'srun --ntasks=$SLURM_NNODES --ntasks-per-node=1', as examples/cluster/slurm.sbatch does"
# From the loss to the last line of every host's launcher; docs/hosts.md has the sum.
LOST_WITHIN_SECONDS = 20.0
SILENT_SECONDS = 10
ANSWER_SECONDS = 4
# As before for ranks of one host, whose ends the launcher sees itself.
SILENT_SECONDS_ON_ONE_HOST = 60
# Hangs are for the deadlines of phases to find, which know what a rank does.
PEER_SECONDS = 24 * 3600
TIMEOUT = "MS_NODE_TIMEOUT"


@dataclass(frozen=True)
class Hosts:
    """Describes a job's hosts, which have equally many ranks; `master` is (address, port) of the first of several."""

    num_hosts: int = 1
    host_index: int = 0
    master: tuple[str, int] | None = None


@dataclass(frozen=True)
class Options:
    """Says what is started: `command` is a program or one of VERBS, with arguments.

    `max_restarts` is how often a failed job is restarted. `cluster` is the scheduler whose variables gave `hosts`;
    msrun: none, the user did.
    """

    num_ranks: int
    command: tuple[str, ...]
    hosts: Hosts = Hosts()
    cluster: str = "msrun"
    max_restarts: int = 0
    port: int | None = None
    log_folder: str = "output/logs"
    stop_seconds: float = float(STOP_SECONDS)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Returns the program's arguments; for a verb, as the examples' main.py has them: all but `train`."""
        return self.command if self.command[0] in VERBS[1:] else self.command[1:]

    @property
    def num_local_ranks(self) -> int:
        return self.num_ranks // self.hosts.num_hosts

    @property
    def first_rank(self) -> int:
        return self.hosts.host_index * self.num_local_ranks


def _whole(text: str, numbers: range, otherwise: str) -> int:
    """Reads a whole number. Raises UserError `otherwise`, unless the text is one of `numbers`."""
    plain = text.isascii() and text.isdecimal() and len(text) <= 5 and text == str(int(text))
    if not plain or int(text) not in numbers:
        raise UserError(otherwise)
    return int(text)


def has_config(arguments: Sequence[str]) -> bool:
    """Says whether a program's arguments name a configuration; an evaluation's model may be in a run's folder."""
    flags = ("--config", "--model") if list(arguments[:1]) == ["eval"] else ("--config",)
    return any(word.partition("=")[0] in flags for word in arguments)


def _split(argv: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns values by flag, and the command: what follows `--`, or `train` with all other arguments."""
    values: dict[str, str] = {}
    words, others = list(argv), []
    while words and words[0] != "--":
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            others.append(word)
        elif equals or words:
            values[flag] = value if equals else words.pop(0)
        else:
            raise UserError(USAGE)
    command = words[1:]
    if not words and others[:1] and others[0].startswith("--") and has_config(others):
        others, command = [], ["train", *others]
    if others and others[0].endswith((".yaml", ".yml")):
        raise UserError(
            f"'{others[0]}' on the command line belongs to no flag; write --config {others[0]}."
        )
    if others or not command:
        raise UserError(USAGE)
    return values, tuple(command)


def read_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Reads the command line. Raises UserError."""
    words, command = _split(argv)
    cluster, values = flags_of_cluster(words, environment)
    if "--ranks" not in values:
        raise UserError(USAGE)
    ranks, positive = values["--ranks"], f"is not a positive whole number ({USAGE})."
    num_ranks = _whole(ranks, POSITIVE, f"--ranks {ranks} {positive}")
    text = values.get("--max_restarts", environment.get("MINDGRPO_MAX_RESTARTS") or "0")
    wrong = f"--max_restarts {text} is not a whole number ({USAGE})."
    restarts = _whole(text, range(POSITIVE.stop), wrong)
    if command[0] not in VERBS and not os.path.isfile(command[0]):
        raise UserError(
            f"there is no program {command[0]}: give the path of a Python file, or one of {', '.join(VERBS)} ({USAGE})."
        )
    text = values.get("--hosts", "1")
    num_hosts = _whole(text, POSITIVE, f"--hosts {text} {positive}")
    hosts = _read_hosts(values, num_hosts, num_ranks)
    if num_hosts > 1 and restarts:
        raise UserError(
            f"--max_restarts {restarts} is for one host: leave it out, and start all {num_hosts} hosts again with "
            "--resume_training true."
        )
    text = environment.get("MINDGRPO_PORT", "")
    wrong = f"MINDGRPO_PORT={text} is not a port from 1024 to 65535: set such a one or unset it."
    port = _whole(text, PORTS, wrong) if text else None
    seconds = environment.get("MINDGRPO_STOP_SECONDS") or STOP_SECONDS
    wrong = (
        f"MINDGRPO_STOP_SECONDS is {seconds!r}, but must be a whole number above 0; correct or unset it in the "
        "environment."
    )
    return Options(
        num_ranks,
        command,
        hosts,
        cluster,
        restarts,
        port,
        log_folder=environment.get("MINDGRPO_LOG_DIR") or Options.log_folder,
        stop_seconds=float(_whole(seconds, POSITIVE, wrong)),
    )


def _read_hosts(values: Mapping[str, str], num_hosts: int, num_ranks: int) -> Hosts:
    index = values.get("--host_index", "0")
    wrong = f"--host_index {index} is none of {num_hosts} hosts: give 0 on the first, {num_hosts - 1} on the last."
    host_index = _whole(index, range(num_hosts), wrong)
    if num_ranks % num_hosts:
        raise UserError(
            f"{num_ranks} ranks cannot be shared by {num_hosts} hosts: hosts have equally many; change --ranks or "
            "--hosts."
        )
    if num_hosts == 1:
        return Hosts()
    master = values.get("--master", "")
    address, _, port = master.rpartition(":")
    wrong = (
        f"--master '{master}' is not ADDRESS:PORT: give the first host's address and a port from 1024 to 65535 that "
        "is free there."
    )
    return Hosts(num_hosts, host_index, (address, _whole(address and port, PORTS, wrong)))


def flags_of_cluster(
    flags: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Returns the cluster that starts this launcher, and the flags that the user would have to give without one.

    `flags` are the user's; a --master among them stays. Raises UserError, with the variable that is wrong.
    """
    asked = flags.get("--cluster", "msrun")
    if asked not in CLUSTERS:
        raise UserError(f"--cluster {asked} is none of {', '.join(CLUSTERS)}: give one of these.")
    cluster = detect(environment) if asked == "auto" else asked
    own = {flag: value for flag, value in flags.items() if flag != "--cluster"}
    if cluster == "msrun":
        return cluster, own
    for flag in ("--hosts", "--host_index"):
        if flag in flags:
            raise UserError(
                f"{flag} {flags[flag]} is for --cluster msrun, but --cluster {asked} takes it from the variables of "
                f"{cluster}: leave {flag} or --cluster out."
            )
    read: Callable[..., dict[str, str]] = of_slurm if cluster == "slurm" else of_ascendjob
    return cluster, {**read(own, environment), **own}


def detect(environment: Mapping[str, str]) -> str:
    """Returns a cluster whose variables are complete, else msrun. Slurm: only on several nodes of a step of `srun`."""
    has_slurm = environment.get(STEP_NODES, "1") != "1"
    has_ascendjob = all(environment.get(name) for name in ASCENDJOB)
    if has_slurm and has_ascendjob:
        raise UserError(
            f"--cluster auto finds both Slurm ({STEP_NODES}) and AscendJob ({ROLE}) in the environment: give "
            "--cluster slurm, ascendjob or msrun."
        )
    return "slurm" if has_slurm else "ascendjob" if has_ascendjob else "msrun"


def without_cluster(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for the processes of the job, without the scheduler's variables."""
    return {name: value for name, value in environment.items() if name not in NOT_FOR_RANKS}


def _number(environment: Mapping[str, str], name: str, numbers: range, remedy: str) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"0|[1-9][0-9]{0,9}", text) or int(text) not in numbers:
        state = f"{name} is {text!r}" if text else f"{name} is not set"
        raise UserError(
            f"{state}, but must be a whole number from {numbers.start} to {numbers.stop - 1}: {remedy}."
        )
    return int(text)


def first_name(node_list: str) -> str:
    """Returns the first node of Slurm's compressed list: rack1n003 of `rack1n[003-007,9],login`. Raises UserError."""
    match = FIRST_NAME.match(node_list)
    if match is None or re.match(r"[^,]", node_list[match.end() :]):
        raise UserError(
            f"{STEP_LIST} is {node_list!r}, which is not a list of nodes as Slurm writes it: {SRUN}."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[0])


def of_slurm(flags: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags that Slurm's variables say. Raises UserError."""
    if not environment.get(STEP_LIST):
        raise UserError(
            f"--cluster slurm needs {STEP_LIST}, which srun sets for its tasks: {SRUN}."
        )
    counts = range(1, 10**5)
    num_nodes = _number(environment, STEP_NODES, counts, SRUN)
    num_tasks = _number(environment, STEP_TASKS, counts, SRUN)
    if num_tasks != num_nodes:
        raise UserError(
            f"{STEP_TASKS} is {num_tasks} on {num_nodes} nodes, but one launcher a node starts the ranks of the node: "
            f"{SRUN}."
        )
    index = _number(environment, NODE_INDEX, range(num_nodes), SRUN)
    ranks = flags.get("--ranks", "")
    if (whole_number(ranks) or 0) % num_nodes:
        raise UserError(
            f"--ranks {ranks} cannot be shared by {num_nodes} nodes ({STEP_NODES}), which have equally many: change "
            "--ranks or the number of nodes."
        )
    if num_nodes == 1:
        return {}
    return {
        "--hosts": str(num_nodes),
        "--host_index": str(index),
        "--master": f"{first_name(environment[STEP_LIST])}:{_slurm_port(environment)}",
    }


def _slurm_port(environment: Mapping[str, str]) -> str:
    """Chooses a port: not that of another job on the node, and the same on all nodes."""
    if port := environment.get("MINDGRPO_PORT"):
        return port
    ids = range(2**32)
    job = _number(environment, "SLURM_JOB_ID", ids, SRUN)
    step = _number(environment, "SLURM_STEP_ID", ids, SRUN)
    return str(JOB_PORTS.start + (job + STEP_STRIDE * step) % len(JOB_PORTS))


def of_ascendjob(flags: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the flags that an AscendJob's variables say.

    Raises UserError, also in pods of a job whose scheduler is a pod without devices.
    """
    remedy = "MindCluster's operator sets it in the pods of an AscendJob; see docs/clusters.md"
    counts = range(1, 10**5)
    num_ranks = _number(environment, RANKS, counts, remedy)
    num_local = _number(environment, LOCAL_RANKS, range(1, num_ranks + 1), remedy)
    if num_ranks % num_local:
        raise UserError(
            f"{RANKS} is {num_ranks}, which is not a multiple of {LOCAL_RANKS}, {num_local}: give all pods of the "
            "AscendJob equally many devices."
        )
    index = _number(environment, HOST_INDEX, range(num_ranks // num_local), remedy)
    _check_role(environment, index)
    ranks = flags.get("--ranks", str(num_ranks))
    if ranks != str(num_ranks):
        raise UserError(
            f"--ranks {ranks} is not {RANKS}, {num_ranks}, which is the number of devices of the AscendJob: leave "
            "--ranks out."
        )
    if num_local == num_ranks:
        return {"--ranks": ranks}
    address = environment.get(ADDRESS, "")
    if not address and "--master" not in flags:
        raise UserError(f"{ADDRESS} is not set: {remedy}.")
    port = _number(environment, PORT, range(1024, 65536), remedy)
    hosts = str(num_ranks // num_local)
    master = f"{address}:{port}"
    return {"--ranks": ranks, "--hosts": hosts, "--host_index": str(index), "--master": master}


def _check_role(environment: Mapping[str, str], index: int) -> None:
    """Raises UserError unless the first host's launcher starts the scheduler where all pods look for it."""
    role = environment.get(ROLE, "")
    if role not in ("MS_SCHED", "MS_WORKER"):
        raise UserError(
            f"{ROLE} is {role!r}, but must be MS_SCHED in the first pod of an AscendJob and MS_WORKER in others."
        )
    has_devices = environment.get("NPU_POD", "true") != "false"
    if role == "MS_SCHED" and has_devices and index == 0:
        return
    if role == "MS_WORKER" and index > 0:
        return
    state = f"{ROLE} is {role} and {HOST_INDEX} {index}" + (
        "" if has_devices else ", and NPU_POD is false"
    )
    raise UserError(
        f"{state}: the scheduler of this AscendJob is a pod without devices, but mindgrpo starts it with the first "
        "ranks; give the replica Scheduler as many devices as each Worker, as examples/cluster/ascendjob.yaml does."
    )


def cluster_variables(num_hosts: int) -> dict[str, str]:
    """Returns variables for every process of a job: how soon a lost rank or host is noticed; what a user sets wins."""
    if num_hosts == 1:
        return {TIMEOUT: str(SILENT_SECONDS_ON_ONE_HOST)}
    return {
        TIMEOUT: str(SILENT_SECONDS),
        # How long a rank waits for the scheduler's answer to a heartbeat, and then tries to reach it again.
        "MS_RECEIVE_MSG_TIMEOUT": str(ANSWER_SECONDS),
        "MS_HEARTBEAT_RETRY_TIMEOUT": str(ANSWER_SECONDS),
        "MS_RETRY_INTERVAL_LOWER": "1",
        "MS_RETRY_INTERVAL_UPPER": "2",
        # Warnings of this module alone: exit_report.py reads them, and no screen shows them.
        "MS_SUBMODULE_LOG_v": "{DISTRIBUTED:2}",
    }


def set_for_rank(environment: MutableMapping[str, str]) -> None:
    """Sets how long a rank waits for its peers."""
    environment[TIMEOUT] = str(PEER_SECONDS)
