"""Scores a function's samples in worker processes, which are ended where they are late or too large.

First all samples in one call, as the function expects (a built-in's one after another), in a worker that keeps
what the function remembers. Where that fails in whatever way, each sample is scored in a process of its own,
forked from a second worker, which is never called itself.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.executors import Executor, Limits
from mindgrpo.rewards.load import REWARD, Spec
from mindgrpo.rewards.outcome import EXIT, REFUSED, Failure, RewardResult, from_json
from mindgrpo.rewards.workers.connection import (
    CLOSING_SECONDS,
    TICK_SECONDS,
    Output,
    Worker,
    WorkerEnded,
)
from mindgrpo.rewards.workers.worker import Task, load_reward

# Beyond the deadline of samples that run beside each other: for starting a process for each.
ISOLATED_GRACE = 2.0
SLOW_HINT = " (if it is only slow, raise reward_config.together_deadline)"


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
        load = partial(load_reward, self._spec)
        worker = Worker(load, REWARD, self._spec.text, self._limits.memory, self._output)
        self._workers[isolated] = worker
        return worker

    def signature(self) -> Signature:
        worker = self._workers.get(False) or self._start_worker(False)
        return worker.load()

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        limits = self._limits
        seconds = max(limits.deadline, limits.first_call) if patient else limits.first_call
        # A built-in gets one sample at a time: what it has scored when it hangs stays scored.
        batches = [indices] if self._spec.source else [[index] for index in indices]
        task = Task(False, samples, batches, limits.deadline)
        failure = self._ask(task, result, seconds, SLOW_HINT)
        if self._spec.source:
            result.together_failure = failure
        if rest := result.rest(indices):
            apart = Task(True, samples, [rest], limits.deadline)
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
