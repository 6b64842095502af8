"""Runs a program, or a verb, as one rank, and writes how it failed to the status folder: worker.py PROGRAM [ARGUMENTS].

Where there is a fork server, the rank (or msrun, or its scheduler) is forked there, which saves it the imports, and
this process represents it: passes signals on and ends as it ends. Else the program runs here. It sees what it sees
under `python PROGRAM ARGUMENTS`: arguments, `__main__`, `__file__` and the folder first on the import path. A rank ends
with the process that started it, however that ends.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import runpy
import select
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from mindgrpo.errors import UserError, escape_what_cannot_be_shown, print_user_error, show
from mindgrpo.launch.options import VERBS, set_for_rank
from mindgrpo.processes.job import STATUS_VARIABLE
from mindgrpo.processes.linux import STOPPING, end_with_parent

# Runs the verb that sys.argv begins with: one of these.
VERBS_THAT_RUN = (*VERBS, "check")
VERB_PROGRAM = "mindgrpo.cli.verbs"
PARENT_CHECK_SECONDS = 0.5
# How long a rank that failed waits for its threads: they may wait for a rank that is gone.
JOIN_SECONDS = 5.0
# Of a request for a fork.
NUM_DESCRIPTORS = 5
MSRUN = "msrun"
# In the status folder, before the rank.
FINISHED = "finished_"


def run(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    if program in VERBS_THAT_RUN:
        del sys.path[0]  # this folder: its modules must not replace the user's
        runpy.run_module(VERB_PROGRAM, run_name="__main__")
    else:
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


def print_ending(ending: BaseException) -> int:
    """Prints what Python prints when a program ends so, and of a UserError the sentence; returns its exit status."""
    if isinstance(ending, KeyboardInterrupt):
        return 130  # Ctrl-C is not a fault of the program
    if isinstance(ending, UserError):
        return print_user_error(ending)
    if not isinstance(ending, SystemExit):
        traceback.print_exception(ending)
        return 1
    if ending.code is None or isinstance(ending.code, int):
        return ending.code or 0
    print(ending.code, file=sys.stderr)
    return 1


def write_ending(folder: Path, rank: int, ending: BaseException, status: int) -> None:
    """Writes the failure for the others; rank 0, whose log is on the screen, also prints why it lost a peer."""
    # Only here: a rank that ends well has no use for it.
    from mindgrpo.health.failure import failure_of_exception, write_failure
    from mindgrpo.launch.exit_report import traceback_of_first_failure

    failure = failure_of_exception(folder, rank, ending, status)
    write_failure(folder, rank, failure)
    if failure.is_consequence and rank == 0:
        print(traceback_of_first_failure(folder), end="", file=sys.stderr, flush=True)


def run_to_end(program: str, arguments: list[str], is_rank: bool = True) -> NoReturn:
    """Runs the program to its end and the process with it; a rank's failure is written to the status folder."""
    status = 0
    escape_what_cannot_be_shown()
    try:
        run(program, arguments)
    except BaseException as ending:
        status = print_ending(ending)
        if status and is_rank:
            with suppress(Exception):
                write_ending(*status_of_rank(os.environ), ending, status)
    patience = time.monotonic() + JOIN_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, patience - time.monotonic()) if status else None)
    if is_rank and not status:
        with suppress(Exception):
            write_finished(*status_of_rank(os.environ))
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        show(stream, "")
    # Taking the interpreter and its libraries apart costs a rank some 0.3 s and changes nothing any more.
    os._exit(status & 0xFF)


def write_finished(folder: Path, rank: int) -> None:
    """Writes that a rank's program has ended well.

    MindSpore's cluster is taken apart after that, and was seen to crash while it was (a thread RECV_EVENT_LOOP reads a
    connection that is gone), which is no failure of the job.
    """
    (folder / f"{FINISHED}{rank}").touch()


def has_finished(folder: Path, rank: int) -> bool:
    return (folder / f"{FINISHED}{rank}").exists()


def status_of_rank(environment: Mapping[str, str]) -> tuple[Path, int]:
    """Returns the job's status folder, and the rank."""
    return Path(environment[STATUS_VARIABLE]), int(environment.get("RANK_ID", "0"))


