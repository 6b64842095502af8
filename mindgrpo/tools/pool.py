"""Loads tools and runs calls of them in a worker: users' tools in forked processes, which are ended where late."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.tools.builtin import BOUNDED, BUILTINS
from mindgrpo.tools.calls import ToolCall
from mindgrpo.user_code import Kind, describe, import_named, nearest
from mindgrpo.workers.client import Worker
from mindgrpo.workers.protocol import (
    BAD_RESULT,
    MEMORY,
    RAISED,
    CallFailure,
    CallLimits,
    Task,
)

TOOL = Kind("tool", "rl_config.tools")


@dataclass(frozen=True)
class Tool:
    """`text` is what the user wrote."""

    text: str
    name: str
    function: Callable[..., Any]

    def schema(self) -> dict[str, Any]:
        """Returns the JSON schema that chat templates take in `tools`. Raises UserError."""
        # Imports transformers, which a worker need not wait for.
        from mindgrpo.data.chat_template import tool_schema

        try:
            return tool_schema(self.function)
        except Exception as error:  # of a docstring or of type hints
            raise UserError(
                f"tool {self.text!r} has no schema: {describe(error)}; give it a docstring with a line for itself and "
                "an Args: section with a line for each argument, and type hints"
            ) from error


def load_tools(texts: Sequence[str]) -> list[Tool]:
    """Imports the users' modules. Raises UserError, also for two tools of one name."""
    tools = [_load(text.strip()) for text in texts]
    names = [tool.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                f"{TOOL.key} has two tools named {name!r}; rename one of the functions."
            )
    return tools


def _load(text: str) -> Tool:
    if text in BUILTINS:
        function = BUILTINS[text]
    else:
        source, colon, name = text.rpartition(":")
        if not (colon and source and name):
            raise UserError(
                f"tool {text!r} is not built in{nearest(text, BUILTINS)}; use one of {', '.join(BUILTINS)}, "
                f"package.module:function or path/to/file.py:function in {TOOL.key}"
            )
        function = import_named(TOOL, text, source, name)
    if not inspect.isfunction(function):
        raise UserError(
            f"tool {text!r} is a {type(function).__name__}, not a function; correct {TOOL.key}"
        )
    return Tool(text, function.__name__, function)


UNKNOWN = "unknown"
# Of one answer; the budget of a conversation's tokens is smaller.
LONGEST_ANSWER = 1 << 14
# Beyond a deadline: for starting a process for each call.
GRACE_SECONDS = 2.0


@dataclass(frozen=True)
class ToolAnswer:
    """What the model reads; `failure` is the kind of what went wrong, None for a tool's own answer."""

    text: str
    failure: str | None = None

    @classmethod
    def of(cls, answer: Any) -> ToolAnswer:
        """Makes the answer of what a tool returned. Raises TypeError for what no tool answers."""
        if isinstance(answer, CallFailure):
            return cls(f"Error: {answer.message}", answer.kind)
        if not isinstance(answer, str):
            raise TypeError(answer)
        return cls(answer)


@dataclass(frozen=True)
class PlacedCall:
    """Call number `position` of a turn of `sample`."""

    sample: int
    position: int
    call: ToolCall


