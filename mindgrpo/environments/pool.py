"""The environments of a rollout as their rank sees them: questions by sample, and what came of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindgrpo.environments.contract import Closing, Observation, Question, Result
from mindgrpo.environments.host import EnvironmentHost, Round
from mindgrpo.environments.load import ENVIRONMENT
from mindgrpo.rewards.outcome import EXIT, Failure
from mindgrpo.rewards.workers.connection import Output, Worker, WorkerEnded

# Beyond a deadline: for starting a process for each, and for the end of those that hang.
GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class EnvironmentLimits:
    """`deadline` seconds of one reset or step; `memory` bytes of all environments together."""

    deadline: float
    memory: int


class EnvironmentPool:
    """Of the class that `text` (rl_config.environment) names. The worker starts with the first environment."""

    def __init__(self, text: str, limits: EnvironmentLimits) -> None:
        self._text, self._limits = text, limits
        self._output = Output()
        self._worker: Worker | None = None
        self._open: set[int] = set()

    def ask(self, questions: Mapping[int, Question]) -> dict[int, Result]:
        """One result a sample. Raises UserError where the class cannot be loaded.

        An environment whose result is a Failure, or says that it is done, is asked to close and ended.
        """
        results = self._ask(questions)
        for sample, question in questions.items():
            result = results[sample]
            is_over = isinstance(result, Failure) or result.is_done or question == Closing()
            (self._open.discard if is_over else self._open.add)(sample)
        return results

    def end_all(self) -> None:
        """Asks the environments of all conversations that have ended undone to close, and ends them."""
        if self._open:
            self.ask(dict.fromkeys(sorted(self._open), Closing()))

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        self._open.clear()
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _ask(self, questions: Mapping[int, Question]) -> dict[int, Result]:
        samples, results = list(questions), dict[int, Result]()
        task = Round(list(questions.items()), self._limits.deadline, self._limits.memory)
        ending = Failure(EXIT, "its process ended")
        seconds = self._limits.deadline + GRACE_SECONDS
        worker = self._start()
        worker.load()
        try:
            for message in worker.ask(task, seconds, "", each=True):
                results[samples[message["index"]]] = _result(message)
        except WorkerEnded as ended:
            ending = ended.failure
        except (KeyError, TypeError, ValueError, IndexError):
            ending = Failure(EXIT, "its process wrote to the rank what is no answer")
        self._output.take()
        missing = [sample for sample in samples if sample not in results]
        if missing:
            self.close()
        return {sample: results.get(sample, ending) for sample in samples}

    def _start(self) -> Worker:
        if self._worker is not None and self._worker.has_ended():
            self.close()
        if self._worker is None:
            load = partial(EnvironmentHost, self._text)
            memory = self._limits.memory
            self._worker = Worker(load, ENVIRONMENT, self._text, memory, self._output)
        return self._worker


def _result(message: Mapping[str, Any]) -> Result:
    if "failed" in message:
        kind, text = message["failed"]
        return Failure(str(kind), str(text))
    return Observation.from_json(message["value"])
