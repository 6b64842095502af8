"""A worker process as its rank sees it: started when it is needed, asked, and replaced when it has ended.

What is late or too large is ended by whoever asks.
"""

from __future__ import annotations

import fcntl
import io
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.processes.child import FunctionCall
from mindgrpo.processes.fork import Channel
from mindgrpo.processes.job import ENDS_WITH_RANK_VARIABLE
from mindgrpo.user_code import Kind
from mindgrpo.workers.protocol import (
    EXIT,
    MEMORY,
    TIMEOUT,
    CallFailure,
    Service,
    Task,
    from_message,
)
from mindgrpo.workers.worker import Order

# A worker computes beside a training that wants the cores: one compute thread, unless the user says otherwise.
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TICK_SECONDS = 0.05
# Importing may take so long, whatever the deadline of a task.
START_SECONDS = 120.0
CLOSING_SECONDS = 10.0
KEPT_OUTPUT, READ_BYTES, MOST_READS = 16 << 10, 1 << 20, 8
LONGEST_MESSAGE = 1 << 26


class WorkerEnded(Exception):
    """A worker has ended, or has to be, before it was done; `failure` says why."""

    def __init__(self, failure: CallFailure) -> None:
        self.failure = failure


class Worker:
    """Serves what `load`, which is pickled, returns; errors name it by `kind` and `text`, as the user wrote it.

    The process has `memory` bytes. It starts when it is first needed, and again where it has ended, which `restarts`
    counts. All calls but `close` are one thread's.
    """

    def __init__(self, load: Callable[[], Service], kind: Kind, text: str, memory: int) -> None:
        self._order, self._kind = Order(load, f"{kind.what} {text!r}", [*sys.path], memory), kind
        self._output = Output()
        self._process: SupervisedWorker | None = None
        self._lock, self._is_closed = threading.Lock(), False
        self.restarts = 0

    @property
    def is_running(self) -> bool:
        """Returns whether it is not known to have ended: of one that is asked something, `collect` tells."""
        process = self._process
        return process is not None and (process.is_asked or not process.has_ended())

    def start(self) -> SupervisedWorker:
        """Starts the process where there is none, and does not wait until the user's code is loaded."""
        if self._process is not None and not self.is_running:
            self._drop()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the worker is closed")
            if self._process is None:
                self._process = SupervisedWorker(self._order, self._output)
            return self._process

    def load(self) -> Any:
        """Waits until the user's code is loaded; returns its description. Raises UserError where it cannot be."""
        return self._loaded_process().loaded()["loaded"]

    def threads(self) -> list[str]:
        """Returns the names of the threads that loading the user's code has started. Raises UserError."""
        return list(self._loaded_process().loaded()["threads"])

    def _loaded_process(self) -> SupervisedWorker:
        process = self.start()
        try:
            process.loaded()
            return process
        except WorkerEnded as ended:
            self._drop()
            printed = self.take_output()[0].strip().splitlines()
            why = f" ({printed[-1].strip()})" if printed else ""
            raise UserError(
                f"{self._order.what}: {ended.failure.message} while loading it{why}; correct the module or "
                f"{self._kind.key}"
            ) from None
        except UserError:
            self._drop()
            raise

    def ask(
        self,
        tasks: Sequence[Task],
        deadline: float,
        seconds: float,
        record: Callable[[int, Any], None],
        hint: str = "",
        each: bool = False,
    ) -> CallFailure | None:
        """Calls `record` with the index of each task and its answer, JSON or a CallFailure, as they come.

        A task in a session may take `deadline` seconds, all together `seconds` (with `each`: that long without an
        answer). Returns None, or why not all were answered; then the process is ended. A `record` that raises
        KeyError, IndexError, TypeError or ValueError has refused an answer. Raises UserError where the user's code
        cannot be loaded.
        """
        self.begin(dict(enumerate(tasks)), deadline, seconds)
        return self.collect(seconds, lambda n, answer, _: record(n, answer), hint, each)

    def begin(self, tasks: Mapping[int, Task], deadline: float, seconds: float) -> None:
        """Asks tasks by numbers that no unanswered task has, beside those that are still to be answered.

        A task in a session may take `deadline` seconds, from when its process gets it; the worker has `seconds` to take
        the tasks in. Raises UserError where the user's code cannot be loaded.
        """
        self._loaded_process().ask(tasks, deadline, seconds)

    def collect(
        self,
        seconds: float,
        record: Callable[[int, Any, float], None],
        hint: str = "",
        each: bool = True,
        until: Callable[[], float] = lambda: math.inf,
    ) -> CallFailure | None:
        """Calls `record`, which may begin further tasks, with each task's number, its answer and when it was answered.

        Returns None when all are answered, or at `until()`, asked after every answer; times are of time.monotonic. Else
        returns why the others have none, as `ask` does, after `seconds` (with `each`: without an answer) at the latest.
        """
        process = self._process
        if process is None:
            return CallFailure(EXIT, "its process ended")
        try:
            late = time.monotonic() + seconds
            while process.is_asked:
                enough = until()
                message = process.message(min(late, enough))
                if message is None and enough < late:
                    return None
                if message is None:
                    raise WorkerEnded(CallFailure(TIMEOUT, f"no answer within {seconds:g} s{hint}"))
                if process.takes_answer(message):
                    record(message["index"], from_message(message), float(message["at"]))
                if each:
                    late = time.monotonic() + seconds
            return None
        except WorkerEnded as ended:
            failure = ended.failure
        except (KeyError, IndexError, TypeError, ValueError):
            failure = CallFailure(EXIT, "its process wrote to the rank what is not an answer")
        self._drop()
        return failure

    def take_output(self) -> tuple[str, int]:
        """Returns the first 16 KiB of what was printed since the last call, and how many bytes it was."""
        return self._output.take()

    def _drop(self) -> None:
        self.restarts += 1
        self.stop()

    def stop(self) -> None:
        """Ends the process and whatever it started; a later task starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def close(self) -> None:
        """Ends the process and whatever it started, for good; from any thread."""
        with self._lock:
            self._is_closed = True
        self.stop()
        self._output.close()


class SupervisedWorker:
    """A worker process and its supervisor. What it prints is read into `output` while it is waited for."""

    def __init__(self, order: Order, output: Output) -> None:
        self._output = output
        self._loaded: dict[str, Any] = {}
        self._unanswered, self._num_asked, self.is_asked = set[int](), 0, False
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours, LONGEST_MESSAGE)
        descriptors = {"channel": theirs.fileno(), "output": output.write_end.fileno()}
        environment = dict.fromkeys((*SINGLE_THREADED, ENDS_WITH_RANK_VARIABLE), "1")
        with theirs:
            # It outlives the rank for a moment, to kill what the worker has started.
            self._supervisor = FunctionCall(
                "mindgrpo.workers.worker:supervise",
                {**descriptors, "memory": order.memory},
                {**os.environ, **environment},
                ends_with_this=False,
                stdout=None,
                stderr=None,
                pass_fds=tuple(descriptors.values()),
            )
        self._channel.send(order, START_SECONDS)

    def loaded(self) -> dict[str, Any]:
        """Waits until the user's code is loaded; returns its description as `loaded`, and `threads` that run since.

        Raises UserError where it refuses to be loaded, and WorkerEnded.
        """
        if not self._loaded:
            message = self.message(time.monotonic() + START_SECONDS)
            if message is None:
                why = f"no answer within {START_SECONDS:g} s"
                raise WorkerEnded(CallFailure(TIMEOUT, why))
            if "refused" in message:
                raise UserError(str(message["refused"]))
            self._loaded = message
        return self._loaded

    def ask(self, tasks: Mapping[int, Task], deadline: float, seconds: float) -> None:
        self._unanswered |= tasks.keys()
        self._num_asked, self.is_asked = self._num_asked + 1, True
        self._channel.send((dict(tasks), deadline), seconds)

    def takes_answer(self, message: Mapping[str, Any]) -> bool:
        """Returns whether a message answers a task, else it is of the end of some. Raises as Worker.collect has it."""
        if "done" not in message:
            self._unanswered.remove(message["index"])
            return True
        if message["done"] == self._num_asked:
            if self._unanswered:
                raise WorkerEnded(CallFailure(EXIT, "its process left out answers"))
            self.is_asked = False
        return False

    def message(self, late: float) -> dict[str, Any] | None:
        """Waits for a message, until `late` (of time.monotonic); returns None if there is none. Raises WorkerEnded."""
        left = 0.0
        while (message := self._next()) is None:
            if left < 0:
                return None
            left = late - time.monotonic()
            self._output.wait_with(self._channel.connection, min(TICK_SECONDS, max(0.0, left)))
            if not self._channel.read():
                raise WorkerEnded(CallFailure(EXIT, "its process ended"))
        if "ended" in message:
            kind = MEMORY if message.get("kind") == MEMORY else EXIT
            raise WorkerEnded(CallFailure(kind, str(message["ended"])))
        return message

    def _next(self) -> dict[str, Any] | None:
        try:
            return self._channel.take()
        except ValueError:
            raise WorkerEnded(CallFailure(EXIT, "its process ended")) from None

    def has_ended(self) -> bool:
        """Returns whether a worker that is loaded and not asked anything has ended: only its end is readable then."""
        return bool(self._loaded) and bool(wait([self._channel.connection], 0))

    def close(self) -> None:
        """Ends a wait for it, and has it killed with whatever it started; returns when that is done."""
        with suppress(OSError):
            self._channel.connection.shutdown(socket.SHUT_RDWR)
        self._supervisor.end(CLOSING_SECONDS)
        self._channel.close()


class Output:
    """A pipe that workers print to: the first bytes are kept, all are counted.

    It is read while they are waited for only, so that what prints without end waits, and fills nobody's memory.
    """

    def __init__(self) -> None:
        read_end, write_end = os.pipe()
        # As files: a closed one is an error, where its number may be another's.
        self._read_end, self.write_end = io.FileIO(read_end), io.FileIO(write_end, "w")
        os.set_blocking(read_end, False)
        with suppress(OSError):  # a user may have few large pipes
            fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, READ_BYTES)
        self._kept, self._num_bytes = b"", 0

    def wait_with(self, channel: socket.socket, seconds: float) -> None:
        """Waits for what is printed or comes on `channel`, and takes what is printed."""
        wait([channel, self._read_end.fileno()], seconds)
        self._collect()

    def _collect(self) -> None:
        for _ in range(MOST_READS):
            chunk = self._read_end.read(READ_BYTES) or b""
            if not chunk:
                return
            self._num_bytes += len(chunk)
            self._kept += chunk[: KEPT_OUTPUT - len(self._kept)]

    def take(self) -> tuple[str, int]:
        """Returns the kept text and the number of bytes since the last call."""
        self._collect()
        text, num_bytes = self._kept.decode("utf-8", "replace"), self._num_bytes
        self._kept, self._num_bytes = b"", 0
        return text, num_bytes

    def close(self) -> None:
        self._read_end.close()
        self.write_end.close()
