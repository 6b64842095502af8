"""What calls a reward function: an executor with a thread of its own, so that all functions score at the same time.

The kind that scores in a worker process is workers/executor.py.
"""

from __future__ import annotations

import concurrent.futures
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mindgrpo.rewards.call import Caller, Samples, Signature
from mindgrpo.rewards.load import RewardFunction
from mindgrpo.rewards.outcome import RAISED, TIMEOUT, Failure, Outcome, RewardResult

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
        # A daemon: what hangs in it must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def _serve(self) -> None:
        for future, *arguments in iter(self._tasks.get, None):
            future.set_result(self._run(*arguments))

    def start(self, samples: Samples, indices: Sequence[int], patient: bool = False) -> None:
        """Start scoring; `patient` gives a first call, which may load something, the whole deadline."""
        self._future = Future()
        self._tasks.put((self._future, samples, list(indices), patient))

    def _run(self, samples: Samples, indices: list[int], patient: bool) -> RewardResult:
        self._latest = result = RewardResult()
        started = time.monotonic()
        try:
            if indices:
                self._score(samples, indices, result, patient)
        except BaseException as error:  # what not even a caller survives
            result.fail(indices, Failure(RAISED, f"{type(error).__name__}: {error}"))
        result.seconds = time.monotonic() - started
        return result

    @abstractmethod
    def signature(self) -> Signature:
        """Return what the function can be given, when it is loaded. Raises UserError."""

    @property
    def num_done(self) -> int:
        """Samples of the latest call that have an outcome by now."""
        return len(self._latest.values) + len(self._latest.failures)

    def result(self) -> RewardResult:
        """Wait for what was started, which ends by deadlines of its own."""
        return self._future.result()

    @abstractmethod
    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        """Score samples `indices` into `result`, in the executor's thread."""

    def close(self) -> None:
        """End the thread after what it is doing."""
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
        result.fail(self._indices, Failure(TIMEOUT, message))
        return result

    def _score(
        self, samples: Samples, indices: list[int], result: RewardResult, patient: bool
    ) -> None:
        outcomes: Iterable[Outcome] | Failure = self._caller.together(samples.select(indices))
        if isinstance(outcomes, Failure):
            result.together_failure = outcomes
            outcomes = (self._caller.alone(samples, index) for index in indices)
        for index, outcome in zip(indices, outcomes, strict=True):
            result.record(index, outcome)
