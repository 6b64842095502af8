"""Conversations of ids alone: a turn whose last id is no multiple of 4 calls a tool, which answers with ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.tool_turns import ToolTurns
from mindgrpo.tools.calls import ToolCall
from mindgrpo.tools.pool import ToolAnswer


class Ids:
    """For a tokenizer: a text is the ids in digits."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))


class AnyEnd:
    """Equal to every stop id."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    def __hash__(self) -> int:
        return 0


class Suffix:
    end_id = AnyEnd()

    def ids(self, messages: Sequence[Any]) -> list[int]:
        return [int(word) for message in messages for word in message["content"].split()]


class Pool:
    def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        return [ToolAnswer(str(32 + len(call.name))) for call in calls]

    def close(self) -> None:
        """Nothing was started."""


def parse(text: str) -> list[ToolCall]:
    words = text.split()
    return [ToolCall("x" * len(words))] if words and int(words[-1]) % 4 else []


def scripted(max_turns: int, is_first: bool) -> Conversations | None:
    if max_turns == 1:
        return None
    pool = Pool() if is_first else None
    return Conversations(Ids(), Suffix(), ToolTurns(parse, pool), max_turns)  # type: ignore[arg-type]
