"""Makes the object of one environment, and calls it as it is asked until its conversation ends."""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Callable
from typing import Any

from mindgrpo.environments.contract import (
    Closing,
    Observation,
    Opening,
    Question,
    opening_of,
    step_of,
)
from mindgrpo.environments.load import load_environment
from mindgrpo.rewards.call import BadResult, judged
from mindgrpo.user_code import describe
from mindgrpo.workers.protocol import BAD_RESULT, MEMORY, RAISED, CallFailure


class Episode:
    """`make` returns the user's object. Its methods may be async: they share an event loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, question: Question) -> Observation | CallFailure:
        """Whatever the user's code raises is a CallFailure."""
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
            self._environment = self._make()
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
    """Serves the class that `text` (rl_config.environment) names; each forked process has one object of it."""

    description = None

    def __init__(self, text: str) -> None:
        self._episode = Episode(load_environment(text))

    def answer(self, content: Question) -> dict[str, Any] | CallFailure:
        result = self._episode.answer(content)
        return result if isinstance(result, CallFailure) else result.as_json()


def seed_generators(seed: str) -> None:
    """Those of random and, where it is imported, NumPy: the worker's own state is another in every run."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.getrandbits(32))
        random.seed(seed)
