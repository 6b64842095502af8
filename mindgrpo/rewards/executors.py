"""Calls reward functions, each in an executor with a thread of its own, so that all score at the same time.

A quick built-in and a callable that no other process can import is called in the thread, every other function in worker
processes, which are ended where they are late or too large.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards.call import (
    Caller,
    Outcome,
    RewardResult,
    Samples,
    Signature,
    from_json,
    load_reward,
)
from mindgrpo.rewards.load import REWARD, WHERE, RewardFunction, Spec
from mindgrpo.rewards.signal_use import signals_refused, watch_signals
from mindgrpo.workers.client import CLOSING_SECONDS, Worker
from mindgrpo.workers.protocol import RAISED, REFUSED, TIMEOUT, CallFailure, Task

# Beyond the deadline of samples that run beside each other: for starting a process for each.
ISOLATED_GRACE = 2.0
SLOW_HINT = " (if it is only slow, raise reward_config.together_deadline)"
IN_TURN_HINT = (
    " (its module starts threads when it is imported, so samples are scored one after another: start them in the first "
    "call, or raise reward_config.deadline)"
)
# What a step may lose to a function that hangs on all samples together, beside one deadline.
LONGEST_TOGETHER = 2.5


@dataclass(frozen=True)
class Limits:
    """How long and how large scoring may get.

    `deadline`: seconds for one sample alone. `together`: for all of a step in one call, None for `deadline` and
    at most 2.5. `memory`: bytes a worker. `workers`: processes a function's samples are dealt to.
    """

    deadline: float = 10.0
    together: float | None = None
    memory: int = 2 << 30
    workers: int = 1

    @property
    def first_call(self) -> float:
        return min(self.deadline, LONGEST_TOGETHER) if self.together is None else self.together


class Executor(ABC):
    """`start`, then `result`. Always the same thread calls the function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._future: Future[Any] = Future()
        self._future.set_result(None)
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._latest = RewardResult()
        # A daemon: what hangs in it must not keep the process from ending. Context variables, such as decimal's
        # precision, are those of its maker.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._serve,), daemon=True, name=name)
        self._thread.start()

    def _serve(self) -> None:
        for future, *arguments in iter(self._tasks.get, None):
            future.set_result(self._run(*arguments))

    def start(self, samples: Samples, indices: Sequence[int], patient: bool = False) -> None:
        """Starts scoring; `patient` gives a first call, which may load something, the whole deadline."""
        self._future = Future()
        self._tasks.put((self._future, samples, list(indices), patient))

    def _run(self, samples: Samples, indices: list[int], patient: bool) -> RewardResult:
        self._latest = result = RewardResult()
        started = time.monotonic()
        try:
            if indices:
                self._score(samples, indices, result, patient)
        except BaseException as error:  # what not even a caller survives
            result.fail(indices, CallFailure(RAISED, f"{type(error).__name__}: {error}"))
        result.seconds = time.monotonic() - started
        return result

    @abstractmethod
    def signature(self) -> Signature:
        """Returns the function's signature, when it is loaded. Raises UserError."""

    @property
    def num_done(self) -> int:
        """Counts samples of the latest call that have an outcome by now."""
        return len(self._latest.values) + len(self._latest.failures)

    def result(self) -> RewardResult:
        """Waits for what was started, which ends by deadlines of its own."""
        return self._future.result()

    @abstractmethod
    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        """Scores samples `indices` into `result`, in the executor's thread."""

    def close(self) -> None:
        """Ends the thread after its present task."""
        self._tasks.put(None)


class ThreadExecutor(Executor):
    """Calls a function of this process: a quick built-in, or a callable that no other process can import.

    What is late is given up, not ended: a thread cannot be killed. It is asked again when it has come back.
    """

    def __init__(self, function: RewardFunction, deadline: float) -> None:
        super().__init__(function.name)
        self._caller, self._deadline = Caller(function), deadline
        self._is_busy = False

    def signature(self) -> Signature:
        return self._caller.signature

    def start(self, samples: Samples, indices: Sequence[int], patient: bool = False) -> None:
        self._started, self._indices = time.monotonic(), list(indices)
        self._is_busy = not self._future.done()
        if not self._is_busy:
            super().start(samples, indices, patient)

    def result(self) -> RewardResult:
        if self._is_busy:
            return self._given_up("still busy with an earlier step")
        left = max(0.0, self._started + self._deadline - time.monotonic())
        try:
            return self._future.result(left if left < math.inf else None)
        except concurrent.futures.TimeoutError:
            message = f"no answer in {self._deadline:g} s (a thread cannot be ended)"
            return self._given_up(message)

    def _given_up(self, message: str) -> RewardResult:
        result = RewardResult(seconds=time.monotonic() - self._started)
        result.fail(self._indices, CallFailure(TIMEOUT, message))
        return result

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        outcomes = self._together(samples.select(indices))
        if isinstance(outcomes, CallFailure):
            result.together_failure = outcomes
            for index in indices:
                alone = self._together(samples.select([index]))
                result.record(index, alone if isinstance(alone, CallFailure) else alone[0])
        else:
            for index, outcome in zip(indices, outcomes, strict=True):
                result.record(index, outcome)

    def _together(self, samples: Samples) -> list[Outcome] | CallFailure:
        return self._caller.together(samples)


