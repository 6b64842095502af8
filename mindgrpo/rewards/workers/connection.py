"""A worker process as its rank sees it: what it is sent and answers, and what it prints.

What is late or too large is ended by whoever asks.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.health.processes import ENDS_WITH_RANK_VARIABLE
from mindgrpo.rewards.call import Signature
from mindgrpo.rewards.outcome import EXIT, MEMORY, TIMEOUT, Failure
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.worker import Host, Order, Served
from mindgrpo.user_code import Kind

START = (
    "import sys; sys.path.insert(0, sys.argv[3]); "
    "from mindgrpo.rewards.workers.worker import main; main()"
)
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
# A worker scores beside a training that wants the cores: one compute thread, unless the user says otherwise.
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TICK_SECONDS = 0.05
# Importing may take so long, whatever the deadline of a sample.
START_SECONDS = 120.0
CLOSING_SECONDS = 10.0
KEPT_OUTPUT, READ_BYTES, MOST_READS = 16 << 10, 1 << 20, 8
LONGEST_MESSAGE = 1 << 26


class WorkerEnded(Exception):
    """A worker has ended, or has to be, before it was done; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Worker:
    """A worker process as its rank sees it. What it prints is read into `output` while it is waited for."""

    def __init__(
        self, load: Callable[[], Served | Host], kind: Kind, text: str, memory: int, output: Output
    ) -> None:
        self._kind, self._what = kind, f"{kind.what} {text!r}"
        self._memory, self._output = memory, output
        self._signature: Signature | None = None
        self._pid, self._unread = 0, b""
        self._socket, theirs = socket.socketpair()
        descriptors = theirs.fileno(), output.write_end
        environment = dict.fromkeys((*SINGLE_THREADED, ENDS_WITH_RANK_VARIABLE), "1")
        with theirs:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-c", START, *map(str, descriptors), PACKAGE_PARENT],
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._send(Order(load, self._what, [*sys.path], memory), START_SECONDS)

    def load(self) -> Signature:
        """Wait until the function is loaded. Raises UserError if it cannot be."""
        if self._signature is None:
            try:
                message = next(self._messages(START_SECONDS, ""))
            except WorkerEnded as ended:
                printed = self._output.take()[0].strip().splitlines()
                why = f" ({printed[-1].strip()})" if printed else ""
                raise UserError(
                    f"{self._what}: {ended.failure.message} while loading it{why}; correct the module or "
                    f"{self._kind.key}"
                ) from None
            if "refused" in message:
                raise UserError(str(message["refused"]))
            self._signature = Signature(**message["signature"])
            self._pid = message["pid"]
        return self._signature

    def ask(
        self, task: Any, seconds: float, hint: str, each: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it is done.

        Raises WorkerEnded after `seconds` (with `each`, so long without a message), with `hint`.
        """
        self._send(task, seconds)
        for message in self._messages(seconds, hint, each):
            if "done" in message:
                return
            yield message

    def _send(self, content: Any, seconds: float) -> None:
        self._socket.settimeout(seconds)
        with suppress(OSError):  # it has ended already, which the first answer tells
            self._socket.sendall(pickle.dumps(content))
        self._socket.setblocking(False)

    def _messages(self, seconds: float, hint: str, each: bool = False) -> Iterator[dict[str, Any]]:
        late = time.monotonic() + seconds
        while True:
            while b"\n" not in self._unread:
                if time.monotonic() > late:
                    raise WorkerEnded(Failure(TIMEOUT, f"no answer within {seconds:g} s{hint}"))
                self._read()
            line, _, self._unread = self._unread.partition(b"\n")
            try:
                message = json.loads(line)
                ended = message.get("ended")
            except (ValueError, AttributeError):
                ended = "ended"
            if ended is not None:
                raise WorkerEnded(Failure(EXIT, f"its process {ended}"))
            yield message
            if each:
                late = time.monotonic() + seconds

    def _read(self) -> None:
        """Take what has come within a tick. Raises WorkerEnded for its end, or too much memory."""
        wait([self._socket, self._output.read_end], TICK_SECONDS)
        self._output.collect()
        if self._pid and processes.memory_of(self._pid) > self._memory:
            limit = f"more than reward_config.memory, {self._memory >> 20} MiB"
            raise WorkerEnded(Failure(MEMORY, limit))
        chunk = b""
        try:
            chunk = self._socket.recv(READ_BYTES >> 4)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not chunk or len(self._unread) > LONGEST_MESSAGE:
            raise WorkerEnded(Failure(EXIT, "its process ended"))
        self._unread += chunk

    def has_ended(self) -> bool:
        """Of a worker that is loaded and not asked anything: then only its end makes it speak."""
        return self._signature is not None and bool(wait([self._socket], 0))

    def close(self) -> None:
        """End a wait for it, and have it killed with whatever it started; return when that is done."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._supervisor.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._socket.close()


class Output:
    """A pipe that workers print to: the first bytes are kept, all are counted.

    It is read during a step only, so that what prints without end waits, and fills nobody's memory.
    """

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.read_end, False)
        with suppress(OSError):  # a user may have few large pipes
            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, READ_BYTES)
        self._kept, self._num_bytes = b"", 0

    def collect(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(MOST_READS):
                chunk = os.read(self.read_end, READ_BYTES)
                self._num_bytes += len(chunk)
                self._kept += chunk[: KEPT_OUTPUT - len(self._kept)]

    def take(self) -> tuple[str, int]:
        """Return the kept text and the number of bytes since the last call."""
        self.collect()
        text, num_bytes = self._kept.decode("utf-8", "replace"), self._num_bytes
        self._kept, self._num_bytes = b"", 0
        return text, num_bytes

    def close(self) -> None:
        os.close(self.read_end)
        os.close(self.write_end)
