"""Conversations of several turns on any engine: the policy writes, a responder answers, the policy continues.

A responder is tools (tools.py) or an environment (environment.py). Tokens in, tokens out: what the policy
wrote stays as it was drawn; what comes between its turns is context, which `action_mask` leaves out. All conversations
whose replies are there go to the engine together; a slow reply holds up its own conversation alone. The noise of a turn
is its own, under every layout and in whatever order replies come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mindgrpo.algorithm.sample import FAILED, LENGTH, MAX_TURNS, STOPPED, Request, Sample
from mindgrpo.backend.rank_consistency import on_one_rank
from mindgrpo.data.examples import Example
from mindgrpo.data.image_prompts import UNNUMBERED
from mindgrpo.data.images import ImageFile
from mindgrpo.data.messages import Message
from mindgrpo.data.prompts import Fitted, PromptForm
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.errors import UserError
from mindgrpo.workers.protocol import BAD_RESULT, CallFailure

UNREADABLE = "Error: an answer holds a token that the model does not have"


@dataclass(frozen=True)
class Reply:
    """A responder's reply to a turn of the policy, or the opening of a conversation.

    `messages` come after the turn (or are the prompt); the key `failure` of one is not shown to the model. `turn` is
    kept with the policy's turn. If the reply `is_last`, the conversation ends, and the messages are left out. An
    opening's `images` are those of its messages in order, with their files' bytes.
    """

    messages: Sequence[Message] = ()
    turn: Mapping[str, Any] = field(default_factory=dict)
    is_last: bool = False
    has_failed: bool = False
    images: Sequence[ImageFile] = ()

    @classmethod
    def failed(cls, failure: CallFailure) -> Reply:
        """Makes the reply of an environment that failed; nothing is known of the turn's reward then."""
        turn = {"reward": None, "failure": failure.kind, "error": failure.message}
        return cls((), turn, is_last=True, has_failed=True)

    @property
    def unreadable(self) -> Reply:
        """Makes the reply of tools of which one answered with a token that the model does not have."""
        failed = {"content": UNREADABLE, "failure": BAD_RESULT}
        return replace(self, messages=[{**message, **failed} for message in self.messages])


# Draws the samples of requests; all ranks together, also those that have none.
Generate = Callable[[Sequence[Request]], list[Sample]]
# What all ranks ask, and the replies, by sample.
Asked = Mapping[int, Any]
Replies = Mapping[int, Reply]
# A value of each rank, in the ranks' order, on all of them.
Gather = Callable[[Any], list[Any]]


def alone(value: Any) -> list[Any]:
    """Gathers from a single rank."""
    return [value]


