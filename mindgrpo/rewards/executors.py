"""What calls a reward function: an executor with a thread of its own, in this process or a worker's.

Executors work at the same time; `wait_all` waits for all and lets each end what is late. The kind that scores
in a worker process is workers/executor.py.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

from mindgrpo.rewards.attempt import Attempts, judged
from mindgrpo.rewards.call import Samples, Signature
from mindgrpo.rewards.load import RewardFunction
from mindgrpo.rewards.outcome import RAISED, TIMEOUT, Failure, RewardResult

TICK_SECONDS = 0.05


class Executor(ABC):
    """`start`, then `wait_all`, then `result`. Always the same thread calls the function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.future: Future[Any] = Future()
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon: what hangs in it must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def _serve(self) -> None:
        for future, work, arguments in iter(self._tasks.get, None):
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.future = Future()
        self._tasks.put((self.future, work, arguments))

    def start(self, samples: Samples, indices: Sequence[int], patient: bool = False) -> None:
        """Start scoring; `patient` gives a first call, which may load something, the whole deadline."""
        self.submit(self._run, samples, list(indices), patient)

    def _run(self, samples: Samples, indices: list[int], patient: bool) -> RewardResult:
        result, started = RewardResult(), time.monotonic()
        try:
            if indices:
                self._score(samples, indices, result, patient)
        except BaseException as error:  # what not even an attempt survives
            result.fail(indices, Failure(RAISED, f"{type(error).__name__}: {error}"))
        result.seconds = time.monotonic() - started
        return result

    def result(self) -> RewardResult:
        return self.future.result()

    @abstractmethod
    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        """Score samples `indices` into `result`, in the executor's thread."""

    @abstractmethod
    def check(self, now: float) -> None:
        """End or give up what is late at `now`, in time.monotonic()'s seconds; called while it is waited for."""

    @abstractmethod
    def signature(self) -> Signature:
        """Wait until the function is loaded. Raises UserError where it cannot be."""

    def close(self) -> None:
        """End the thread after what it is doing."""
        self._tasks.put(None)


class ThreadExecutor(Executor):
    """Calls a function of this process: a quick built-in, or a callable that no other process can import.

    What is late is given up, not ended: a thread cannot be killed. It is asked again when it has come back.
    """

    def __init__(self, function: RewardFunction, deadline: float) -> None:
        super().__init__(function.name)
        self._attempts, self._deadline = Attempts(function), deadline
        self._begun, self._indices = 0.0, list[int]()
        self._call: Future[Any] | None = None

    def signature(self) -> Signature:
        return Signature.of(self._attempts.function)

    def start(self, samples: Samples, indices: Sequence[int], patient: bool = False) -> None:
        self._begun, self._indices = time.monotonic(), list(indices)
        if self._call is not None and not self._call.done():
            self._give_up("still busy with an earlier step")
            return
        super().start(samples, indices, patient)
        self._call = self.future

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        values = self._attempts.together(samples.select(indices))
        if isinstance(values, Failure):
            result.together_failure = values
            for index in indices:
                result.record(index, self._attempts.alone(samples, index))
        else:
            for index, value in zip(indices, values, strict=True):
                result.record(index, judged(value))

    def check(self, now: float) -> None:
        if now - self._begun > self._deadline and not self.future.done():
            self._give_up(f"no answer in {self._deadline:g} s (a thread cannot be ended)")

    def _give_up(self, message: str) -> None:
        result = RewardResult(seconds=time.monotonic() - self._begun)
        result.fail(self._indices, Failure(TIMEOUT, message))
        self.future = Future()
        self.future.set_result(result)


def wait_all(executors: Sequence[Executor]) -> None:
    """Wait until every executor is done, which each is by its own deadlines."""
    while pending := [executor for executor in executors if not executor.future.done()]:
        wait([executor.future for executor in pending], TICK_SECONDS)
        for executor in pending:
            executor.check(time.monotonic())
