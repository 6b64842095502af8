"""Conversations of ids alone: a turn whose last id is no multiple of 4 calls a tool, which answers with ids.

An environment opens with ids that follow from the seed, pays for the sum of a turn's, and is done where 5 divides it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.data.examples import Example
from mindgrpo.data.messages import Message
from mindgrpo.data.prompts import Fitted
from mindgrpo.environments.contract import Observation, Opening, Question, Result
from mindgrpo.rollout.conversations import Conversations, Gather, alone
from mindgrpo.rollout.environment import EnvironmentTurns
from mindgrpo.rollout.tools import ToolTurns
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
    def ask(
        self, turns: Mapping[int, Sequence[ToolCall]], patience: float
    ) -> dict[int, list[ToolAnswer]]:
        return {
            sample: [ToolAnswer(str(32 + len(call.name))) for call in calls]
            for sample, calls in turns.items()
        }

    def end_all(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing was started."""


def parse(text: str) -> list[ToolCall]:
    words = text.split()
    return [ToolCall("x" * len(words))] if words and int(words[-1]) % 4 else []


class Environment:
    """For a pool."""

    def ask(self, questions: Mapping[int, Question], patience: float) -> dict[int, Result]:
        return {sample: answer(question) for sample, question in questions.items()}

    def end_all(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing was started."""


def answer(question: Question) -> Observation:
    if isinstance(question, Opening):
        number = zlib.crc32(question.seed.encode())
        return said(f"{3 + number % 61} {3 + number // 61 % 61}")
    assert isinstance(question, str)
    total = sum(map(int, question.split()))
    return said(str(32 + total % 7), (total % 11) / 11, total % 5 == 0)


def said(content: str, reward: float = 0.0, is_done: bool = False) -> Observation:
    return Observation(({"role": "user", "content": content},), reward, is_done)


class Form:
    max_prompt_length = 2

    images = None

    def with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        return messages

    def encoded(self, example: Example) -> Fitted:
        return Fitted(example, "", tuple(Suffix().ids(example.messages)))


def scripted(
    max_turns: int, has_environment: bool, is_first: bool, gather: Gather = alone
) -> Conversations | None:
    if max_turns == 1:
        return None
    stand_ins: dict[str, Any] = {"tokenizer": Ids(), "suffix": Suffix(), "max_turns": max_turns}
    stand_ins["gather"] = gather
    if has_environment:
        turns = EnvironmentTurns(Environment() if is_first else None)
        return Conversations(responder=turns, form=Form(), **stand_ins)  # type: ignore[arg-type]
    return Conversations(responder=ToolTurns(parse, Pool() if is_first else None), **stand_ins)
