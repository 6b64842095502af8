"""Imports what ranks need and forks the ranks: fork_server.py NUM_PROCESSES [ARGUMENTS].

Importing takes seconds of a core and is the same in every rank, in msrun, its scheduler and the check before them.
Standard input is the socket on which these processes are asked for (see worker.request_fork). Where ranks cannot be
forked safely (another thread runs, a device's driver may be loaded) this process ends, and whoever asks runs the
program itself.
"""

from __future__ import annotations

import gc
import importlib
import io
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.health.failure import failure_of_code, write_failure
from mindgrpo.launch import worker
from mindgrpo.launch.plan import has_config
from mindgrpo.processes.child import describe_code
from mindgrpo.processes.fork import fork
from mindgrpo.processes.job import remove_shared_files
from mindgrpo.processes.linux import set_parent_death_signal

PARENT_CHECK_SECONDS = 0.5
# Imported when a rank renders its first prompt.
FIRST_RENDERING = "transformers.utils.chat_template_utils"
# What MindSpore imports when it compiles for the first time.
FIRST_COMPILE = (
    "asttokens.mark_tokens",
    "mindspore.graph._parse.compile_config",
    "mindspore.ops._grad_experimental",
    "mindspore.ops.tensor_method",
)


def build_kernels() -> None:
    importlib.import_module("mindgrpo.backend.kernels.native.library").library_path()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def import_for_ranks(arguments: list[str]) -> bool:
    """Returns False where ranks must not be forked from what was imported."""
    for name in ("numpy", "scipy.linalg"):
        importlib.import_module(name)
    # Those of OpenBLAS, which it ends before a fork and starts again after it.
    threads = num_threads()
    from mindgrpo import config
    from mindgrpo.backend import connect, targets
    from mindgrpo.errors import UserError

    try:
        target = targets.choose_target(None, None)
        if has_config(arguments):
            loaded = config.load_config(*config.configuration_words(arguments))
            target = loaded.config.context.target
        if not target.may_fork:
            return False
        connect.load(target)
    except UserError:
        return False  # the launcher's check prints it
    for name in ("mindgrpo.trainer", FIRST_RENDERING, *FIRST_COMPILE):
        importlib.import_module(name)
    build_kernels()
    return num_threads() == threads


class ForkServer:
    """Forks `num_processes`, each for a process that asks on `channel`, passes on signals to it and its status.

    Nothing here waits for one that asks, and none that has ended ends the others' processes, which end with this one.
    """

    def __init__(self, channel: socket.socket, num_processes: int, launcher: int) -> None:
        self._channel = channel
        self._num_awaited = num_processes
        self._launcher = launcher
        # By the forked process id: who asked, and of a rank the status folder and the rank.
        self._workers: dict[int, tuple[socket.socket, tuple[Path, int] | None]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._fork)

    def serve(self) -> None:
        """Serves until every process has been forked and has ended, or the launcher has."""
        while self._num_awaited or self._workers:
            for key, _ in self._selector.select(PARENT_CHECK_SECONDS):
                key.data()
            if os.getppid() != self._launcher:
                for pid in self._workers:
                    os.kill(pid, signal.SIGKILL)
                remove_shared_files(os.environ["MINDGRPO_JOB"])
                return

    def _fork(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._channel, 1, worker.NUM_DESCRIPTORS)
        # None: every process that could ask has ended.
        self._num_awaited = self._num_awaited - 1 if descriptors else 0
        if not self._num_awaited:
            self._selector.unregister(self._channel)
            self._channel.close()
        if not descriptors:
            return
        *standard, request_file, connections = descriptors
        connection = socket.socket(fileno=connections)
        with open(request_file) as file:
            request = json.load(file)
        opened = [key.fileobj for key in self._selector.get_map().values()]
        closing: list[Any] = [self._channel, self._selector, connection, *opened]
        pid = fork(lambda: become_process(request, standard), closing)
        for descriptor in standard:
            os.close(descriptor)
        with suppress(OSError):  # here and below: the worker may have ended
            connection.sendall(b"\0")
        of_rank = worker.status_of_rank(request["environment"]) if request["is_rank"] else None
        self._workers[pid] = (connection, of_rank)
        process = io.FileIO(os.pidfd_open(pid))
        self._selector.register(process, selectors.EVENT_READ, lambda: self._end(pid, process))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._pass_on(pid))

    def _pass_on(self, pid: int) -> None:
        if pid not in self._workers:
            return  # collected since `select` returned
        connection, received = self._workers[pid][0], b""
        with suppress(OSError):
            received = connection.recv(64)
        for number in received.split() or [b"%d" % signal.SIGKILL]:  # nothing: its worker has ended
            os.kill(pid, int(number))
        if not received:
            self._selector.unregister(connection)

    def _end(self, pid: int, process: io.FileIO) -> None:
        self._selector.unregister(process)
        process.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection, of_rank = self._workers.pop(pid)
        if code and of_rank is not None and not (of_rank[0] / "ending").exists():
            if worker.has_finished(*of_rank):
                print(f"rank {of_rank[1]} {describe_code(code)} after it had finished", flush=True)
                code = 0
            else:
                write_failure(*of_rank, failure_of_code(*of_rank, code, time.time()))
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        with connection, suppress(OSError):
            connection.sendall(b"%d\n" % code)


def become_process(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turns this process, just forked, into the rank, or the other process, that was asked for."""
    if not request["is_rank"]:  # as launcher.start_process has it
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    program, *arguments = request["command"]
    name = Path(program).name
    if request["is_rank"]:
        _, rank = worker.status_of_rank(os.environ)
        name = f"rank_{rank}"
    Path("/proc/self/comm").write_text(name)  # what top shows
    worker.run_to_end(program, arguments, request["is_rank"])


def main() -> None:
    _, num_processes, *arguments = sys.argv
    launcher = os.getppid()
    channel = worker.take_standard_input()
    if channel is None:
        return
    # Beside the imports; who needs them waits for it.
    builder = fork(build_kernels, [channel])
    gc.disable()
    may_fork = import_for_ranks(arguments)
    if not may_fork:
        channel.close()
    os.waitpid(builder, 0)
    if not may_fork:
        return
    # From here on it looks for itself: who is killed with the launcher cannot tidy up.
    set_parent_death_signal(0)
    # What was imported stays: a rank that compiles has all garbage collected, each time, and leaves it out.
    gc.freeze()
    gc.enable()
    ForkServer(channel, int(num_processes), launcher).serve()


if __name__ == "__main__":
    main()
