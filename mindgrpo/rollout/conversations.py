"""Conversations of several turns on any engine: the policy writes, a responder answers, the policy goes on.

A responder is tools (tool_turns.py) or an environment (environment_turns.py). Tokens in, tokens out: what the policy
wrote stays as it was drawn; what comes between its turns is context, which `action_mask` leaves out. All unfinished
conversations of a round go to the engine together, so that a slot whose conversation waits is another's. The noise of a
turn is its own, under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mindgrpo.algorithm.types import FAILED, LENGTH, MAX_TURNS, STOPPED, Completion
from mindgrpo.data.examples import Example, Message
from mindgrpo.data.prompts import Fitted, PromptForm
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.errors import UserError
from mindgrpo.rewards.outcome import BAD_RESULT, Failure
from mindgrpo.rollout.engine import Request


@dataclass(frozen=True)
class Reply:
    """What a responder says to a turn, or to open a conversation.

    `messages` come after the turn (or are the prompt); the key `failure` of one is not shown to the model. `turn` is
    kept with the policy's turn. If the reply `is_last`, the conversation ends, and the messages are left out.
    """

    messages: Sequence[Message] = ()
    turn: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    has_failed: bool = False

    @classmethod
    def failed(cls, failure: Failure) -> Reply:
        """Of an environment; nothing is known of the turn's reward then."""
        turn = {"reward": None, "failure": failure.kind, "error": failure.message}
        return cls((), turn, is_last=True, has_failed=True)


# Makes the completions of a round, of which number `turn`, from 0, is given.
Generate = Callable[[Sequence[Request], int], list[Completion]]
# What all ranks ask, and the replies, by sample; all ranks together, the same replies on each.
Asked = Mapping[int, Any]
Replies = Mapping[int, Reply]
Answer = Callable[[Asked], Replies]


class Responder(Protocol):
    """What answers turns; every rank has one, and that of one rank works for all."""

    @property
    def runs_here(self) -> bool: ...

    @property
    def answers_every_turn(self) -> bool:
        """Whether it gets turns that nothing can follow, too: those that were cut, and the last one."""

    def asks(self, conversation: Conversation, written: str) -> Any:
        """What to ask after the last turn, which is `written` with its special tokens; None ends the conversation."""

    def answer(self, asked: Asked) -> Replies:
        """Where it `runs_here`."""

    def end_rollout(self) -> None:
        """No conversation goes on after this."""

    def close(self) -> None: ...


