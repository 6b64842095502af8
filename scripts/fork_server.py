"""Checks what a job is given, imports what ranks need, and forks the ranks: fork_server.py NAME RANKS [ARGUMENTS].

Importing takes seconds of a core and is the same in every rank. The check runs in a process of its own beside the
imports, so that a user's code leaves nothing behind in what the ranks are forked from; its status goes to standard
output. Refuses to fork what cannot be forked safely (another thread runs, a device's driver may be loaded): the
workers then find nobody and run their rank themselves.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import worker

LAUNCHER_CHECK_SECONDS = 0.5
# What MindSpore imports when it compiles for the first time.
FIRST_COMPILE = ("asttokens.mark_tokens", "mindspore.graph._parse.compile_config")


def has_config(arguments: list[str]) -> bool:
    return any(word == "--config" or word.startswith("--config=") for word in arguments)


def start_check(ranks: str, arguments: list[str]) -> None:
    """Standard output belongs to the check from here on, and what it says is its status."""
    if not has_config(arguments):
        os.write(1, b"0\n")
    elif os.fork() == 0:
        verdict = os.dup(1)
        os.dup2(2, 1)  # what the user's code prints
        from mindgrpo.cli.verbs import main

        os.write(verdict, b"%d\n" % main(["check", "--ranks", ranks, *arguments]))
        os._exit(0)


def start_building() -> None:
    """The C kernels, where they are not there yet, beside the imports; whoever needs them waits for it."""
    if os.fork() == 0:
        from mindgrpo.backend.kernels.native.library import library_path

        library_path()
        os._exit(0)


def quietly() -> None:
    log = os.open(
        Path(os.environ["MINDGRPO_STATUS_DIR"]).parent / "fork_server.log",
        os.O_WRONLY | os.O_CREAT,
        0o644,
    )
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def import_for_ranks(arguments: list[str]) -> bool:
    """False where ranks must not be forked from what was imported."""
    for name in ("numpy", "scipy.linalg"):
        importlib.import_module(name)
    threads = (
        num_threads()
    )  # those of OpenBLAS, which it ends before a fork and starts again after it
    from mindgrpo import config
    from mindgrpo.backend import connect, targets
    from mindgrpo.errors import UserError

    target = None
    try:
        if has_config(arguments):
            given = config.load_config(*config.configuration_words(arguments))
            target = given.config.context.device_target
        if os.environ.get("MINDGRPO_FORK") == "0" or not targets.may_fork(target):
            return False
        connect.load(target)
    except UserError:
        return False  # the check tells
    for name in ("mindgrpo.trainer", *FIRST_COMPILE):
        importlib.import_module(name)
    importlib.import_module("mindgrpo.backend.kernels.native.library").library_path()
    return num_threads() == threads


class Server:
    """Forks `ranks` ranks, each for a worker that asks on `listener`, passes signals to it and its status back."""

    def __init__(self, listener: socket.socket, ranks: int) -> None:
        self._listener = listener
        self._awaited = ranks
        self._launcher = os.getppid()
        self._lines: dict[int, socket.socket] = {}  # by the rank's process id
        self._records: dict[int, Path] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._fork)
        self._wake, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes
        self._selector.register(self._wake, selectors.EVENT_READ, self._collect)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes.fileno())

    def serve(self) -> None:
        """Until every rank has been forked and has ended, or nobody is left who would ask for one."""
        while self._awaited or self._lines:
            for key, _ in self._selector.select(LAUNCHER_CHECK_SECONDS):
                key.data()
            if os.getppid() != self._launcher:
                self._end_all()
                return

    def _fork(self) -> None:
        line, _ = self._listener.accept()
        _, descriptors, _, _ = socket.recv_fds(line, 1, 3)
        with line.makefile("rb") as words:
            wish = json.loads(words.readline())
        self._awaited -= 1
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for held in (self._listener, self._wake, self._wakes, line, *self._lines.values()):
                held.close()
            self._selector.close()
            worker.end_with_parent(server)
            become(wish, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        line.sendall(b"\0")
        self._lines[pid] = line
        self._records[pid] = worker.record_of_rank(wish["environment"])
        self._selector.register(line, selectors.EVENT_READ, lambda: self._obey(pid))

    def _obey(self, pid: int) -> None:
        words = self._lines[pid].recv(64)
        for number in words.split() or [b"%d" % signal.SIGKILL]:  # nothing: its worker has ended
            os.kill(pid, int(number))
        if not words:
            self._selector.unregister(self._lines[pid])

    def _collect(self) -> None:
        self._wake.recv(64)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._lines:
                self._hand_on(pid, os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        """Nobody is left who would."""
        for pid in self._lines:
            os.kill(pid, signal.SIGKILL)
        importlib.import_module("mindgrpo.backend.cpu.host").remove_board(os.environ)

    def _hand_on(self, pid: int, status: int) -> None:
        line = self._lines.pop(pid)
        with suppress(OSError):
            worker.append(self._records.pop(pid), f"ended {status}")
        if line in self._selector.get_map():
            self._selector.unregister(line)
            line.sendall(b"%d\n" % status)
        line.close()


def become(wish: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """This process turns into the rank that a worker asked for."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    program, *arguments = wish["command"]
    record = worker.record_of_rank(os.environ)
    Path("/proc/self/comm").write_text(record.name)  # what top shows
    gc.unfreeze()
    worker.run_rank(program, arguments, record)


def main() -> None:
    name, ranks, *arguments = sys.argv[1:]
    here = int(os.environ.get("MINDGRPO_RANKS_PER_HOST", ranks))
    # The shell starts what runs beside it with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(here)
    start_check(ranks, arguments)
    quietly()
    start_building()
    if not import_for_ranks(arguments):
        return
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    Server(listener, here).serve()


if __name__ == "__main__":
    main()
