"""Checks the command line of `mindgrpo launch` and the environment's variables that belong to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindgrpo.errors import UserError

USAGE = (
    "usage: mindgrpo launch --ranks N [--max_restarts M] [--hosts H --host_index I --master ADDRESS:PORT] -- "
    "PROGRAM [ARGUMENTS]"
)
FLAGS = ("--ranks", "--max_restarts", "--hosts", "--host_index", "--master")
MIN_TOKEN_LENGTH = 16
STOP_SECONDS = "60"


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, which have equally many ranks. `master` is (address, port) of the first, if several."""

    num_hosts: int = 1
    host_index: int = 0
    master: tuple[str, int] | None = None


@dataclass(frozen=True)
class Options:
    """`command` is the program and its arguments; `max_restarts` is how often a job that failed is started again."""

    num_ranks: int
    command: tuple[str, ...]
    hosts: Hosts = Hosts()
    max_restarts: int = 0
    port: int | None = None
    log_folder: str = "output/logs"
    stop_seconds: float = float(STOP_SECONDS)

    @property
    def num_local_ranks(self) -> int:
        return self.num_ranks // self.hosts.num_hosts

    @property
    def first_rank(self) -> int:
        return self.hosts.host_index * self.num_local_ranks


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 5 and text == str(int(text))


def _split(argv: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Values by flag, and the command that follows `--`."""
    values: dict[str, str] = {}
    words = list(argv)
    while words and words[0].partition("=")[0] in FLAGS:
        flag, equals, value = words.pop(0).partition("=")
        if not equals and not words:
            raise UserError(USAGE)
        values[flag] = value if equals else words.pop(0)
    if words[:1] != ["--"] or len(words) < 2 or "--ranks" not in values:
        raise UserError(USAGE)
    return values, tuple(words[1:])


def read_options(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Raises UserError."""
    values, command = _split(argv)
    ranks = values["--ranks"]
    restarts = values.get("--max_restarts", environment.get("MINDGRPO_MAX_RESTARTS") or "0")
    if not _is_whole(ranks) or ranks == "0":
        raise UserError(f"--ranks {ranks} is not a positive whole number ({USAGE}).")
    if not _is_whole(restarts):
        raise UserError(f"--max_restarts {restarts} is not a whole number ({USAGE}).")
    if not os.path.isfile(command[0]):
        raise UserError(
            f"there is no program {command[0]}: give the path of a Python file ({USAGE})."
        )
    hosts = _read_hosts(values, int(ranks))
    if hosts.num_hosts > 1:
        _check_several_hosts(hosts, restarts, environment)
    return Options(
        int(ranks),
        command,
        hosts,
        int(restarts),
        port=_read_port(environment.get("MINDGRPO_PORT", "")),
        log_folder=environment.get("MINDGRPO_LOG_DIR") or Options.log_folder,
        stop_seconds=_read_stop_seconds(environment.get("MINDGRPO_STOP_SECONDS") or STOP_SECONDS),
    )


def _read_hosts(values: Mapping[str, str], num_ranks: int) -> Hosts:
    hosts, index = values.get("--hosts", "1"), values.get("--host_index", "0")
    if not _is_whole(hosts) or hosts == "0":
        raise UserError(f"--hosts {hosts} is not a positive whole number ({USAGE}).")
    if not _is_whole(index) or int(index) >= int(hosts):
        raise UserError(
            f"--host_index {index} is none of {hosts} hosts: give 0 on the first, {int(hosts) - 1} on the last."
        )
    if num_ranks % int(hosts):
        raise UserError(
            f"{num_ranks} ranks cannot be shared by {hosts} hosts: hosts have equally many; change --ranks or --hosts."
        )
    if hosts == "1":
        return Hosts()
    master = values.get("--master", "")
    address, _, port = master.rpartition(":")
    if not (address and _is_whole(port) and 1024 <= int(port) < 65535):
        raise UserError(
            f"--master '{master}' is not ADDRESS:PORT: give the first host's address and a port from 1024 to 65534 "
            "that is free there, and the one after it too."
        )
    return Hosts(int(hosts), int(index), (address, int(port)))


def _check_several_hosts(hosts: Hosts, restarts: str, environment: Mapping[str, str]) -> None:
    length = len(environment.get("MINDGRPO_JOB_TOKEN", ""))
    if length < MIN_TOKEN_LENGTH:
        raise UserError(
            f"MINDGRPO_JOB_TOKEN has {length} characters, but the ranks of several hosts know each other by a secret "
            f"of at least {MIN_TOKEN_LENGTH}: set the same on every host, such as from 'openssl rand -hex 16'."
        )
    if restarts != "0":
        raise UserError(
            f"--max_restarts {restarts} is for one host: leave it out, and start all {hosts.num_hosts} hosts again "
            "with --resume_training true."
        )


def _read_port(text: str) -> int | None:
    if text and not (_is_whole(text) and 1024 <= int(text) <= 65535):
        raise UserError(
            f"MINDGRPO_PORT={text} is not a port from 1024 to 65535: set such a one or unset it."
        )
    return int(text) if text else None


def _read_stop_seconds(text: str) -> float:
    if not _is_whole(text) or text == "0":
        raise UserError(
            f"MINDGRPO_STOP_SECONDS is {text!r}, but must be a whole number above 0; correct or unset it in the "
            "environment."
        )
    return float(text)
