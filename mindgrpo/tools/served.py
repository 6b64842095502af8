"""What a worker process calls for a conversation: tools by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mindgrpo.rewards.call import Signature
from mindgrpo.rewards.outcome import BAD_RESULT, MEMORY, RAISED, Failure
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.load import load_tools
from mindgrpo.user_code import describe


class Calls(tuple[ToolCall, ...]):
    """As a task's samples."""

    def select(self, indices: Sequence[int]) -> Calls:
        return Calls(self[index] for index in indices)


class ToolCaller:
    """`texts` are rl_config.tools; an answer has at most `longest` letters."""

    signature = Signature([], [], False, True, False)

    def __init__(self, texts: Sequence[str], longest: int) -> None:
        self._functions = {tool.name: tool.function for tool in load_tools(texts)}
        self._longest = longest

    def together(self, samples: Sequence[ToolCall]) -> list[str | Failure]:
        """In this process: for tools that are bounded."""
        return [self.alone(samples, index) for index in range(len(samples))]

    def alone(self, samples: Sequence[ToolCall], index: int) -> str | Failure:
        call = samples[index]
        try:
            return self._as_text(self._functions[call.name](**call.arguments))
        except MemoryError as error:
            return Failure(MEMORY, describe(error))
        except BaseException as error:
            return Failure(RAISED, describe(error))

    def _as_text(self, value: Any) -> str | Failure:
        if value is None:
            return Failure(BAD_RESULT, "it returned nothing")
        if not isinstance(value, str):
            try:
                value = json.dumps(value, ensure_ascii=False)
            except (TypeError, ValueError):
                return Failure(
                    BAD_RESULT, f"it returned a {type(value).__name__}, which is no text"
                )
        if len(value) > self._longest:
            value = f"{value[: self._longest]} ... ({len(value) - self._longest} letters left out)"
        return value
