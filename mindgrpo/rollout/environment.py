"""Answers turns with an environment, and reads rewards and metrics from the conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import Messages
from mindgrpo.config import Config, memory_bytes
from mindgrpo.data.examples import Message
from mindgrpo.data.prompts import Prompt, PromptForm, PromptSet
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.environments.contract import ENVIRONMENT, Opening, Question, Result, load_environment
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.errors import UserError
from mindgrpo.rewards.call import RewardResult
from mindgrpo.rollout.conversations import Reply, prompt_of
from mindgrpo.workers.protocol import CallFailure, CallLimits


@dataclass(frozen=True)
class EnvironmentTurns:
    """`pool` is on one rank alone."""

    pool: EnvironmentPool | None

    @property
    def runs_here(self) -> bool:
        return self.pool is not None

    @property
    def answers_every_turn(self) -> bool:
        return True

    def asks(self, turn: dict[str, Any], before: Sequence[Message], written: str) -> str:
        """Returns the turn without special tokens, as rewards get it."""
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
    if isinstance(result, CallFailure):
        return Reply.failed(result)
    if isinstance(question, Opening):
        return Reply(result.messages)
    turn = {"reward": result.reward, "done": result.is_done}
    return Reply(result.messages, turn, result.is_done)


# The rewards' name among those of reward functions.
NAME = "environment"
CORRECT = f"; correct the class or {ENVIRONMENT.key}"


@dataclass(frozen=True)
class Trial:
    """Holds one conversation: its prompt, and `messages`, one turn of the policy and what was answered."""

    text: str
    num_tokens: int
    messages: Messages


@dataclass(frozen=True)
class EnvironmentForm:
    """Holds what every rank knows of rl_config.environment: its name, and how its messages become tokens."""

    text: str
    form: PromptForm
    suffix: TurnSuffix
    limits: CallLimits
    names: tuple[str, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()

    def check(self, prompts: PromptSet) -> Trial:
        """Resets an environment with the first row and steps it with the gold answer. Raises UserError."""
        first = prompts[0]
        opening, completion = Opening(first.row, "check"), first.row["answer"] or "?"
        pool = EnvironmentPool(self.text, self.limits)
        try:
            reply = reply_to(opening, pool.ask({0: opening})[0])
            prompt = reply if reply.has_failed else prompt_of(reply.messages, self.form)
            if not isinstance(prompt, np.ndarray):
                # Messages that make no prompt have a remedy of their own.
                remedy = CORRECT if reply.has_failed else ""
                raise self._fails("reset", first, f"{prompt.turn['error']}{remedy}")
            reply = reply_to(completion, pool.ask({0: completion})[0])
            if reply.has_failed:
                raise self._fails(f"step({completion!r})", first, f"{reply.turn['error']}{CORRECT}")
            pool.end_all()
        finally:
            pool.close()
        turn = {"role": "assistant", "content": completion, **reply.turn}
        answered = () if reply.is_last else reply.messages
        text = self.form.tokenizer.decode(prompt.tolist(), skip_special_tokens=False)
        return Trial(text, len(prompt), (turn, *answered))

    def _fails(self, call: str, prompt: Prompt, error: str) -> UserError:
        where = prompt.example.where
        return UserError(f"environment {self.text!r}: {call} fails on the row of {where}: {error}")


def read_environment(config: Config, tokenizer: Tokenizer) -> EnvironmentForm | None:
    """Reads the settings and imports the user's module; None without an environment. Raises UserError."""
    rl = config.rl_config
    if rl.environment is None:
        return None
    load_environment(rl.environment)
    longest = config.generate_config.max_prompt_length
    form = PromptForm(tokenizer, longest, system_prompt=rl.system_prompt or "")
    limits = CallLimits(rl.environment_deadline, memory_bytes(config.reward_config.memory))
    return EnvironmentForm(rl.environment, form, TurnSuffix(tokenizer, role="user"), limits)


def environment_turns(environment: EnvironmentForm, runs_here: bool) -> EnvironmentTurns:
    pool = EnvironmentPool(environment.text, environment.limits) if runs_here else None
    return EnvironmentTurns(pool)


def environment_weight(config: Config) -> float | None:
    """Returns the weight of an environment's rewards; None without one."""
    has_one = config.rl_config.environment is not None
    return config.reward_config.environment_weight if has_one else None


def turns_of(messages: Messages) -> list[Mapping[str, Any]]:
    """Returns the policy's messages."""
    return [message for message in messages if message["role"] == "assistant"]


def rewards_in(conversations: Sequence[Messages]) -> RewardResult:
    """Sums each conversation's rewards; one whose environment failed has a failure instead."""
    result = RewardResult()
    for index, messages in enumerate(conversations):
        turns = turns_of(messages)
        failed = next((turn for turn in turns if turn.get("failure")), None)
        if failed is not None:
            result.record(index, CallFailure(failed["failure"], failed["error"]))
        else:
            result.record(index, float(sum(turn["reward"] for turn in turns)))
    return result


def turn_rewards(
    conversations: Sequence[Messages], weight: float, others: np.ndarray, failed: np.ndarray
) -> list[np.ndarray]:
    """Returns float64 [turns] per sample: an environment's rewards, weighted; the last turn's also has `others`.

    `others` float [samples] are totals of reward functions. All are nan for samples of which a reward `failed`, bool
    [samples]: nothing is learnt there.
    """
    rewards = []
    for messages, other, has_failed in zip(conversations, others, failed, strict=True):
        turns = turns_of(messages)
        if has_failed:
            rewards.append(np.full(len(turns), np.nan))
            continue
        own = weight * np.array([turn["reward"] for turn in turns], np.float64)
        own[-1] += float(other)
        rewards.append(own)
    return rewards


def environment_metrics(conversations: Sequence[Messages]) -> dict[str, float]:
    """Computes per conversation: turns, the shares that ended done or failed; and the mean reward of a turn."""
    count = max(1, len(conversations))
    turns = [turns_of(messages) for messages in conversations]
    rewards = [turn["reward"] for own in turns for turn in own if turn["reward"] is not None]
    return {
        "environment/turns": sum(map(len, turns)) / count,
        "environment/turn_reward": float(np.mean(rewards)) if rewards else 0.0,
        "environment/done_fraction": sum(bool(own[-1].get("done")) for own in turns) / count,
        "environment/failures": sum(bool(own[-1].get("failure")) for own in turns) / count,
    }
