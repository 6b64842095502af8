"""Runs the environments of a rollout, each in a process of its own: questions by sample, and their results."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from mindgrpo.environments.contract import (
    ENVIRONMENT,
    Closing,
    Observation,
    Opening,
    Question,
    Result,
    opening_of,
    step_of,
)
from mindgrpo.environments.mixture import Mixture
from mindgrpo.rewards.call import BadResult, judged
from mindgrpo.user_code import describe
from mindgrpo.workers.client import Worker
from mindgrpo.workers.protocol import (
    BAD_RESULT,
    MEMORY,
    RAISED,
    CallFailure,
    CallLimits,
    Task,
)

# Beyond a deadline: for starting a process for each, and for the end of those that hang.
GRACE_SECONDS = 10.0


class EnvironmentPool:
    """Runs the environments of rl_config.environment. The worker starts with the first one."""

    def __init__(self, mixture: Mixture, limits: CallLimits) -> None:
        self._deadline = limits.deadline
        load = partial(EnvironmentService, mixture)
        self._worker = Worker(load, ENVIRONMENT, ", ".join(mixture.texts), limits.memory)
        self._open: set[int] = set()
        self._asked: set[int] = set()
        self._closing: set[int] = set()
        self._results: dict[int, Result] = {}
        self._ready_since = math.inf

    def ask(
        self, questions: Mapping[int, Question], patience: float = math.inf
    ) -> dict[int, Result]:
        """Asks by sample, beside what is still to be answered, and returns the results that are there.

        One is waited for if there is any, and all until one has been there for `patience` seconds. Raises UserError
        where the class cannot be loaded. An environment whose result is a CallFailure, or says that it is done, is
        asked to close and ended.
        """
        if questions:
            self._begin(questions)
            self._asked |= questions.keys()
            self._open |= questions.keys()
        self._collect(patience)
        results, self._results, self._ready_since = self._results, {}, math.inf
        return dict(sorted(results.items()))

    def end_all(self) -> None:
        """Asks the environments of all conversations that have ended undone to close, and ends them.

        Those that are still to answer do so before.
        """
        self._collect(math.inf)
        self._end(list(self._open))
        self._collect(math.inf)
        self._results, self._ready_since = {}, math.inf

    def _end(self, samples: Iterable[int]) -> None:
        ended = sorted(self._open.intersection(samples))
        self._open -= set(ended)
        if ended and self._worker.is_running:
            self._begin(dict.fromkeys(ended, Closing()))
            self._closing |= set(ended)

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        for samples in (self._open, self._asked, self._closing):
            samples.clear()
        self._worker.close()

    def _begin(self, questions: Mapping[int, Question]) -> None:
        tasks = {
            sample: Task(
                content, sample, isinstance(content, Opening), isinstance(content, Closing)
            )
            for sample, content in questions.items()
        }
        self._worker.begin(tasks, self._deadline, self._deadline + GRACE_SECONDS)

    def _collect(self, patience: float) -> None:
        """Waits for results; for closings too, where patience has no end."""
        if not (self._asked or self._closing):
            return

        def enough() -> float:
            if self._asked or patience == math.inf:
                return self._ready_since + patience
            return -math.inf

        seconds = self._deadline + GRACE_SECONDS
        failure = self._worker.collect(seconds, self._record, until=enough)
        self._worker.take_output()
        if failure is not None:
            for sample in [*self._asked, *self._closing]:
                self._record(sample, failure, time.monotonic())

    def _record(self, sample: int, answer: Any, at: float) -> None:
        if sample in self._closing:
            self._closing.remove(sample)
            return
        is_failure = isinstance(answer, CallFailure)
        result = answer if is_failure else Observation.from_json(answer)
        self._asked.remove(sample)
        self._results[sample] = result
        self._ready_since = min(self._ready_since, at)
        if is_failure or result.is_done:
            self._end([sample])


class Episode:
    """`make` returns the user's object for a row. Its methods may be async: they share an event loop."""

    def __init__(self, make: Callable[[Opening], Any]) -> None:
        self._make = make
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, question: Question) -> Observation | CallFailure:
        """Answers a question; whatever the user's code raises becomes a CallFailure."""
        try:
            return self._answer(question)
        except BadResult as error:
            method = "reset" if isinstance(question, Opening) else "step"
            return CallFailure(BAD_RESULT, f"{method} returned {error}")
        except MemoryError as error:
            return CallFailure(MEMORY, describe(error))
        except BaseException as error:
            return CallFailure(RAISED, describe(error))

    def _answer(self, question: Question) -> Observation | CallFailure:
        if isinstance(question, Opening):
            seed_generators(question.seed)
            self._environment = self._make(question)
            return opening_of(self._value(self._environment.reset(dict(question.row))))
        if isinstance(question, Closing):
            close = getattr(self._environment, "close", None)
            if callable(close):
                self._value(close())
            return Observation(())
        observation = step_of(self._value(self._environment.step(question)))
        reward = judged(observation.reward)
        if isinstance(reward, CallFailure):
            return CallFailure(reward.kind, f"step {reward.message} for reward")
        return observation

    def _value(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned

        async def wait() -> Any:
            return await returned

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(wait())


class EnvironmentService:
    """Serves the environments of rl_config.environment; each forked process has one object of one of them."""

    description = None

    def __init__(self, mixture: Mixture) -> None:
        self._episode = Episode(mixture.load())

    def answer(self, content: Question) -> dict[str, Any] | CallFailure:
        result = self._episode.answer(content)
        return result if isinstance(result, CallFailure) else result.as_json()


def seed_generators(seed: str) -> None:
    """Seeds random and, where it is imported, NumPy: the worker's own state differs in every run."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.getrandbits(32))
        random.seed(seed)
