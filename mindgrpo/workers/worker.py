"""A worker process, which loads what users wrote and calls it as its rank asks, and its supervisor.

The supervisor is a fresh Python that forks the worker, which a rank with compute threads cannot. It ends the worker
with the rank, or when it uses too much memory, and whatever a worker leaves behind. The rank watches deadlines. What
the rank sends is pickled; what it is sent are lines of JSON, because a process that somebody's code has wrecked may
have written them.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from mindgrpo.errors import UserError
from mindgrpo.processes.fork import AnsweringChannel, end_forked, fork
from mindgrpo.processes.linux import (
    STOPPING,
    adopt_orphans,
    kill_children,
    leave_no_core,
    limit_reserved,
    memory_of,
)
from mindgrpo.user_code import describe
from mindgrpo.workers.forked import ForkedProcesses, running_threads, too_much_memory
from mindgrpo.workers.protocol import EXIT, MEMORY, CallFailure, Service, Task, to_message

MEMORY_CHECK_MILLISECONDS = 50
ORPHAN_CHECK_SECONDS = 2.0


@dataclass(frozen=True)
class Order:
    """Starts a worker: what loads the user's code, its name, where modules are searched, and bytes of memory."""

    load: Callable[[], Service]
    what: str
    search_path: list[str]
    memory: int


def supervise(channel: int, output: int, memory: int) -> None:
    """Supervises a worker, which may use `memory` bytes: the others are descriptors of its socket to the rank and of
    the pipe that it prints to.

    The last line on the socket is {"ended": how, "kind": EXIT or MEMORY}, in one with what the worker wrote when it
    died, if it did.
    """
    rank, connection, kind = os.getppid(), socket.socket(fileno=channel), EXIT
    # Ctrl-C and a launcher's goodbye are the rank's to obey; this ends when the rank does.
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)
    adopt_orphans()
    worker = fork(lambda: run_worker(connection, output))
    events = select.poll()
    events.register(connection, 0)  # its end only: what comes in is for the worker
    events.register(os.pidfd_open(worker), select.POLLIN)
    checked = time.monotonic()
    while not events.poll(MEMORY_CHECK_MILLISECONDS) and os.getppid() == rank:
        if memory_of(worker) > memory:
            kind = MEMORY
            break
        if time.monotonic() - checked > ORPHAN_CHECK_SECONDS:
            kill_children(spared=worker)
            checked = time.monotonic()
    how = f"its process {end_forked(worker)}"
    ended = {"ended": too_much_memory(memory) if kind == MEMORY else how, "kind": kind}
    connection.setblocking(False)
    with suppress(OSError):
        connection.sendall(json.dumps(ended).encode() + b"\n")
    while kill_children():
        pass


def run_worker(connection: socket.socket, output: int) -> NoReturn:
    """Serves on `connection`, prints to the descriptor `output`, and ends the process."""
    status = 0
    try:
        sys.stdout, sys.stderr = (printing_to(descriptor, output) for descriptor in (1, 2))
        leave_no_core()
        serve(connection)
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        print(describe(error), file=sys.stderr)
        status = 1
    finally:
        # The user's exit handlers are not waited for.
        os._exit(status)


def printing_to(descriptor: int, target: int) -> io.TextIOWrapper:
    """Prints by lines, so that what was printed before a function hung is there to be read."""
    os.dup2(target, descriptor)
    raw = io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True)


def answered(index: int, answer: Any) -> dict[str, Any]:
    return {"index": index, "at": time.monotonic(), **to_message(answer)}


def serve(connection: socket.socket) -> None:
    channel = AnsweringChannel(connection)
    send = channel.send

    def report(index: int, answer: Any) -> None:
        # The rank takes answers when it has time, and the deadlines of other tasks do not wait for that.
        channel.post(answered(index, answer))

    order: Order = channel.receive()
    sys.path[:] = order.search_path
    limit_reserved(order.memory)
    try:
        service = order.load()
    except UserError as error:
        return send({"refused": str(error)})
    except BaseException as error:
        return send({"refused": f"{order.what}: {describe(error)}"})
    if memory_of(os.getpid()) > order.memory:
        used = too_much_memory(order.memory)
        return send({"refused": f"{order.what}: loading it takes {used}; raise it"})
    send({"loaded": service.description, "threads": running_threads()})
    forked = ForkedProcesses(service.answer, report, order.memory)
    num_asked, is_told = 0, True
    while True:
        if not (is_told or forked.is_busy):
            # By a number: the rank may ask more before it has read this.
            channel.post({"done": num_asked})
            is_told = True
        if not (channel.has_received() or forked.advance(channel)):
            continue
        asked: Mapping[int, Task]
        asked, deadline = channel.receive()
        num_asked, is_told = num_asked + 1, False
        for index, task in asked.items():
            if task.session is None:
                answer = service.answer(task.content)
                if memory_of(os.getpid()) > order.memory:
                    answer = CallFailure(MEMORY, too_much_memory(order.memory))
                send(answered(index, answer))
                if isinstance(answer, CallFailure) and answer.kind == MEMORY:
                    return  # what is left of this process is not fit to be asked more
        forked.add({i: task for i, task in asked.items() if task.session is not None}, deadline)
