"""Runs the environments of a rollout, each in a process of its own: questions by sample, and their results."""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
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
    EXIT,
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

    def ask(self, questions: Mapping[int, Question]) -> dict[int, Result]:
        """Returns one result per sample. Raises UserError where the class cannot be loaded.

        An environment whose result is a CallFailure, or says that it is done, is asked to close and ended.
        """
        results = self._ask(questions)
        self._open |= questions.keys()
        self._open -= {sample for sample, question in questions.items() if question == Closing()}
        self._end(
            sample
            for sample, result in results.items()
            if isinstance(result, CallFailure) or result.is_done
        )
        return results

    def end_all(self) -> None:
        """Asks the environments of all conversations that have ended undone to close, and ends them."""
        self._end(list(self._open))

    def _end(self, samples: Iterable[int]) -> None:
        ended = sorted(self._open.intersection(samples))
        self._open -= set(ended)
        if ended and self._worker.is_running:
            self._ask(dict.fromkeys(ended, Closing()))

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        self._open.clear()
        self._worker.close()

    def _ask(self, questions: Mapping[int, Question]) -> dict[int, Result]:
        samples, results = list(questions), dict[int, Result]()

        def record(number: int, answer: Any) -> None:
            is_failure = isinstance(answer, CallFailure)
            results[samples[number]] = answer if is_failure else Observation.from_json(answer)

        asked = [
            Task(content, sample, isinstance(content, Opening), isinstance(content, Closing))
            for sample, content in questions.items()
        ]
        seconds = self._deadline + GRACE_SECONDS
        failure = self._worker.ask(asked, self._deadline, seconds, record, each=True)
        self._worker.take_output()
        failure = failure or CallFailure(EXIT, "its process ended")
        return {sample: results.get(sample, failure) for sample in samples}


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
