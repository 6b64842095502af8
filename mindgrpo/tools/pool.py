"""Runs tool calls in a worker: those of users' tools in forked processes, which are ended where late or too large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindgrpo.rewards.outcome import EXIT, Failure
from mindgrpo.rewards.workers.connection import Output, Worker, WorkerEnded
from mindgrpo.rewards.workers.executor import ISOLATED_GRACE
from mindgrpo.rewards.workers.worker import Task
from mindgrpo.tools.builtin import BOUNDED
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.load import TOOL
from mindgrpo.tools.served import Calls, ToolCaller

UNKNOWN = "unknown"
# Of one answer; the budget of a conversation's tokens is smaller.
LONGEST_ANSWER = 1 << 14


@dataclass(frozen=True)
class ToolLimits:
    """`deadline` seconds of one call; `memory` bytes of all that run together."""

    deadline: float
    memory: int


@dataclass(frozen=True)
class ToolAnswer:
    """What the model reads; `failure` is the kind of what went wrong, None for a tool's own answer."""

    text: str
    failure: str | None = None


class ToolPool:
    """Of the tools `texts` (rl_config.tools), which have `names`. The worker starts with the first calls."""

    def __init__(self, texts: Sequence[str], names: Sequence[str], limits: ToolLimits) -> None:
        self._texts, self._names, self._limits = tuple(texts), frozenset(names), limits
        self._bounded = BOUNDED.intersection(texts)
        self._output = Output()
        self._worker: Worker | None = None

    def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """One answer a call, within the deadline and some seconds; what fails is told to the model."""
        answers: dict[int, ToolAnswer] = {}
        for index, call in enumerate(calls):
            if call.error is not None:
                answers[index] = ToolAnswer(f"Error: {call.error}", call.failure)
            elif call.name not in self._names:
                known = ", ".join(sorted(self._names))
                text = f"Error: there is no tool {call.name!r}; there are {known}"
                answers[index] = ToolAnswer(text, UNKNOWN)
        runnable = [index for index in range(len(calls)) if index not in answers]
        self._run(calls, [i for i in runnable if calls[i].name in self._bounded], answers, False)
        # Also what the worker has died of.
        self._run(calls, [i for i in runnable if i not in answers], answers, True)
        self._output.take()
        return [answers[index] for index in range(len(calls))]

    def _run(
        self,
        calls: Sequence[ToolCall],
        indices: list[int],
        answers: dict[int, ToolAnswer],
        isolated: bool,
    ) -> None:
        """Adds answers: those of isolated calls all, of the others what comes before the worker ends."""
        if not indices:
            return
        ending = Failure(EXIT, "its process ended")
        task = Task(isolated, Calls(calls), [indices], self._limits.deadline)
        try:
            worker = self._start()
            worker.load()
            for message in worker.ask(task, self._limits.deadline + ISOLATED_GRACE, ""):
                answers[message["index"]] = _answer(message)
        except WorkerEnded as ended:
            ending = ended.failure
        except (KeyError, TypeError, ValueError):
            ending = Failure(EXIT, "its process wrote to the rank what is no answer")
        missing = [index for index in indices if index not in answers]
        if missing:
            self.close()
        for index in missing if isolated else []:
            answers[index] = _failed(ending)

    def _start(self) -> Worker:
        if self._worker is not None and self._worker.has_ended():
            self.close()
        if self._worker is None:
            load = partial(ToolCaller, self._texts, LONGEST_ANSWER)
            text = ", ".join(self._texts)
            self._worker = Worker(load, TOOL, text, self._limits.memory, self._output)
        return self._worker

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _answer(message: Mapping[str, Any]) -> ToolAnswer:
    if "failed" in message:
        return _failed(Failure(*message["failed"]))
    value = message["value"]
    if not isinstance(value, str):
        raise TypeError(value)
    return ToolAnswer(value)


def _failed(failure: Failure) -> ToolAnswer:
    return ToolAnswer(f"Error: {failure.message}", failure.kind)
