"""The process of one environment: makes the object, and calls it as it is asked until its conversation ends."""

from __future__ import annotations

import asyncio
import inspect
import json
import pickle
import random
import socket
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
from mindgrpo.rewards.call import BadResult, judged
from mindgrpo.rewards.outcome import BAD_RESULT, MEMORY, RAISED, Failure
from mindgrpo.rewards.workers.worker import flush
from mindgrpo.user_code import describe


def serve_episode(make: Callable[[], Any], channel: socket.socket) -> None:
    """Answers each question on `channel`, which come pickled, with a line of JSON, until it is closed."""
    episode, received = Episode(make), channel.makefile("rb")
    while True:
        try:
            question: Question = pickle.load(received)
        except EOFError:
            return
        result = episode.answer(question)
        if isinstance(result, Failure):
            answer: dict[str, Any] = {"failed": [result.kind, result.message]}
        else:
            answer = {"value": result.as_json()}
        flush()
        channel.sendall(json.dumps(answer).encode() + b"\n")


class Episode:
    """`make` gives the user's object. Its methods may be async: they share an event loop."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._environment: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, question: Question) -> Observation | Failure:
        """Whatever the user's code raises is a Failure."""
        try:
            return self._answer(question)
        except BadResult as error:
            method = "reset" if isinstance(question, Opening) else "step"
            return Failure(BAD_RESULT, f"{method} returned {error}")
        except MemoryError as error:
            return Failure(MEMORY, describe(error))
        except BaseException as error:
            return Failure(RAISED, describe(error))

    def _answer(self, question: Question) -> Observation | Failure:
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
        if isinstance(reward, Failure):
            return Failure(reward.kind, f"step {reward.message} for reward")
        return observation

    def _value(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned

        async def wait() -> Any:
            return await returned

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(wait())


def seed_generators(seed: str) -> None:
    """Those of random and, where it is imported, NumPy: the worker's own state is another in every run."""
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(random.getrandbits(32))
        random.seed(seed)
