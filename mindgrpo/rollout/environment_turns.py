"""Answers turns with an environment: one for each conversation, which opens it, and is stepped with every turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mindgrpo.data.examples import Message
from mindgrpo.environments.contract import Opening, Question, Result
from mindgrpo.rewards.outcome import Failure
from mindgrpo.rollout.conversations import Reply


class Pool(Protocol):
    def ask(self, questions: Mapping[int, Question]) -> dict[int, Result]: ...
    def end_all(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class EnvironmentTurns:
    """`pool` is on one rank alone."""

    pool: Pool | None

    @property
    def runs_here(self) -> bool:
        return self.pool is not None

    @property
    def answers_every_turn(self) -> bool:
        return True

    def asks(self, turn: dict[str, Any], before: Sequence[Message], written: str) -> str:
        """The turn without special tokens, as rewards get it."""
        text: str = turn["content"]
        return text

    def answer(self, asked: Mapping[int, Question]) -> dict[int, Reply]:
        assert self.pool is not None
        results = self.pool.ask(asked)
        return {sample: reply_to(asked[sample], result) for sample, result in results.items()}

    def end_rollout(self) -> None:
        if self.pool is not None:
            self.pool.end_all()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def reply_to(question: Question, result: Result) -> Reply:
    if isinstance(result, Failure):
        return Reply.failed(result)
    if isinstance(question, Opening):
        return Reply(result.messages)
    turn = {"reward": result.reward, "done": result.is_done}
    return Reply(result.messages, turn, result.is_done)
