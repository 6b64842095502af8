"""Scores a function's samples in a worker process that can be ended.

First all samples in one call, as the function expects (a built-in's one after another), in a worker that keeps
what the function remembers. Where that fails in whatever way, each sample is scored in a process of its own,
forked from a second worker, which is never called itself.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.executors import Executor, wait_all
from mindgrpo.rewards.limits import Limits
from mindgrpo.rewards.outcome import EXIT, Failure, RewardResult, from_json
from mindgrpo.rewards.spec import WHERE, Spec
from mindgrpo.rewards.workers.pool import Worker, WorkerEnded, WorkerPool
from mindgrpo.rewards.workers.worker import Task

# Beyond the deadline of samples that run beside each other: for starting a process for each.
ISOLATED_GRACE = 2.0
CLOSING_SECONDS = 5.0
KEPT_OUTPUT, READ_BYTES, MOST_READS = 16 << 10, 1 << 20, 8


class WorkerExecutor(Executor):
    """One worker is called, a second one is forked from, which starts when it is needed first."""

    def __init__(self, spec: Spec, pool: WorkerPool, limits: Limits) -> None:
        super().__init__(spec.name)
        self._spec, self._pool, self._limits = spec, pool, limits
        self._output = Output()
        self._workers: dict[bool, Worker] = {}  # by whether it is forked from or called
        self._start_worker(False)
        if not spec.source:
            self._start_worker(
                True
            )  # slow built-ins import for seconds, which no step should wait for

    def _start_worker(self, isolated: bool) -> Worker:
        self._workers[isolated] = self._pool.start(self._spec, self._output.write_end)
        return self._workers[isolated]

    def signature(self) -> Signature:
        self.submit(self._load, self._workers[False])
        wait_all([self])
        return self.future.result()

    def _load(self, worker: Worker) -> Signature:
        try:
            return worker.load()
        except WorkerEnded as ended:
            printed = self._output.take()[0].strip().splitlines()
            why = f" ({printed[-1].strip()})" if printed else ""
            raise UserError(
                f"reward function {self._spec.text!r}: {ended.failure.message} while loading it{why}; "
                f"correct the module or {WHERE}"
            ) from None

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        limits = self._limits
        seconds = max(limits.deadline, limits.first_call) if patient else limits.first_call
        hint = " (if it is only slow, raise reward_config.together_deadline)"
        failure = self._ask(False, samples, indices, result, seconds, hint)
        if self._spec.source:
            result.together_failure = failure
        if rest := result.rest(indices):
            failure = self._ask(True, samples, rest, result, limits.deadline + ISOLATED_GRACE)
            if failure is not None:
                result.fail(rest, failure)
        if False not in self._workers:
            self._start_worker(False)  # which loads while the rank does other things

    def _ask(
        self,
        isolated: bool,
        samples: Samples,
        indices: list[int],
        result: RewardResult,
        seconds: float,
        hint: str = "",
    ) -> Failure | None:
        """Record what a worker scores; return why it did not score all."""
        failure = None
        worker = self._workers.get(isolated) or self._start_worker(isolated)
        if worker.has_ended():
            self._drop(isolated, result)
            worker = self._start_worker(isolated)
        try:
            wanted = self._load(worker).accepted(samples)
            task = Task(isolated, samples.only(wanted), indices, self._limits.deadline)
            for message in worker.ask(task, seconds, hint):
                if "index" in message:
                    result.record(message["index"], from_json(message))
                else:
                    failure = Failure(*message["failed"])
            return failure
        except WorkerEnded as ended:
            failure = failure or ended.failure
        except UserError as error:
            failure = Failure(EXIT, str(error))
        except (KeyError, TypeError, ValueError):
            failure = Failure(EXIT, "its process wrote to the rank what is no score")
        self._drop(isolated, result)
        return failure

    def _drop(self, isolated: bool, result: RewardResult) -> None:
        self._workers.pop(isolated).close()
        result.restarts += 1

    def check(self, now: float) -> None:
        self._output.collect()
        for worker in list(self._workers.values()):
            worker.check(now)

    def result(self) -> RewardResult:
        result = super().result()
        result.printed, result.printed_bytes = self._output.take()
        return result

    def close(self) -> None:
        """Release what is held; the pool has been closed before, which ends a call."""
        super().close()
        self._thread.join(CLOSING_SECONDS)
        for worker in self._workers.values():
            worker.close()
        self._output.close()


class Output:
    """A pipe that workers print to: the first bytes are kept, all are counted.

    It is read during a step only, so that what prints without end waits, and fills nobody's memory.
    """

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        with suppress(OSError):  # a user may have few large pipes
            fcntl.fcntl(self._read_end, fcntl.F_SETPIPE_SZ, READ_BYTES)
        self._kept, self._num_bytes = b"", 0

    def collect(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(MOST_READS):
                chunk = os.read(self._read_end, READ_BYTES)
                self._num_bytes += len(chunk)
                self._kept += chunk[: KEPT_OUTPUT - len(self._kept)]

    def take(self) -> tuple[str, int]:
        """Return the kept text and the number of bytes since the last call."""
        self.collect()
        text, num_bytes = self._kept.decode("utf-8", "replace"), self._num_bytes
        self._kept, self._num_bytes = b"", 0
        return text, num_bytes

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self.write_end)