class Responder(Protocol):
    """Answers turns; every rank has one, and that of one rank answers for all."""

    @property
    def runs_here(self) -> bool: ...

    @property
    def answers_every_turn(self) -> bool:
        """Returns whether it also gets turns that nothing can follow: those that were cut, and the last one."""

    def asks(self, turn: dict[str, Any], before: Sequence[Message], written: str) -> Any:
        """Returns the question after the message `turn`, to which it may add; None ends the conversation.

        `written` is the turn with its special tokens, `before` are the messages before it.
        """

    def answer(self, asked: Asked, patience: float) -> Replies:
        """Takes in what was asked, by sample, and returns the replies that are there; called where it `runs_here`.

        It waits for one if any is pending, here or from calls before, and for all until one has been there for
        `patience` seconds.
        """

    def end_rollout(self) -> None:
        """Ends what it keeps for conversations; called when none continues, or where a rollout fails."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Conversations:
    """`suffix` is of the tokenizer's template, with the schemas of tools if there are any.

    A conversation has at most `max_turns` turns of the policy. With `form` the responder opens each, with messages that
    this makes a prompt of; without, the prompts are those of the requests. All ranks make their calls together, and
    `gather` what each of them asks; where one rank `asks` for others that have the same samples, these ask nothing.
    `encode` makes features of the images of prompts, on all ranks together.
    """

    tokenizer: Tokenizer
    suffix: TurnSuffix
    responder: Responder
    max_turns: int
    form: PromptForm | None = None
    gather: Gather = alone
    encode: Callable[[Sequence[np.ndarray]], None] | None = None

    def run(
        self,
        requests: Sequence[Request],
        max_tokens: int,
        generate: Generate,
        asks: bool = True,
        openings: Asked | None = None,
        ended: Callable[[list[Sample]], None] | None = None,
    ) -> list[Sample]:
        """Returns the samples in the order of the requests; the ranks of a replica alike.

        `max_tokens` limits the tokens of a conversation, context included. `openings` are what is asked to open each
        sample, where the responder does that. `ended` is called with the conversations that have ended after a turn.
        """
        samples = {
            i: Sample.begun(request.prompt, i) for request in requests for i in request.samples
        }
        waiting, not_opened = list(requests), dict[int, Reply]()
        try:
            if self.form is not None:
                if openings is None:
                    raise ValueError("an environment needs the rows of the prompts")
                # All of them: samples with one prompt share it.
                replies = self._ask(openings, asks, Unanswered())
                samples, not_opened = self._opened(samples, replies, self.form)
                waiting = _first_requests(samples, not_opened, max_tokens)
            unanswered, goes_on = Unanswered(), True
            while goes_on:
                began = time.monotonic()
                written = generate(waiting)
                drawn = {w.number: samples[w.number].with_written(w) for w in written}
                for i in not_opened.keys() & drawn.keys():
                    refused = drawn.pop(i)
                    samples[i] = _ended(refused, not_opened[i], self._message(refused))
                after = self._after_replies(drawn, unanswered, max_tokens, asks, began)
                samples |= after
                if ended is not None:
                    ended([own for own in after.values() if own.finish_reason is not None])
                waiting = [
                    sample.request(i, max_tokens - len(sample.tokens), sample.num_turns)
                    for i, sample in after.items()
                    if sample.finish_reason is None
                ]
                # On all ranks alike, or one would wait for another.
                goes_on = unanswered.goes_on
        finally:
            self.responder.end_rollout()
        return list(samples.values())

    def next_turns(
        self, drawn: Mapping[int, Sample], max_tokens: int, asks: bool = True
    ) -> dict[int, Sample]:
        """Returns the samples after their turns were answered, all of them.

        A sample with a finish reason has ended its turn: it is answered and continues, or has ended.
        """
        written = {i: sample for i, sample in drawn.items() if sample.finish_reason is not None}
        return {**drawn, **self._after_replies(written, Unanswered(), max_tokens, asks)}

    def _after_replies(
        self,
        drawn: Mapping[int, Sample],
        unanswered: Unanswered,
        max_tokens: int,
        asks: bool,
        began: float = -math.inf,
    ) -> dict[int, Sample]:
        """Asks after the turns that were drawn; returns the samples that have ended and those with replies by now."""
        after, asked = dict[int, Sample](), dict[int, Any]()
        for i, sample in drawn.items():
            turn = self._message(sample)
            question = self._question(sample, turn)
            is_last = sample.num_turns + 1 >= self.max_turns
            if question is not None and is_last and not self.responder.answers_every_turn:
                sample, question = replace(sample, finish_reason=MAX_TURNS), None
            if question is None:
                after[i] = _ended(sample, Reply(), turn)
            else:
                asked[i], unanswered.own[i] = question, (sample, turn)
        for i, reply in self._ask(asked, asks, unanswered, began).items():
            if i in unanswered.own:
                after[i] = self._answered(*unanswered.own.pop(i), reply, max_tokens)
        return after

    def close(self) -> None:
        """Closes the responder."""
        self.responder.close()

    def _ask(
        self, own: Asked, asks: bool, unanswered: Unanswered, began: float = -math.inf
    ) -> Replies:
        return run_together(own if asks else {}, self.responder, self.gather, unanswered, began)

    def _opened(
        self, samples: Mapping[int, Sample], replies: Replies, form: PromptForm
    ) -> tuple[dict[int, Sample], dict[int, Reply]]:
        """Returns the samples with their own prompts, and the replies that gave none."""
        opened, not_opened = dict(samples), {}
        numbers = self._numbered(replies, form)
        for i, sample in samples.items():
            reply = replies[i]
            prompt = reply if reply.has_failed else prompt_of(reply, form, numbers.get(i, ()))
            if isinstance(prompt, Reply):
                not_opened[i] = prompt
            else:
                opening = form.with_system(tuple(reply.messages))
                opened[i] = replace(sample, prompt=prompt, opening=opening)
        return opened, not_opened

    def _numbered(self, replies: Replies, form: PromptForm) -> dict[int, list[int]]:
        """Numbers and encodes the images of all openings, in the order of samples: on every rank alike."""
        images = form.images
        if images is None or not any(reply.images for reply in replies.values()):
            return {}
        numbers = {
            i: [images.number(images.sized(own), own.in_memory) for own in replies[i].images]
            for i in sorted(replies)
        }
        every = sorted({number for own in numbers.values() for number in own})
        if self.encode is not None:
            self.encode([images.table.ids(number) for number in every])
        images.release(every)
        return numbers

    def _message(self, sample: Sample) -> dict[str, Any]:
        return {"role": "assistant", "content": self.tokenizer.decode(sample.turn.tolist())}

    def _question(self, sample: Sample, turn: dict[str, Any]) -> Any:
        if not self.responder.answers_every_turn and not self._can_go_on(sample):
            return None
        # With special tokens, which may be a part of a call.
        written = self.tokenizer.decode(sample.turn[:-1].tolist(), False)
        return self.responder.asks(turn, sample.messages, written)

    def _can_go_on(self, sample: Sample) -> bool:
        is_stopped = sample.finish_reason == STOPPED
        return is_stopped and sample.tokens[-1:].tolist() == [self.suffix.end_id]

    def _answered(
        self, sample: Sample, turn: dict[str, Any], reply: Reply, max_tokens: int
    ) -> Sample:
        ended = _ended(sample, reply, turn)
        if reply.is_last or not self._can_go_on(sample):
            return ended
        if ended.num_turns >= self.max_turns:
            return replace(ended, finish_reason=MAX_TURNS)
        try:
            ids = self.suffix.ids([*map(shown_message, reply.messages)])
        except UserError as error:  # what an environment made up, or a token that the model lacks
            if self.form is not None:
                return _ended(sample, Reply.failed(CallFailure(BAD_RESULT, str(error))), turn)
            reply = reply.unreadable
            ids = self.suffix.ids([*map(shown_message, reply.messages)])
        if len(sample.tokens) + len(ids) >= max_tokens:
            return replace(ended, finish_reason=LENGTH)
        return ended.with_answer(ids, [dict(message) for message in reply.messages])


def _ended(sample: Sample, reply: Reply, turn: Mapping[str, Any]) -> Sample:
    """Returns the sample with its last turn, and what the reply says of it."""
    reason = FAILED if reply.has_failed else sample.finish_reason
    messages = (*sample.messages, {**turn, **reply.turn})
    return replace(sample, messages=messages, finish_reason=reason)


def _first_requests(
    samples: Mapping[int, Sample], not_opened: Mapping[int, Reply], max_tokens: int
) -> list[Request]:
    """Makes the first requests; samples with one prompt share a request.

    Those that were not opened have a token too, or they could not be packed and scored as the others are.
    """
    by_prompt: dict[tuple[bytes, int], list[int]] = {}
    for i, sample in samples.items():
        limit = 1 if i in not_opened else max_tokens
        by_prompt.setdefault((sample.prompt.tobytes(), limit), []).append(i)
    return [
        Request(samples[own[0]].prompt, tuple(own), (limit,) * len(own))
        for (_, limit), own in by_prompt.items()
    ]


def shown_message(message: Message) -> Message:
    """Returns what the model gets to read of a message."""
    return {key: value for key, value in message.items() if key != "failure"}


def prompt_of(opening: Reply, form: PromptForm, numbers: Sequence[int] = ()) -> np.ndarray | Reply:
    """Returns the prompt, int32 [n], or a reply that says why there is none.

    `numbers` are those of the opening's images; without them, their features are UNNUMBERED.
    """
    try:
        fitted = form.encoded(Example(tuple(opening.messages), "", images=tuple(opening.images)))
    except UserError as error:
        return Reply.failed(CallFailure(BAD_RESULT, str(error)))
    if isinstance(fitted, Fitted):
        ids = np.array(fitted.ids, np.int32)
        if numbers and form.images is not None:
            table = form.images.table
            ids[ids == UNNUMBERED] = np.concatenate([table.ids(number) for number in numbers])
        return ids
    too_long = (
        f"its first messages are {fitted} long and max_prompt_length is {form.max_prompt_length}; raise "
        "generate_config.max_prompt_length or shorten them"
    )
    return Reply.failed(CallFailure(BAD_RESULT, too_long))


@dataclass
class Unanswered:
    """What was asked and has no reply yet: this rank's samples with the policy's turns, and the numbers of all ranks'.

    `goes_on` says whether a conversation, on any rank, may continue or has no reply yet.
    """

    own: dict[int, tuple[Sample, dict[str, Any]]] = field(default_factory=dict)
    everywhere: set[int] = field(default_factory=set)
    goes_on: bool = False


def run_together(
    own: Asked,
    responder: Responder,
    gather: Gather,
    unanswered: Unanswered,
    began: float = -math.inf,
) -> Replies:
    """Gathers what every rank asks, has it answered where the responder runs, and gives the replies to all ranks.

    These are all that are pending, or those that are there when one has waited for as long as it took since `began` (of
    time.monotonic): an engine's call takes about as long for few conversations as for many, so that what comes soon is
    worth waiting for. `own` is empty on ranks that repeat another's. Where the responder failed, raises RuntimeError or
    its UserError on every rank.
    """
    asked = {sample: question for part in gather(own) for sample, question in part.items()}
    unanswered.everywhere |= asked.keys()
    replies: Replies = {}
    if unanswered.everywhere:
        replies = on_one_rank(
            gather,
            responder.runs_here,
            lambda: responder.answer(asked, time.monotonic() - began),
            "the turns could not be answered: ",
        )
    unanswered.everywhere -= replies.keys()
    has_next = any(not reply.is_last for reply in replies.values())
    unanswered.goes_on = has_next or bool(unanswered.everywhere)
    return replies
