"""Asks the environments of a rollout: questions by sample, each environment in a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindgrpo.environments.contract import Closing, Observation, Opening, Result
from mindgrpo.environments.contract import Question as EnvironmentQuestion
from mindgrpo.environments.episode import EnvironmentService
from mindgrpo.environments.load import ENVIRONMENT
from mindgrpo.workers.client import Worker
from mindgrpo.workers.protocol import EXIT, CallFailure, Question

# Beyond a deadline: for starting a process for each, and for the end of those that hang.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class EnvironmentLimits:
    """`deadline` seconds of one reset or step; `memory` bytes of all environments together."""

    deadline: float
    memory: int


class EnvironmentPool:
    """Runs the class that `text` (rl_config.environment) names. The worker starts with the first environment."""

    def __init__(self, text: str, limits: EnvironmentLimits) -> None:
        self._deadline = limits.deadline
        load = partial(EnvironmentService, text)
        self._worker = Worker(load, ENVIRONMENT, text, limits.memory)
        self._open: set[int] = set()

    def ask(self, questions: Mapping[int, EnvironmentQuestion]) -> dict[int, Result]:
        """Returns a result a sample. Raises UserError where the class cannot be loaded.

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

    def _ask(self, questions: Mapping[int, EnvironmentQuestion]) -> dict[int, Result]:
        samples, results = list(questions), dict[int, Result]()

        def record(number: int, answer: Any) -> None:
            is_failure = isinstance(answer, CallFailure)
            results[samples[number]] = answer if is_failure else Observation.from_json(answer)

        asked = [
            Question(content, sample, isinstance(content, Opening), isinstance(content, Closing))
            for sample, content in questions.items()
        ]
        seconds = self._deadline + GRACE_SECONDS
        failure = self._worker.ask(asked, self._deadline, seconds, record, each=True)
        self._worker.take_output()
        failure = failure or CallFailure(EXIT, "its process ended")
        return {sample: results.get(sample, failure) for sample in samples}
