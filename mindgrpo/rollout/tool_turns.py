"""Answers turns with tools: the calls in a turn are run, and their answers are messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mindgrpo.data.examples import Message
from mindgrpo.rollout.conversations import Reply
from mindgrpo.tools.calls import OVER_LIMIT, Parser, ToolCall
from mindgrpo.tools.pool import ToolAnswer


class Pool(Protocol):
    def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class ToolTurns:
    """`pool` is on one rank alone; a conversation has at most `max_tool_calls` calls (None: no limit)."""

    parser: Parser
    pool: Pool | None
    max_tool_calls: int | None = None

    @property
    def runs_here(self) -> bool:
        return self.pool is not None

    @property
    def answers_every_turn(self) -> bool:
        return False

    def asks(
        self, turn: dict[str, Any], before: Sequence[Message], written: str
    ) -> list[ToolCall] | None:
        calls = self.parser(written)
        if not calls:
            return None
        turn["tool_calls"] = [{"name": call.name, "arguments": call.arguments} for call in calls]
        return self._within_limit(sum(len(m.get("tool_calls", ())) for m in before), calls)

    def _within_limit(self, before: int, calls: list[ToolCall]) -> list[ToolCall]:
        most = self.max_tool_calls
        if most is None or before + len(calls) <= most:
            return calls
        allowed = max(0, most - before)
        refused = f"no more than {most} calls are allowed"
        return [
            *calls[:allowed],
            *(replace(call, error=refused, failure=OVER_LIMIT) for call in calls[allowed:]),
        ]

    def answer(self, asked: Mapping[int, Sequence[ToolCall]]) -> dict[int, Reply]:
        assert self.pool is not None
        answers = iter(self.pool.run([call for calls in asked.values() for call in calls]))
        return {
            sample: Reply([_message(call, next(answers)) for call in calls])
            for sample, calls in asked.items()
        }

    def end_rollout(self) -> None:
        """Calls leave nothing behind."""

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def _message(call: ToolCall, answer: ToolAnswer) -> dict[str, str | None]:
    return {
        "role": "tool",
        "name": call.name,
        "content": answer.text,
        "failure": answer.failure,
    }
