"""Scores a rollout with the rewards of rank 0 and shares what came of it with every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mindgrpo.algorithm.types import Messages, Rollout
from mindgrpo.backend.contract import Backend
from mindgrpo.data.prompts import Prompt, columns_of
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.rewards.call import own_columns
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.scores import Scores


def number(value: float) -> float | None:
    """None for nan: a sample that a reward did not score."""
    return None if value != value else float(value)


def turns_of(messages: Messages) -> list[str]:
    """What the policy wrote, turn by turn."""
    return [message["content"] for message in messages if message["role"] == "assistant"]


class ScoringFailed(RuntimeError):
    """The reward side of rank 0 failed as a whole; raised on every rank, so that none waits for it."""


@dataclass(frozen=True)
class Scored:
    """`texts` are the decoded completions on rank 0, where they were scored, and empty elsewhere."""

    scores: Scores
    texts: list[str]

    def rows(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Iterator[dict[str, Any]]:
        """One a sample of `rollout`, on the rank that has the texts; `prompts` one a sample."""
        per_function = self.scores.per_function
        for i, prompt in enumerate(prompts):
            turns = {"messages": list(messages)} if (messages := rollout.messages[i]) else {}
            yield {
                "prompt": prompt.text,
                "completion": self.texts[i],
                **turns,
                "answer": prompt.answer,
                "finish_reason": rollout.finish_reasons[i],
                "length": int(rollout.action_lengths[i]),
                "rewards": {name: number(values[i]) for name, values in per_function.items()},
            }

    def with_replaced(self, indices: Sequence[int], fresh: Scored) -> Scored:
        """`fresh`'s samples at `indices`, in order."""
        texts = list(self.texts)
        for index, text in zip(indices, fresh.texts, strict=False):
            texts[index] = text
        return Scored(self.scores.with_replaced(indices, fresh.scores), texts)


@dataclass(frozen=True)
class RolloutScorer:
    """`rewards` and their worker processes are on rank 0 alone; None on the others."""

    rewards: Scorer | None
    tokenizer: Tokenizer
    backend: Backend

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Scored:
        """Rewards of all samples, `prompts` one a sample; all ranks together, the same on each.

        A sample that a reward failed on has the mean of its group's others as its total. Raises ScoringFailed.
        """
        texts: list[str] = []
        outcome: Any = None
        if self.backend.rank == 0:
            try:
                texts, outcome = self._score_here(rollout, prompts)
            except Exception as error:  # whatever it is, the other ranks wait for an answer
                outcome = f"{type(error).__name__}: {error}"
        shared = self.backend.world.gather_objects(outcome)[0]
        if isinstance(shared, str):
            raise ScoringFailed(f"the rewards could not be computed on rank 0: {shared}")
        return Scored(shared.filled(rollout.group_ids), texts)

    def _score_here(self, rollout: Rollout, prompts: Sequence[Prompt]) -> tuple[list[str], Scores]:
        assert self.rewards is not None
        ids = [tokens.tolist() for tokens in rollout.completion_ids]
        # Of a conversation its last turn: what tools answered is not the policy's.
        texts = [
            turns_of(messages)[-1] if messages else self.tokenizer.decode(tokens)
            for tokens, messages in zip(ids, rollout.messages, strict=True)
        ]
        own = own_columns([prompt.text for prompt in prompts], ids, rollout.finish_reasons)
        own["completion_lengths"] = rollout.action_lengths.tolist()
        if any(rollout.messages):
            own["messages"] = [list(messages) for messages in rollout.messages]
        answers = [prompt.answer for prompt in prompts]
        # A data set's own column of such a name wins: its author knows what it is for.
        columns, total = own | columns_of(prompts), len(texts) * len(self.rewards.names)
        with self.backend.health.counting("rewards", total, self.rewards.num_done):
            return texts, self.rewards.score(texts, answers, columns)

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()
