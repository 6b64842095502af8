"""Checks the command line of `mindgrpo launch` and the environment's variables that belong to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindgrpo.errors import UserError
from mindgrpo.launch.cluster import flags_of_cluster

USAGE = (
    "usage: mindgrpo launch --ranks N [--max_restarts M] [--hosts H --host_index I --master ADDRESS:PORT | "
    "--cluster auto|msrun|slurm|ascendjob] -- PROGRAM [ARGUMENTS], or --config FILE [--key value ...] to train"
)
# Verbs that run on ranks without a program of the user's. A file of such a name is written ./train.
VERBS = ("train", "eval")
FLAGS = ("--ranks", "--max_restarts", "--hosts", "--host_index", "--master", "--cluster")
STOP_SECONDS = "60"
POSITIVE, PORTS = range(1, 10**5), range(1024, 65536)


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
        return self.command if self.command[0] == "eval" else self.command[1:]

    @property
    def num_local_ranks(self) -> int:
        return self.num_ranks // self.hosts.num_hosts

    @property
    def first_rank(self) -> int:
        return self.hosts.host_index * self.num_local_ranks


def _whole(text: str, numbers: range, otherwise: str) -> int:
    """Raises UserError `otherwise`, unless the text is one of `numbers`."""
    plain = text.isascii() and text.isdecimal() and len(text) <= 5 and text == str(int(text))
    if not plain or int(text) not in numbers:
        raise UserError(otherwise)
    return int(text)


def has_config(arguments: Sequence[str]) -> bool:
    return any(word == "--config" or word.startswith("--config=") for word in arguments)


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
    if others or not command:
        raise UserError(USAGE)
    return values, tuple(command)


def read_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Raises UserError."""
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
