"""The scoring rank's side of its worker processes: starts them, asks them, and ends them.

A rank with compute threads must not fork, so it starts one supervisor process (supervisor.py), which forks
the workers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import Signature
from mindgrpo.rewards.outcome import EXIT, MEMORY, TIMEOUT, Failure
from mindgrpo.rewards.spec import Spec
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.worker import Order, Task

START = (
    "import sys; sys.path.insert(0, sys.argv[2]); "
    "from mindgrpo.rewards.workers.supervisor import main; main()"
)
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
# A worker scores beside a training that wants the cores: one compute thread, unless the user says otherwise.
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Tells the launcher that this process tidies up and ends by itself once its rank has ended.
ENDS_WITH_RANK_VARIABLE = "MINDGRPO_ENDS_WITH_RANK"
CLOSING_SECONDS = 10.0
# Importing may take so long, whatever the deadline of a sample.
START_SECONDS = 120.0
LONGEST_MESSAGE = 1 << 30


class WorkerEnded(Exception):
    """A worker has ended or was stopped before it was done; the argument is the Failure that says why."""

    @property
    def failure(self) -> Failure:
        return self.args[0]


class Worker:
    """A worker process as its rank sees it.

    One thread asks and waits without a limit; the rank's main thread calls `check`, which stops a worker that
    is late or too large, and so ends the wait.
    """

    def __init__(self, side: socket.socket, order: Order) -> None:
        self._socket, self._memory = side, order.memory
        self._connection = Connection(os.dup(side.fileno()))
        self._signature: Signature | None = None
        self._pid = 0
        self._late: tuple[float, Failure] | None = None  # from when on, while it is waited for
        self._stopped_for: Failure | None = None
        with suppress(OSError):  # it has ended already, which the first answer tells
            self._connection.send(order)

    def load(self) -> Signature:
        """Wait until the function is loaded. Raises UserError if it cannot be, and WorkerEnded."""
        if self._signature is None:
            self._expect(START_SECONDS, "")
            message = self._receive()
            if "refused" in message:
                raise UserError(str(message["refused"]))
            fields = message["signature"]
            names = fields.pop("names")
            self._signature = Signature(None if names is None else tuple(names), **fields)
            self._pid = message["pid"]
            self._late = None
        return self._signature

    def ask(self, task: Task, seconds: float, hint: str) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it is done. Raises WorkerEnded, after `seconds` with `hint`."""
        self._expect(seconds, hint)
        with suppress(OSError):
            self._connection.send(task)
        while "done" not in (message := self._receive()):
            yield message
        self._late = None

    def _expect(self, seconds: float, hint: str) -> None:
        failure = Failure(TIMEOUT, f"no answer within {seconds:g} s{hint}")
        self._late = time.monotonic() + seconds, failure

    def _receive(self) -> dict[str, Any]:
        message: Any = None
        with suppress(EOFError, OSError, ValueError):
            message = json.loads(self._connection.recv_bytes(LONGEST_MESSAGE))
        if not isinstance(message, dict):
            message = {"ended": "ended"}
        if "ended" in message:
            failure = Failure(EXIT, f"its process {message['ended']}")
            raise WorkerEnded(self._stopped_for or failure)
        return message

    def has_ended(self) -> bool:
        """Of a worker that is loaded and not asked anything: then only its end makes it speak."""
        return self._signature is not None and self._connection.poll()

    def check(self, now: float) -> None:
        """Stop it if it is late at `now`, in time.monotonic()'s seconds, or holds too much memory."""
        late = self._late
        if late is None or self._stopped_for is not None:
            return
        if now > late[0]:
            self.stop(late[1])
        elif self._pid and processes.memory_of(self._pid) > self._memory:
            limit = f"more than reward_config.memory, {self._memory >> 20} MiB"
            self.stop(Failure(MEMORY, limit))

    def stop(self, reason: Failure | None = None) -> None:
        """Have it killed, and end a wait for it."""
        self._stopped_for = reason
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.stop(self._stopped_for)
        self._connection.close()
        self._socket.close()


class WorkerPool:
    """Starts its supervisor at the first worker, and again if it was killed. `memory` is each worker's, in bytes."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # every executor's thread starts workers

    def start(self, spec: Spec, output: int) -> Worker:
        """Start a worker, which prints to the descriptor `output`, without waiting for it."""
        side, theirs = socket.socketpair()
        with theirs, self._lock:
            self._request([theirs.fileno(), output])
        return Worker(side, Order(spec, [*sys.path], self._memory))

    def _request(self, descriptors: list[int]) -> None:
        if self._is_closed:
            raise RuntimeError("the pool of reward workers is closed")
        if self._requests is not None:
            with suppress(OSError):  # somebody has killed the supervisor, and its workers with it
                socket.send_fds(self._requests, [b"start"], descriptors)
                return
        self._end_supervisor()
        self._requests = self._start_supervisor()
        socket.send_fds(self._requests, [b"start"], descriptors)

    def _start_supervisor(self) -> socket.socket:
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict.fromkeys((*SINGLE_THREADED, ENDS_WITH_RANK_VARIABLE), "1")
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", START, str(theirs.fileno()), PACKAGE_PARENT],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **environment},
                start_new_session=True,
            )
        return requests

    def _end_supervisor(self) -> None:
        if self._requests is not None:
            self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
        if self._supervisor is not None:
            try:
                self._supervisor.wait(CLOSING_SECONDS)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        self._requests = self._supervisor = None

    def close(self) -> None:
        """End every worker and what they started; return when that is done."""
        with self._lock:
            self._is_closed = True
            self._end_supervisor()
