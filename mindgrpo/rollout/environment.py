"""Answers turns with an environment, and reads rewards and metrics from the conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import Messages
from mindgrpo.config import Config, memory_bytes
from mindgrpo.data.examples import Example
from mindgrpo.data.image_prompts import RunImages, with_images
from mindgrpo.data.messages import Message
from mindgrpo.data.prompts import Fitted, Prompt, PromptForm, PromptSet
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.environments.contract import ENVIRONMENT, Opening, Question, Result
from mindgrpo.environments.mixture import COLUMN, Mixture
from mindgrpo.environments.pool import EnvironmentPool
from mindgrpo.errors import UserError
from mindgrpo.rewards.call import RewardResult
from mindgrpo.rollout.conversations import Reply, prompt_of, shown_message
from mindgrpo.workers.protocol import BAD_RESULT, CallFailure, CallLimits


@dataclass(frozen=True)
class EnvironmentTurns:
    """`pool` is on one rank alone. Of several environments, turns say which one the conversation met."""

    pool: EnvironmentPool | None
    mixture: Mixture | None = None
    images: RunImages | None = None
    _met: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, Question] = field(default_factory=dict)

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

    def answer(self, asked: Mapping[int, Question], patience: float) -> dict[int, Reply]:
        assert self.pool is not None
        if self.mixture is not None and not self.mixture.is_single:
            for sample, question in asked.items():
                if isinstance(question, Opening):
                    self._met[sample] = self.mixture.names[self.mixture.number_of(question)]
        self._asked.update(asked)
        return {
            sample: self._reply(sample, self._asked.pop(sample), result)
            for sample, result in self.pool.ask(asked, patience).items()
        }

    def _reply(self, sample: int, question: Question, result: Result) -> Reply:
        reply, name = reply_to(question, result, self.images), self._met.get(sample)
        return replace(reply, turn={**reply.turn, COLUMN: name}) if reply.turn and name else reply

    def end_rollout(self) -> None:
        self._met.clear()
        self._asked.clear()
        if self.pool is not None:
            self.pool.end_all()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def reply_to(question: Question, result: Result, images: RunImages | None = None) -> Reply:
    """Returns the reply that a result is; `images` are those of the run, which an opening may have."""
    if isinstance(result, CallFailure):
        return Reply.failed(result)
    if isinstance(question, Opening):
        return _opening(result.messages, images)
    turn = {"reward": result.reward, "done": result.is_done}
    return Reply(result.messages, turn, result.is_done)


def _opening(messages: Sequence[Message], images: RunImages | None) -> Reply:
    """Reads the images of an opening here, so that every rank gets the same bytes."""
    if all(isinstance(message["content"], str) for message in messages):
        return Reply(messages)
    if images is None:
        return Reply.failed(CallFailure(BAD_RESULT, NO_IMAGES))
    try:
        shown, files = with_images(messages, None, "its messages", Path())
        held = [file.in_memory() for file in files]
        for file in held:
            images.sized(file)
    except UserError as error:
        return Reply.failed(CallFailure(BAD_RESULT, str(error)))
    return Reply(shown, images=held)


# The rewards' name among those of reward functions.
NAME = "environment"
NO_IMAGES = "its messages have an image, but the model sees none; return text, or name one in actor_config.load"
# Until each of several environments was met.
MOST_ROWS_TRIED = 1000
CORRECT = f"; correct the class or {ENVIRONMENT.key}"


@dataclass(frozen=True)
class Trial:
    """Holds one conversation: its prompt, as `text` and as messages, the `opening`; and `messages`, one turn of the
    policy and what was answered.

    `two_turns` counts the tokens of two such turns and of what was answered between them; 0: there is one turn alone.
    """

    text: str
    num_tokens: int
    messages: Messages
    opening: Messages = ()
    two_turns: int = 0


@dataclass(frozen=True)
class RowsOfMixture(PromptForm):
    """As PromptForm, and raises UserError for a row that names an environment that `mixture` does not have."""

    mixture: Mixture | None = None

    def fit(self, example: Example) -> Fitted | None:
        if self.mixture is not None:
            self.mixture.named_by(example.columns, example.where)
        return super().fit(example)


@dataclass(frozen=True)
class EnvironmentForm:
    """Holds what every rank knows of rl_config.environment: names, and how messages become tokens.

    `seed` is the run's, with which rows meet one of several.
    """

    mixture: Mixture
    form: PromptForm
    suffix: TurnSuffix
    limits: CallLimits
    seed: int
    names: tuple[str, ...] = ()
    schemas: tuple[dict[str, Any], ...] = ()

    def check(self, prompts: PromptSet) -> Trial:
        """Resets each environment with a row that meets it and steps it with the gold answer. Raises UserError.

        Returns the trial with the longest prompt.
        """
        pool, trials = EnvironmentPool(self.mixture, self.limits), dict[int, Trial]()
        try:
            for prompt in prompts[:MOST_ROWS_TRIED]:
                opening = Opening(prompt.row, "check", f"{self.seed}/{prompt.index}")
                number = self.mixture.number_of(opening)
                if number not in trials:
                    trials[number] = self._try(pool, number, prompt, opening)
                if len(trials) == len(self.mixture.texts):
                    break
        finally:
            pool.close()
        return max(trials.values(), key=lambda trial: trial.num_tokens)

    def _try(self, pool: EnvironmentPool, number: int, prompt: Prompt, opening: Opening) -> Trial:
        text, where = self.mixture.texts[number], prompt.example.where
        completion = prompt.row["answer"] or "?"

        def fails(call: str, error: str) -> UserError:
            return UserError(f"environment {text!r}: {call} fails on the row of {where}: {error}")

        reply = reply_to(opening, pool.ask({number: opening})[number], self.form.images)
        ids = reply if reply.has_failed else prompt_of(reply, self.form)
        if not isinstance(ids, np.ndarray):
            # Messages that make no prompt have a remedy of their own.
            remedy = CORRECT if reply.has_failed else ""
            raise fails("reset", f"{ids.turn['error']}{remedy}")
        begun = self.form.with_system(tuple(reply.messages))
        reply = reply_to(completion, pool.ask({number: completion})[number])
        if reply.has_failed:
            raise fails(f"step({completion!r})", f"{reply.turn['error']}{CORRECT}")
        pool.end_all()
        turn = {"role": "assistant", "content": completion, **reply.turn}
        answered = () if reply.is_last else reply.messages
        tokenizer, two_turns = self.form.tokenizer, 0
        # What the template cannot render fails in the run, as a reply of this conversation.
        with suppress(UserError):
            if answered:
                ended = len(tokenizer.encode(completion)) + 1
                two_turns = 2 * ended + len(self.suffix.ids([*map(shown_message, answered)]))
        shown = tokenizer.decode(ids[ids >= 0].tolist(), skip_special_tokens=False)
        return Trial(shown, len(ids), (turn, *answered), opening=begun, two_turns=two_turns)


def read_environment(
    config: Config, tokenizer: Tokenizer, images: RunImages | None = None
) -> EnvironmentForm | None:
    """Reads the settings; None without an environment. `images` are those of the run. Raises UserError."""
    rl = config.rl_config
    if rl.environment is None:
        return None
    longest = config.generate_config.max_prompt_length
    form = PromptForm(tokenizer, longest, system_prompt=rl.system_prompt or "", images=images)
    limits = CallLimits(rl.environment_deadline, memory_bytes(config.reward_config.memory))
    suffix = TurnSuffix(tokenizer, role="user")
    return EnvironmentForm(Mixture.read(rl.environment), form, suffix, limits, rl.seed)


def environment_turns(environment: EnvironmentForm, runs_here: bool) -> EnvironmentTurns:
    mixture, limits = environment.mixture, environment.limits
    pool = EnvironmentPool(mixture, limits) if runs_here else None
    return EnvironmentTurns(pool, mixture, environment.form.images)


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
    """Computes per conversation: turns, the shares that ended done or failed; and the mean reward of a turn.

    Of several environments also the mean reward of the conversations with each.
    """
    count = max(1, len(conversations))
    turns = [turns_of(messages) for messages in conversations]
    rewards = [turn["reward"] for own in turns for turn in own if turn["reward"] is not None]
    met: dict[str, list[float]] = {}
    for index, total in rewards_in(conversations).values.items():
        name = turns[index][-1].get(COLUMN)
        if name is not None and total is not None:
            met.setdefault(name, []).append(total)
    by_name = {f"environment/{name}/reward": float(np.mean(met[name])) for name in sorted(met)}
    return {
        **by_name,
        "environment/turns": sum(map(len, turns)) / count,
        "environment/turn_reward": float(np.mean(rewards)) if rewards else 0.0,
        "environment/done_fraction": sum(bool(own[-1].get("done")) for own in turns) / count,
        "environment/failures": sum(bool(own[-1].get("failure")) for own in turns) / count,
    }