class ToolPool:
    """Runs the tools `texts` (rl_config.tools), which have `names`. The worker starts with the first calls."""

    def __init__(self, texts: Sequence[str], names: Sequence[str], limits: CallLimits) -> None:
        self._names, self._limits = frozenset(names), limits
        self._bounded = BOUNDED.intersection(texts)
        load = partial(ToolService, tuple(texts), LONGEST_ANSWER)
        self._worker = Worker(load, TOOL, ", ".join(texts), limits.memory)
        self._numbers = count()
        # By number, the calls that are still to be answered; by sample, the answers to a turn.
        self._asked: dict[int, PlacedCall] = {}
        self._answers: dict[int, list[ToolAnswer | None]] = {}
        self._ready_since = math.inf

    def ask(
        self, turns: Mapping[int, Sequence[ToolCall]], patience: float = math.inf
    ) -> dict[int, list[ToolAnswer]]:
        """Runs the calls of turns, by sample, beside what is still to be answered; returns the turns that are answered.

        One is waited for if there is any, and all until one has been there for `patience` seconds. What fails is
        reported to the model.
        """
        bounded, isolated = dict[int, PlacedCall](), dict[int, PlacedCall]()
        for sample, calls in turns.items():
            answers = self._answers[sample] = [self._refusal(call) for call in calls]
            self._note_ready(sample, time.monotonic())
            for position, call in enumerate(calls):
                if answers[position] is None:
                    by_number = bounded if call.name in self._bounded else isolated
                    by_number[next(self._numbers)] = PlacedCall(sample, position, call)
        self._begin(isolated | self._run_bounded(bounded), True)
        failure = self._collect(lambda: self._ready_since + patience)
        self._fail([*self._asked], failure)
        whole = {
            sample: [answer for answer in answers if answer is not None]
            for sample, answers in self._answers.items()
            if None not in answers
        }
        for sample in whole:
            del self._answers[sample]
        self._ready_since = math.inf
        return whole

    def end_all(self) -> None:
        """Ends the calls that are still to be answered."""
        if self._asked:
            self._worker.stop()
        self._asked.clear()
        self._answers.clear()
        self._ready_since = math.inf

    def _refusal(self, call: ToolCall) -> ToolAnswer | None:
        if call.error is not None:
            return ToolAnswer(f"Error: {call.error}", call.failure)
        if call.name not in self._names:
            known = ", ".join(sorted(self._names))
            return ToolAnswer(f"Error: there is no tool {call.name!r}; there are {known}", UNKNOWN)
        return None

    def _run_bounded(self, calls: Mapping[int, PlacedCall]) -> dict[int, PlacedCall]:
        """Runs calls in the worker itself; returns those that were not answered because it has ended."""
        others = [*self._asked]
        self._begin(calls, False)
        failure = self._collect(
            lambda: math.inf if calls.keys() & self._asked.keys() else -math.inf
        )
        self._fail(others, failure)
        return {n: self._asked.pop(n) for n in calls if n in self._asked}

    def _begin(self, calls: Mapping[int, PlacedCall], isolated: bool) -> None:
        """Starts calls, each in a process of its own if `isolated`."""
        if not calls:
            return
        tasks = {n: Task(own.call, n if isolated else None) for n, own in calls.items()}
        deadline = self._limits.deadline
        self._worker.begin(tasks, deadline, deadline + GRACE_SECONDS)
        self._asked |= calls

    def _collect(self, until: Callable[[], float]) -> CallFailure | None:
        if not self._asked:
            return None
        seconds = self._limits.deadline + GRACE_SECONDS
        failure = self._worker.collect(seconds, self._record, until=until)
        self._worker.take_output()
        return failure

    def _record(self, number: int, answer: Any, at: float) -> None:
        read = ToolAnswer.of(answer)
        own = self._asked.pop(number)
        self._answers[own.sample][own.position] = read
        self._note_ready(own.sample, at)

    def _note_ready(self, sample: int, at: float) -> None:
        if None not in self._answers[sample]:
            self._ready_since = min(self._ready_since, at)

    def _fail(self, numbers: Sequence[int], failure: CallFailure | None) -> None:
        if failure is not None:
            for number in numbers:
                if number in self._asked:
                    self._record(number, failure, time.monotonic())

    def close(self) -> None:
        """Ends the worker and whatever it started."""
        self._worker.close()


class ToolService:
    """Calls tools by name in a worker process. `texts` are rl_config.tools; an answer has at most `longest` letters."""

    description = None

    def __init__(self, texts: Sequence[str], longest: int) -> None:
        self._functions = {tool.name: tool.function for tool in load_tools(texts)}
        self._longest = longest

    def answer(self, content: ToolCall) -> str | CallFailure:
        try:
            return self._as_text(self._functions[content.name](**content.arguments))
        except MemoryError as error:
            return CallFailure(MEMORY, describe(error))
        except BaseException as error:
            return CallFailure(RAISED, describe(error))

    def _as_text(self, value: Any) -> str | CallFailure:
        if value is None:
            return CallFailure(BAD_RESULT, "it returned nothing")
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                message = f"it returned a {type(value).__name__}, which is not text"
                return CallFailure(BAD_RESULT, message)
        if len(value) > self._longest:
            value = f"{value[: self._longest]} ... ({len(value) - self._longest} letters left out)"
        return value
