"""Conversations of several turns on any engine: the policy writes, tools answer, the policy goes on, round by round.

Tokens in, tokens out: what the policy wrote stays as it was drawn; what comes between its turns is context, which
`action_mask` leaves out. All unfinished conversations of a round go to the engine together, so that a slot whose
conversation waits is another's. The noise of a turn is its own, under every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from mindgrpo.algorithm.types import LENGTH, MAX_TURNS, STOPPED, Completion
from mindgrpo.data.examples import Message
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.rollout.engine import Request
from mindgrpo.tools.calls import OVER_LIMIT, Parser, ToolCall
from mindgrpo.tools.pool import ToolAnswer

# Makes the completions of a round, of which number `turn`, from 0, is given.
Generate = Callable[[Sequence[Request], int], list[Completion]]
# Answers to the calls of all ranks' conversations, by sample; all ranks together, the same on each.
Calls = Mapping[int, Sequence[ToolCall]]
Answers = Mapping[int, Sequence[ToolAnswer]]
Answer = Callable[[Calls], Answers]


class Pool(Protocol):
    def run(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class TurnLimits:
    """Of a conversation: turns of the policy, and calls of tools (None: no limit)."""

    max_turns: int
    max_tool_calls: int | None = None


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
    num_calls: int = 0

    def add_turn(self, completion: Completion, text: str) -> None:
        self._add(completion.tokens, completion.logps, True)
        self.finish_reason = completion.finish_reason
        self.messages.append({"role": "assistant", "content": text})

    def add_context(self, ids: Sequence[int]) -> None:
        self._add(np.array(ids, np.int32), np.zeros(len(ids), np.float32), False)

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
        )


@dataclass(frozen=True)
class Conversations:
    """`suffix` is of the tokenizer's template with the tools of `pool`, which is on rank 0 alone."""

    tokenizer: Tokenizer
    suffix: TurnSuffix
    parser: Parser
    limits: TurnLimits
    pool: Pool | None

    def run(
        self,
        requests: Sequence[Request],
        max_tokens: int,
        version: int,
        generate: Generate,
        answer: Answer,
    ) -> list[Completion]:
        """One Completion a sample, in the order of the requests; the ranks of a replica alike.

        `max_tokens` limits the tokens of a conversation, context included, where a request does not.
        """
        running: dict[int, Conversation] = {}
        for request in requests:
            limits = request.max_tokens or (max_tokens,) * len(request.samples)
            for sample, limit in zip(request.samples, limits, strict=True):
                running[sample] = Conversation(request.prompt, limit)
        waiting = list(requests)
        for turn in range(self.limits.max_turns):
            calls = self._turn(generate(waiting, turn), running)
            if turn + 1 == self.limits.max_turns:
                for sample in calls:
                    running[sample].finish_reason = MAX_TURNS
                break
            answers = answer(calls)
            if not answers:
                break
            going_on = (self._go_on(i, running[i], answers[i]) for i in calls)
            waiting = [request for request in going_on if request is not None]
        return [one.completion(sample, version) for sample, one in running.items()]

    def close(self) -> None:
        """Ends what runs the tools."""
        if self.pool is not None:
            self.pool.close()

    def _turn(
        self, completions: Sequence[Completion], running: Mapping[int, Conversation]
    ) -> dict[int, list[ToolCall]]:
        """Adds a turn to each; the calls of those that made some, by sample."""
        calls: dict[int, list[ToolCall]] = {}
        for completion in completions:
            one = running[completion.sample]
            ids = completion.tokens.tolist()
            one.add_turn(completion, self.tokenizer.decode(ids))
            if completion.finish_reason != STOPPED or ids[-1:] != [self.suffix.end_id]:
                continue
            # With special tokens, which may be a part of a call.
            written = self.parser(self.tokenizer.decode(ids[:-1], False))
            if written:
                one.messages[-1]["tool_calls"] = [
                    {"name": call.name, "arguments": call.arguments} for call in written
                ]
                calls[completion.sample] = self._within_limit(one, written)
        return calls

    def _within_limit(self, one: Conversation, calls: list[ToolCall]) -> list[ToolCall]:
        most = self.limits.max_tool_calls
        before, one.num_calls = one.num_calls, one.num_calls + len(calls)
        if most is None or one.num_calls <= most:
            return calls
        allowed = max(0, most - before)
        refused = f"no more than {most} calls are allowed"
        return [
            *calls[:allowed],
            *(replace(call, error=refused, failure=OVER_LIMIT) for call in calls[allowed:]),
        ]

    def _go_on(
        self, sample: int, one: Conversation, answers: Sequence[ToolAnswer]
    ) -> Request | None:
        """What is asked of the engine next; None where there is no room for more than the context."""
        names = [call["name"] for call in one.messages[-1]["tool_calls"]]
        messages: list[Message] = [
            {"role": "tool", "name": name, "content": answer.text}
            for name, answer in zip(names, answers, strict=True)
        ]
        ids = self.suffix.ids(messages)
        if len(ids) >= one.room:
            one.finish_reason = LENGTH
            return None
        for message, answer in zip(messages, answers, strict=True):
            one.messages.append({**message, "failure": answer.failure})
        one.add_context(ids)
        return Request(np.concatenate([one.prompt, *one.tokens]), (sample,), (one.room,))


def run_together(
    own: Calls,
    pool: Pool | None,
    gather: Callable[[Any], list[Any]],
) -> Answers:
    """Gathers every rank's calls, runs them where the pool is, and gives all answers to all ranks.

    `own` are empty on ranks that repeat another's. Raises RuntimeError on every rank where the pool failed.
    """
    calls = {sample: list(some) for part in gather(own) for sample, some in part.items()}
    if not calls:
        return {}
    outcome: Any = None
    if pool is not None:
        try:
            answers = iter(pool.run([call for some in calls.values() for call in some]))
            outcome = {sample: [next(answers) for _ in some] for sample, some in calls.items()}
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            outcome = f"{type(error).__name__}: {error}"
    shared: Any = next(part for part in gather(outcome) if part is not None)
    if isinstance(shared, str):
        raise RuntimeError(f"the tools could not be run: {shared}")
    return shared
