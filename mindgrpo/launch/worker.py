"""Runs a program as one rank and writes down how it ended, for launch.sh.

Where launch.sh has started fork_server.py, the rank is forked there, which saves it the imports, and this process
stands in for it: passes signals on and ends as it ends. Else the program runs here. Refuses to change what the
program sees: its arguments, `__main__`, `__file__` and the folder first on the import path are those of
`python PROGRAM ARGUMENTS`. A rank ends with the process that started it, however that ends.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

LAUNCHER_CHECK_SECONDS = 0.5
# What a rank that failed waits for its threads: they may wait for a rank that is gone.
JOIN_SECONDS = 5.0
USERS_ERROR = 2
PR_SET_PDEATHSIG = 1


def exit_status(ending: BaseException) -> int:
    if isinstance(ending, KeyboardInterrupt):
        return 130
    if not isinstance(ending, SystemExit):
        return 1
    if ending.code is None:
        return 0
    # What is not a number is a message, and Python ends with 1 after printing it.
    return ending.code if isinstance(ending.code, int) else 1


def run(program: str, arguments: list[str]) -> None:
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def tell(ending: BaseException) -> None:
    """Prints what Python prints when a program ends so."""
    if not isinstance(ending, SystemExit):
        traceback.print_exception(ending)
    elif not (ending.code is None or isinstance(ending.code, int)):
        print(ending.code, file=sys.stderr)


def write_down(ending: BaseException, record: Path) -> None:
    """The failure, for the launcher and the other ranks; rank 0 also shows whose it follows from."""
    # Only here: a rank that works has no use for it.
    from mindgrpo.health import exit_report as verdict
    from mindgrpo.health import failure

    folder, rank = record.parent, int(record.name.rpartition("_")[2])
    failed = failure.of_exception(rank, ending)
    failure.write(folder, failed)
    if failed.is_consequence and rank == 0:
        print(verdict.traceback_of_cause(folder), end="", file=sys.stderr, flush=True)


def run_rank(program: str, arguments: list[str], record: Path) -> NoReturn:
    """Runs the program to its end and the process with it; `record` gets the status."""
    status = 0
    try:
        run(program, arguments)
    except BaseException as ending:
        tell(ending)
        status = exit_status(ending)
        if status not in (0, USERS_ERROR):
            with suppress(Exception):
                write_down(ending, record)
    append(record, f"status {status}")
    patience = time.monotonic() + JOIN_SECONDS
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(max(0.0, patience - time.monotonic()) if status else None)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking the interpreter and its libraries apart costs a rank some 0.3 s and changes nothing any more.
    os._exit(status & 0xFF)


def append(record: Path, words: str) -> None:
    """One line with the time, seconds since the epoch."""
    with record.open("a") as lines:
        lines.write(f"{words} {time.time():.6f}\n")


def end_with_parent(parent: int) -> None:
    """This process is killed when `parent`, which started it, ends; at once if it has ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def record_of_rank(environment: Mapping[str, str]) -> Path:
    folder = Path(environment["MINDGRPO_STATUS_DIR"])
    return folder / f"rank_{environment.get('RANK_ID', '0')}"


def ask_for_fork(name: str, command: list[str]) -> socket.socket | None:
    """The line to the server that has forked the rank; None where no server of this user does."""
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(f"\0{name}")
        peer = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if int.from_bytes(peer[4:8], sys.byteorder) != os.getuid():
            return None
        wish = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
        socket.send_fds(line, [b"\0"], [0, 1, 2])
        line.sendall(json.dumps(wish).encode() + b"\n")
        return line if line.recv(1) else None
    except OSError:
        return None


def stand_in(line: socket.socket, launcher: int, record: Path) -> NoReturn:
    """Waits for the forked rank and ends as it did."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: line.sendall(b"%d\n" % number))
    while not select.select([line], [], [], LAUNCHER_CHECK_SECONDS)[0]:
        if os.getppid() != launcher:
            os._exit(1)  # the server then kills the rank
    told = line.recv(16)
    if not told:
        if not (record.parent / "ending").exists():  # else the launcher ends all, the server first
            append(record, "orphaned")
        sys.exit("mindgrpo: the process that forks the ranks has ended; fork_server.log says why.")
    status = int(told)
    if status < 0:
        # The rank has left the core file, if there is to be one.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def main() -> None:
    _, program, *arguments = sys.argv
    launcher = os.getppid()
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        end_with_parent(launcher)
        run(program, arguments)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # msrun was told to ignore them
    record = record_of_rank(os.environ)
    record.write_text(f"pid {os.getpid()}\n")
    server = os.environ.get("MINDGRPO_FORK_SERVER")
    line = ask_for_fork(server, [program, *arguments]) if server else None
    if line is not None:
        stand_in(line, launcher, record)
    end_with_parent(launcher)
    run_rank(program, arguments, record)


if __name__ == "__main__":
    main()