def take_standard_input() -> socket.socket | None:
    """Takes the socket that the launcher gave as standard input, if it did, and puts /dev/null in its stead."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    taken = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return taken


def request_fork(
    channel: socket.socket,
    command: Sequence[str],
    environment: Mapping[str, str],
    is_rank: bool,
    streams: tuple[int, int, int] = (0, 1, 2),
) -> socket.socket:
    """Asks the fork server to run a command. Raises OSError if the server has ended.

    Returns a connection: it receives a 0 byte when the process is forked and then its status as a line, and nothing if
    the server ends. What is sent to it are numbers of signals; closing it ends the process. The request is one
    message, so that the server never waits for the rest of one: the standard streams, a file with what to run, and the
    server's end of the connection.
    """
    request = {
        "command": list(command),
        "environment": dict(environment),
        "folder": os.getcwd(),
        "is_rank": is_rank,
    }
    connection, servers_end = socket.socketpair()
    with servers_end, open(os.memfd_create("mindgrpo-request"), "w+") as file:
        json.dump(request, file)
        file.seek(0)
        socket.send_fds(channel, [b"\0"], [*streams, file.fileno(), servers_end.fileno()])
    return connection


def ask_for_fork(channel: socket.socket, command: list[str], is_rank: bool) -> socket.socket | None:
    """Returns the connection once the process is forked; None if the server has ended. Closes `channel`, which becomes
    the standard input of msrun and so of the workers that it starts."""
    standard_input = channel.fileno() if is_msrun(command[0]) else 0
    try:
        with channel:
            connection = request_fork(
                channel, command, os.environ, is_rank, streams=(standard_input, 1, 2)
            )
        return connection if connection.recv(1) else None
    except OSError:
        return None


def represent(connection: socket.socket, parent: int, is_scheduler: bool) -> NoReturn:
    """Waits for the forked process and ends as it did."""

    def pass_on(number: int, _: FrameType | None) -> None:
        with suppress(OSError):  # the rank has ended, and its status is still to be read
            connection.sendall(b"%d\n" % number)

    for number in STOPPING:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    while not select.select([connection], [], [], PARENT_CHECK_SECONDS)[0]:
        if os.getppid() != parent:
            os._exit(1)  # the server then kills the rank
    answer = connection.recv(16)
    if not answer:
        if not is_scheduler:
            write_loss_of_server(*status_of_rank(os.environ))
        sys.exit("mindgrpo: the process that forks the ranks has ended; fork_server.log says why.")
    status = int(answer)
    if status < 0:
        # The rank has left the core file, if there is to be one.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def write_loss_of_server(folder: Path, rank: int) -> None:
    from mindgrpo.health.failure import RankFailure, position_of, write_failure

    if (folder / "ending").exists():
        return  # the launcher ends all, the server first
    position, message = position_of(folder, rank), "the process that forks the ranks has ended"
    message += f"; rank {rank} was{position}" if position else ""
    remedy = "fork_server.log may say why"
    write_failure(folder, rank, RankFailure(None, time.time(), 1, message, remedy))


def is_msrun(program: str) -> bool:
    return Path(program).name == MSRUN


def is_python(program: str) -> bool:
    """Returns whether a script is Python's: pip writes another first line where Python's path is too long for one."""
    with open(program, "rb") as file:
        return b"python" in file.readline() or file.readline().startswith(b"'''exec' ")


def main() -> None:
    _, program, *arguments = sys.argv
    if is_msrun(program) and not is_python(program):
        os.execv(program, [program, *arguments])
    parent = os.getppid()
    channel = take_standard_input()
    is_scheduler = os.environ.get("MS_ROLE") == "MS_SCHED"
    is_rank = not is_scheduler and not is_msrun(program)
    if is_rank:
        set_for_rank(os.environ)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # who started this had to ignore them
        folder, rank = status_of_rank(os.environ)
        (folder / f"rank_{rank}").write_text(f"pid {os.getpid()}\n")
    # A signal that comes while the process is forked is for that one, and waits until it can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    connection = ask_for_fork(channel, [program, *arguments], is_rank) if channel else None
    if connection is not None:
        represent(connection, parent, is_scheduler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    end_with_parent(parent)
    run_to_end(program, arguments, is_rank)


if __name__ == "__main__":
    main()
