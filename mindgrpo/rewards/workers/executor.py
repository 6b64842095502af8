"""Scores a function's samples in worker processes, which are ended where they are late or too large.

First all samples in one call, as the function expects (a built-in's one after another), in a worker that keeps
what the function remembers. Where that fails in whatever way, each sample is scored in a process of its own,
forked from a second worker, which is never called itself.
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
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.executors import Executor, Limits
from mindgrpo.rewards.load import WHERE, Spec
from mindgrpo.rewards.outcome import (
    EXIT,
    MEMORY,
    REFUSED,
    TIMEOUT,
    Failure,
    RewardResult,
    from_json,
)
from mindgrpo.rewards.workers import processes
from mindgrpo.rewards.workers.worker import Order, Task

START = (
    "import sys; sys.path.insert(0, sys.argv[3]); "
    "from mindgrpo.rewards.workers.worker import main; main()"
)
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
# A worker scores beside a training that wants the cores: one compute thread, unless the user says otherwise.
SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Tells the launcher that this process tidies up and ends by itself once its rank has ended.
ENDS_WITH_RANK_VARIABLE = "MINDGRPO_ENDS_WITH_RANK"
TICK_SECONDS = 0.05
# Importing may take so long, whatever the deadline of a sample.
START_SECONDS = 120.0
# Beyond the deadline of samples that run beside each other: for starting a process for each.
ISOLATED_GRACE = 2.0
SLOW_HINT = " (if it is only slow, raise reward_config.together_deadline)"
CLOSING_SECONDS = 10.0
KEPT_OUTPUT, READ_BYTES, MOST_READS = 16 << 10, 1 << 20, 8
LONGEST_MESSAGE = 1 << 26


class WorkerEnded(Exception):
    """A worker has ended, or has to be, before it was done; `failure` says why."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure


class Worker:
    """A worker process as its rank sees it. What it prints is read into `output` while it is waited for."""

    def __init__(self, spec: Spec, memory: int, output: Output) -> None:
        self._spec, self._memory, self._output = spec, memory, output
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
        self._send(Order(spec, [*sys.path], memory), START_SECONDS)

    def load(self) -> Signature:
        """Wait until the function is loaded. Raises UserError if it cannot be."""
        if self._signature is None:
            try:
                message = next(self._messages(START_SECONDS, ""))
            except WorkerEnded as ended:
                printed = self._output.take()[0].strip().splitlines()
                why = f" ({printed[-1].strip()})" if printed else ""
                raise UserError(
                    f"reward function {self._spec.text!r}: {ended.failure.message} while loading it{why}; "
                    f"correct the module or {WHERE}"
                ) from None
            if "refused" in message:
                raise UserError(str(message["refused"]))
            self._signature = Signature(**message["signature"])
            self._pid = message["pid"]
        return self._signature

    def ask(self, task: Task, seconds: float, hint: str) -> Iterator[dict[str, Any]]:
        """Yield the worker's messages until it is done. Raises WorkerEnded, after `seconds` with `hint`."""
        self._send(task, seconds)
        for message in self._messages(seconds, hint):
            if "done" in message:
                return
            yield message

    def _send(self, content: Order | Task, seconds: float) -> None:
        self._socket.settimeout(seconds)
        with suppress(OSError):  # it has ended already, which the first answer tells
            self._socket.sendall(pickle.dumps(content))
        self._socket.setblocking(False)

    def _messages(self, seconds: float, hint: str) -> Iterator[dict[str, Any]]:
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


class WorkerExecutor(Executor):
    """One worker is called, a second one is forked from, which starts when it is needed first."""

    def __init__(self, spec: Spec, limits: Limits) -> None:
        super().__init__(spec.name)
        self._spec, self._limits = spec, limits
        self._output, self._is_closed = Output(), False
        self._workers: dict[bool, Worker] = {}  # by whether it is forked from or called
        # Slow built-ins import for seconds, which no step should wait for.
        for isolated in (False,) if spec.source else (False, True):
            self._start_worker(isolated)

    def _start_worker(self, isolated: bool) -> Worker:
        if self._is_closed:
            raise RuntimeError("the scorer is closed")
        worker = Worker(self._spec, self._limits.memory, self._output)
        self._workers[isolated] = worker
        return worker

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        limits = self._limits
        seconds = max(limits.deadline, limits.first_call) if patient else limits.first_call
        task = Task(False, samples, indices, limits.deadline)
        failure = self._ask(task, result, seconds, SLOW_HINT)
        if self._spec.source:
            result.together_failure = failure
        if rest := result.rest(indices):
            apart = Task(True, samples, rest, limits.deadline)
            failure = self._ask(apart, result, limits.deadline + ISOLATED_GRACE)
            if failure is not None:
                result.fail(rest, failure)
        if False not in self._workers:
            self._start_worker(False)  # which loads while the rank does other things
        result.printed, result.printed_bytes = self._output.take()

    def _ask(
        self, task: Task, result: RewardResult, seconds: float, hint: str = ""
    ) -> Failure | None:
        """Record what a worker scores; return why it did not score all."""
        failure = None
        worker = self._workers.get(task.isolated) or self._start_worker(task.isolated)
        if worker.has_ended():
            self._drop(task.isolated, result)
            worker = self._start_worker(task.isolated)
        try:
            samples = task.samples.only(worker.load().accepted(task.samples))
            for message in worker.ask(replace(task, samples=samples), seconds, hint):
                if "index" in message:
                    result.record(message["index"], from_json(message))
                else:
                    failure = Failure(*message["failed"])
            return failure
        except WorkerEnded as ended:
            failure = failure or ended.failure
        except UserError as error:
            failure = Failure(REFUSED, str(error))
        except (KeyError, TypeError, ValueError):
            failure = Failure(EXIT, "its process wrote to the rank what is no score")
        self._drop(task.isolated, result)
        return failure

    def _drop(self, isolated: bool, result: RewardResult) -> None:
        self._workers.pop(isolated).close()
        result.restarts += 1

    def close(self) -> None:
        """End the workers and whatever they started, and the thread that may wait for one."""
        super().close()
        self._is_closed = True
        until = time.monotonic() + CLOSING_SECONDS
        while self._workers or (self._thread.is_alive() and time.monotonic() < until):
            for isolated in list(self._workers):
                self._workers.pop(isolated).close()
            self._thread.join(TICK_SECONDS)
        self._output.close()


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