IN_A_THREAD = (
    "but signals work in a main thread alone, and functions of the main program are called in another one; put it into "
    "a module, whose functions have a process of their own: from my_rewards import my_reward, or "
    f"my_rewards.py:my_reward in {WHERE}"
)


class MainProgramExecutor(ThreadExecutor):
    """Calls a function of the main program, which can be called in a thread of it alone, as it would run there.

    The thread has an event loop and its maker's context variables. Signals it cannot have: who uses them is refused.
    """

    def __init__(self, function: RewardFunction, deadline: float) -> None:
        watch_signals()
        super().__init__(function, deadline)

    def _serve(self) -> None:
        import asyncio  # takes as long to import as the rest of this room

        asyncio.set_event_loop(asyncio.new_event_loop())
        super()._serve()

    def _together(self, samples: Samples) -> list[Outcome] | CallFailure:
        with signals_refused() as used:
            outcomes = super()._together(samples)
        if not used:
            return outcomes
        # What it returned may be what it makes of the exception that it got there.
        return CallFailure(REFUSED, f"reward function {self.name} calls {used[0]}, {IN_A_THREAD}")


class WorkerExecutor(Executor):
    """Calls a function in worker processes.

    First all samples in one call, as the function expects (a built-in's one after another), in a worker that keeps
    what the function remembers. Where that fails in whatever way, each sample is scored in a process of its own,
    forked from a second worker, which is never called itself and starts when it is needed first. A forked process lacks
    threads that the module has started when it was imported: where there are some, samples are scored one after another
    in the first worker.
    """

    def __init__(self, spec: Spec, limits: Limits) -> None:
        super().__init__(spec.name)
        self._is_builtin, self._limits = not spec.source, limits
        self._called, self._forked = (
            Worker(partial(load_reward, spec), REWARD, spec.text, limits.memory) for _ in range(2)
        )
        self._called.start()
        if self._is_builtin:
            # Slow built-ins import for seconds, which no step should wait for.
            self._forked.start()

    def signature(self) -> Signature:
        return Signature(**self._called.load())

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        workers, limits = (self._called, self._forked), self._limits
        restarts = sum(worker.restarts for worker in workers)
        has_threads = self._has_threads()
        # Where no process can be forked there is no second chance for what is only slow.
        is_patient = patient or (has_threads and limits.together is None)
        seconds = max(limits.deadline, limits.first_call) if is_patient else limits.first_call
        # A built-in gets one sample at a time: what it has scored when it hangs stays scored.
        batches = [[index] for index in indices] if self._is_builtin else [indices]
        failure = self._ask(self._called, samples, batches, result, seconds, SLOW_HINT)
        if not self._is_builtin:
            result.together_failure = failure
        if rest := result.rest(indices):
            if has_threads:
                self._score_in_turn(samples, rest, result)
            else:
                apart = [[index] for index in rest]
                seconds = limits.deadline + ISOLATED_GRACE
                failure = self._ask(self._forked, samples, apart, result, seconds)
                if failure is not None:
                    result.fail(rest, failure)
        self._called.start()  # which loads while the rank does other things
        result.restarts = sum(worker.restarts for worker in workers) - restarts
        for worker in workers:
            printed, num_bytes = worker.take_output()
            result.printed += printed
            result.printed_bytes += num_bytes

    def _has_threads(self) -> bool:
        try:
            return bool(self._called.threads())
        except UserError:  # it cannot be loaded, which the first call says
            return False

    def _score_in_turn(self, samples: Samples, indices: list[int], result: RewardResult) -> None:
        """Scores one sample after another in the first worker, for as long as samples beside each other would take."""
        with suppress(UserError):  # which `_ask` reports
            self._called.load()  # again, where the call with all samples has ended it: no time of the samples'
        until = time.monotonic() + self._limits.deadline + ISOLATED_GRACE
        for index in indices:
            left = until - time.monotonic()
            if left <= 0:
                return result.fail(indices, CallFailure(TIMEOUT, f"not reached{IN_TURN_HINT}"))
            seconds = min(self._limits.deadline, left)
            failure = self._ask(self._called, samples, [[index]], result, seconds, IN_TURN_HINT)
            if failure is not None:
                result.fail([index], failure)

    def _ask(
        self,
        worker: Worker,
        samples: Samples,
        batches: list[list[int]],
        result: RewardResult,
        seconds: float,
        hint: str = "",
    ) -> CallFailure | None:
        """Records what the worker scores of `batches`, one call each; returns why that is not all."""
        is_apart = worker is self._forked
        failures: list[CallFailure] = []

        def record(number: int, answer: Any) -> None:
            batch = batches[number]
            if not isinstance(answer, CallFailure):
                for index, outcome in zip(batch, answer, strict=True):
                    result.record(index, from_json(outcome))
            elif is_apart:
                result.record(batch[0], answer)
            else:
                failures.append(answer)

        try:
            needed = samples.only(Signature(**worker.load()).accepted(samples))
            tasks = [
                Task(needed.select(batch), number if is_apart else None)
                for number, batch in enumerate(batches)
            ]
            ended = worker.ask(tasks, self._limits.deadline, seconds, record, hint)
        except UserError as error:
            return CallFailure(REFUSED, str(error))
        return failures[-1] if failures else ended

    def close(self) -> None:
        """Ends the workers and whatever they started, and the thread that may wait for one."""
        super().close()
        for worker in (self._called, self._forked):
            worker.close()
        self._thread.join(CLOSING_SECONDS)
