"""Replies that come in any order: the conversations are those of replies that come together, and no one waits for all.

Does not prove that engines draw the same in smaller batches: test_invariance.py and test_kept_cache.py do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from distributed.scripted_turns import scripted
from ranks_as_threads import ThreadBackend
from ranks_as_threads import run as on_ranks

from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request, Sample
from mindgrpo.environments.contract import Opening
from mindgrpo.rollout.conversations import Conversations, Replies, Responder

TURNS, MAX_TOKENS = 6, 24
# Conversations of each rank: some have none under way when others have many.
SHARES = ((0, 1), (2, 3, 4, 5, 6, 7, 8, 9), ())


def number_of(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


@dataclass
class Late:
    """Gives back some of the replies of `responder`, in an order that follows from `seed`; all at once without one.

    Raises in call number `fails`.
    """

    responder: Any
    seed: int | None
    fails: int = -1
    held: dict[int, Any] = field(default_factory=dict)
    calls: int = 0
    ended: list[int] = field(default_factory=list)

    @property
    def runs_here(self) -> bool:
        return bool(self.responder.runs_here)

    @property
    def answers_every_turn(self) -> bool:
        return bool(self.responder.answers_every_turn)

    def asks(self, *arguments: Any) -> Any:
        return self.responder.asks(*arguments)

    def answer(self, asked: Mapping[int, Any], patience: float) -> Replies:
        self.calls += 1
        if self.calls == self.fails:
            raise OSError("no process")
        self.held |= self.responder.answer(asked, math.inf)
        ready = sorted(self.held, key=lambda i: number_of(self.seed, self.calls, i))
        if patience < math.inf and self.seed is not None:
            ready = ready[: 1 + number_of(self.seed, self.calls) % 3]
        return {i: self.held.pop(i) for i in ready}

    def end_rollout(self) -> None:
        self.ended.append(len(self.held))
        self.responder.end_rollout()

    def close(self) -> None:
        self.responder.close()


@dataclass
class Engine:
    """Draws ids that follow from the sample, the turn and everything before them; notes the turns of each call."""

    turns: list[list[int]] = field(default_factory=list)

    def generate(self, requests: Sequence[Request]) -> list[Sample]:
        self.turns.append(sorted(r.turn for r in requests for _ in r.samples))
        made = []
        for request in requests:
            limits = request.max_tokens or (MAX_TOKENS,) * len(request.samples)
            for sample, limit in zip(request.samples, limits, strict=True):
                seed = number_of(sample, request.turn, request.prompt.tolist())
                ids = np.array([seed // 7**i % 31 for i in range(1 + seed % 4)], np.int32)[:limit]
                reason = STOPPED if len(ids) == 1 + seed % 4 else LENGTH
                logps = -ids.astype(np.float32) - request.turn
                made.append(Sample.drawn(sample, request.prompt, ids, reason, 0, logps=logps))
        return made


def converse(
    backend: ThreadBackend, has_environment: bool, seed: int | None, fails: int = -1
) -> tuple[list[Sample], list[list[int]], list[int], str]:
    gather = backend.world.gather_objects
    driver = scripted(TURNS, has_environment, backend.rank == 0, gather)
    assert driver is not None
    late: Responder = Late(driver.responder, seed, fails)
    driver, engine = replace(driver, responder=late), Engine()
    samples, error = list[Sample](), ""
    try:
        samples = run(driver, engine, SHARES[backend.rank])
    except RuntimeError as raised:
        error = str(raised)
    assert isinstance(late, Late)
    return samples, engine.turns, late.ended, error


def run(driver: Conversations, engine: Engine, own: Sequence[int]) -> list[Sample]:
    pairs = [own[i : i + 2] for i in range(0, len(own), 2)]
    requests = [Request(np.array([7, pair[0]], np.int32), tuple(pair)) for pair in pairs]
    openings = {i: Opening({}, f"{i // 2}") for i in own}
    ended: list[int] = []
    samples = driver.run(
        requests,
        MAX_TOKENS,
        engine.generate,
        openings=openings,
        ended=lambda some: ended.extend(sample.number for sample in some),
    )
    assert sorted(ended) == list(own)
    return samples


@pytest.mark.parametrize("has_environment", [False, True], ids=["tools", "environment"])
def test_conversations_are_the_same_in_whatever_order_replies_come(has_environment: bool) -> None:
    together = on_ranks(len(SHARES), converse, has_environment, None)
    turns = [len(one.messages) for samples, *_ in together for one in samples]
    assert max(turns) >= 7 and len(set(turns)) > 3
    mixed = 0
    for seed in range(5):
        found = on_ranks(len(SHARES), converse, has_environment, seed)
        # Every rank makes every call of the engine.
        assert len({len(calls) for _, calls, *_ in found}) == 1
        mixed += sum(len(set(call)) > 1 for _, calls, *_ in found for call in calls)
        for (samples, *_), (expected, *_) in zip(found, together, strict=True):
            assert [one.number for one in samples] == [one.number for one in expected]
            for one, other in zip(samples, expected, strict=True):
                for name in ("prompt", "tokens", "action_mask", "logps"):
                    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
                for name in ("messages", "opening", "finish_reason"):
                    assert getattr(one, name) == getattr(other, name)
    # Some calls draw different turns.
    assert mixed > 5


def test_what_the_responder_raises_while_replies_are_pending_ends_all_ranks() -> None:
    found = on_ranks(len(SHARES), converse, True, 1, 4)
    assert {error for *_, error in found} == {
        "the turns could not be answered: OSError: no process"
    }
    assert [len(ended) for _, _, ended, _ in found] == [1] * len(SHARES)
    assert found[0][2][0] > 0