@dataclass
class Conversation:
    """One sample so far. `room` is how many tokens it may still have, context included."""

    prompt: np.ndarray
    room: int
    tokens: list[np.ndarray] = field(default_factory=list)
    masks: list[np.ndarray] = field(default_factory=list)
    logps: list[np.ndarray] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str = STOPPED
    not_opened: Reply | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether its last turn ended as a turn does."""
        return self.finish_reason == STOPPED

    def add_turn(self, completion: Completion, text: str) -> None:
        self._add(completion.tokens, completion.logps, True)
        self.finish_reason = completion.finish_reason
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, ids: Sequence[int]) -> None:
        self._add(np.array(ids, np.int32), np.zeros(len(ids), np.float32), False)

    def end(self, reply: Reply) -> None:
        """With what the reply says of its last turn."""
        self.messages[-1].update(reply.turn)
        if reply.has_failed:
            self.finish_reason = FAILED

    def _add(self, tokens: np.ndarray, logps: np.ndarray, is_action: bool) -> None:
        self.tokens.append(tokens)
        self.logps.append(logps)
        self.masks.append(np.full(len(tokens), is_action))
        self.room -= len(tokens)

    def completion(self, sample: int, version: int) -> Completion:
        return Completion(
            sample,
            np.concatenate(self.tokens),
            np.concatenate(self.logps),
            self.finish_reason,
            version,
            np.concatenate(self.masks),
            tuple(self.messages),
            self.prompt,
        )


@dataclass(frozen=True)
class Conversations:
    """`suffix` is of the tokenizer's template, with the schemas of tools if there are any.

    A conversation has at most `max_turns` turns of the policy. With `form` the responder opens each, with messages that
    this makes a prompt of; without, the prompts are those of the requests.
    """

    tokenizer: Tokenizer
    suffix: TurnSuffix
    responder: Responder
    max_turns: int
    form: PromptForm | None = None

    def run(
        self,
        requests: Sequence[Request],
        max_tokens: int,
        version: int,
        generate: Generate,
        answer: Answer,
        opening: Callable[[int], Any] | None = None,
    ) -> list[Completion]:
        """One Completion a sample, in the order of the requests; the ranks of a replica alike.

        `max_tokens` limits the tokens of a conversation, context included, where a request does not. `opening` is what
        is asked to open a sample's, where the responder does that.
        """
        running: dict[int, Conversation] = {}
        for request in requests:
            limits = request.max_tokens or (max_tokens,) * len(request.samples)
            for sample, limit in zip(request.samples, limits, strict=True):
                running[sample] = Conversation(request.prompt, limit)
        try:
            waiting = list(requests)
            if self.form is not None:
                if opening is None:
                    raise ValueError("an environment needs the rows of the prompts")
                replies = answer({sample: opening(sample) for sample in running})
                waiting = self._opened(running, replies, self.form)
            for turn in range(self.max_turns):
                is_last = turn + 1 == self.max_turns
                asked = self._turn(generate(waiting, turn), running, is_last)
                replies = answer(asked)
                going_on = (self._go_on(i, running[i], replies[i], is_last) for i in asked)
                waiting = [request for request in going_on if request is not None]
                # On all ranks alike, or one would wait for another.
                if all(reply.is_last for reply in replies.values()):
                    break
        finally:
            self.responder.end_rollout()
        return [one.completion(sample, version) for sample, one in running.items()]

    def close(self) -> None:
        """Ends what answers."""
        self.responder.close()

    def _opened(
        self, running: Mapping[int, Conversation], replies: Replies, form: PromptForm
    ) -> list[Request]:
        """For the first turns; samples with one prompt share a request."""
        by_prompt: dict[tuple[bytes, bool], list[int]] = {}
        for sample, one in running.items():
            reply = replies[sample]
            prompt = reply if reply.has_failed else prompt_of(reply.messages, form)
            if isinstance(prompt, Reply):
                # Every sample has a token, or it could not be packed and scored as the others are.
                one.not_opened, one.room = prompt, 1
            else:
                one.prompt = prompt
            key = one.prompt.tobytes(), one.not_opened is None
            by_prompt.setdefault(key, []).append(sample)
        return [
            Request(
                running[samples[0]].prompt,
                tuple(samples),
                tuple(running[sample].room for sample in samples),
            )
            for samples in by_prompt.values()
        ]

    def _turn(
        self,
        completions: Sequence[Completion],
        running: Mapping[int, Conversation],
        is_last: bool,
    ) -> dict[int, Any]:
        """Adds a turn to each; what the responder is asked, by sample."""
        asked: dict[int, Any] = {}
        for completion in completions:
            one = running[completion.sample]
            ids = completion.tokens.tolist()
            one.add_turn(completion, self.tokenizer.decode(ids))
            if one.not_opened is not None:
                one.end(one.not_opened)
                continue
            every = self.responder.answers_every_turn
            if not every and not self._can_go_on(one):
                continue
            # With special tokens, which may be a part of a call.
            question = self.responder.asks(one, self.tokenizer.decode(ids[:-1], False))
            if question is not None and is_last and not every:
                one.finish_reason = MAX_TURNS
            elif question is not None:
                asked[completion.sample] = question
        return asked

    def _can_go_on(self, one: Conversation) -> bool:
        return one.has_stopped and one.tokens[-1][-1:].tolist() == [self.suffix.end_id]

    def _go_on(self, sample: int, one: Conversation, reply: Reply, is_last: bool) -> Request | None:
        """What is asked of the engine next; None where the conversation ends."""
        one.end(reply)
        if reply.is_last or not self._can_go_on(one):
            return None
        if is_last:
            one.finish_reason = MAX_TURNS
            return None
        try:
            ids = self.suffix.ids([_shown(message) for message in reply.messages])
        except UserError as error:  # the template cannot render what an environment made up
            if self.form is None:
                raise
            one.end(Reply.failed(Failure(BAD_RESULT, str(error))))
            return None
        if len(ids) >= one.room:
            one.finish_reason = LENGTH
            return None
        one.messages += [dict(message) for message in reply.messages]
        one.add_context(ids)
        return Request(np.concatenate([one.prompt, *one.tokens]), (sample,), (one.room,))


def _shown(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "failure"}


def prompt_of(messages: Sequence[Message], form: PromptForm) -> np.ndarray | Reply:
    """int32 [n], or why there is none."""
    try:
        fitted = form.encoded(Example(tuple(messages), ""))
    except UserError as error:
        return Reply.failed(Failure(BAD_RESULT, str(error)))
    if isinstance(fitted, Fitted):
        return np.array(fitted.ids, np.int32)
    too_long = (
        f"its first messages are {fitted} long and max_prompt_length is {form.max_prompt_length}"
    )
    return Reply.failed(Failure(BAD_RESULT, too_long))


def run_together(own: Asked, responder: Responder, gather: Callable[[Any], list[Any]]) -> Replies:
    """Gathers what every rank asks, has it answered where the responder runs, and gives all replies to all ranks.

    `own` is empty on ranks that repeat another's. Raises RuntimeError on every rank where the responder failed.
    """
    asked = {sample: question for part in gather(own) for sample, question in part.items()}
    if not asked:
        return {}
    outcome: Any = None
    if responder.runs_here:
        try:
            outcome = responder.answer(asked)
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            outcome = f"{type(error).__name__}: {error}"
    shared: Any = next(part for part in gather(outcome) if part is not None)
    if isinstance(shared, str):
        raise RuntimeError(f"the turns could not be answered: {shared}")
    return shared
