"""Loads tools and runs calls of them in a worker: users' tools in forked processes, which are ended where late."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.tools.builtin import BOUNDED, BUILTINS
from mindgrpo.tools.calls import ToolCall
from mindgrpo.user_code import Kind, describe, import_named, nearest
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
# Beyond the deadline of calls that run beside each other: for starting a process for each.
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


class ToolPool:
    """Runs the tools `texts` (rl_config.tools), which have `names`. The worker starts with the first calls."""

    def __init__(self, texts: Sequence[str], names: Sequence[str], limits: CallLimits) -> None:
        self._names, self._limits = frozenset(names), limits
        self._bounded = BOUNDED.intersection(texts)
        load = partial(ToolService, tuple(texts), LONGEST_ANSWER)
        self._worker = Worker(load, TOOL, ", ".join(texts), limits.memory)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """Returns an answer a call, within the deadline and some seconds; what fails is reported to the model."""
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
        left = [index for index in runnable if index not in answers]
        failure = self._run(calls, left, answers, True) or CallFailure(EXIT, "its process ended")
        self._worker.take_output()
        return [answers.get(index) or ToolAnswer.of(failure) for index in range(len(calls))]

    def _run(
        self,
        calls: Sequence[ToolCall],
        indices: list[int],
        answers: dict[int, ToolAnswer],
        isolated: bool,
    ) -> CallFailure | None:
        """Adds answers, each from a process of its own if `isolated`; returns why there are not all."""
        if not indices:
            return None

        def record(number: int, answer: Any) -> None:
            answers[indices[number]] = ToolAnswer.of(answer)

        tasks = [Task(calls[i], i if isolated else None) for i in indices]
        seconds = self._limits.deadline + GRACE_SECONDS
        return self._worker.ask(tasks, self._limits.deadline, seconds, record)

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
