"""Learning rates and pipeline order, against formulas written out here.

Does not prove that stages really run in this order.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mindgrpo.algorithm.schedule import (
    Exchange,
    LRSchedule,
    Pass,
    chunks_in_flight,
    pipeline_schedule,
)
from mindgrpo.plan.activations import ARRIVED


def rates(style: Any, warmup: int = 4, decay: int = 20, floor: float = 0.1) -> list[float]:
    schedule = LRSchedule(
        lr_decay_style=style, lr=1.0, min_lr=floor, warmup_step=warmup, decay_steps=decay
    )
    return [schedule.rate(i, 30) for i in range(30)]


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_the_rate_climbs_in_equal_steps_to_the_peak_and_is_never_zero(style: str) -> None:
    np.testing.assert_allclose(rates(style)[:5], [0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_the_rate_falls_to_its_floor_and_stays_there(style: str) -> None:
    found = rates(style)
    assert all(a > b for a, b in zip(found[4:20], found[5:21], strict=True))
    np.testing.assert_allclose(found[20:], 0.1)
    np.testing.assert_allclose(found[12], 0.55)  # half way


def test_cosine_and_linear_follow_their_formulas() -> None:
    x = (np.arange(4, 20) - 4) / 16
    np.testing.assert_allclose(rates("linear")[4:20], 1.0 - 0.9 * x)
    np.testing.assert_allclose(rates("cosine")[4:20], 0.1 + 0.45 * (1 + np.cos(np.pi * x)))


def test_a_constant_rate_stays_at_the_peak_and_no_warm_up_starts_there() -> None:
    assert set(rates("constant", warmup=0)) == {1.0}
    assert rates("cosine", warmup=0)[0] == 1.0


def test_a_run_shorter_than_its_warm_up_has_a_finite_rate() -> None:
    assert LRSchedule(lr=1.0, warmup_step=5).rate(5, 3) == 1.0


# (stages, chunks a stage, micro-batches). One stage has one chunk.
SIZES = [(1, 1, 1), (1, 1, 3)]
SIZES += list(itertools.product(range(2, 7), range(1, 4), range(1, 13)))


def passes(actions: Sequence[Pass | Exchange]) -> list[Pass]:
    return [action for action in actions if isinstance(action, Pass)]


def test_every_micro_batch_goes_each_way_once_through_each_chunk_and_in_order() -> None:
    for num_stages, num_chunks, count in SIZES:
        schedule = pipeline_schedule(num_stages, num_chunks, count)
        for stage, own in enumerate(map(passes, schedule)):
            # In order, gradients add up as with any other number of chunks.
            for kind, chunk in itertools.product(("forward", "backward"), range(num_chunks)):
                of_chunk = [a.micro_batch for a in own if (a.kind, a.chunk) == (kind, chunk)]
                assert of_chunk == list(range(count))
            waiting = most = 0
            for index, action in enumerate(own):
                waiting += 1 if action.kind == "forward" else -1
                most = max(most, waiting)
                if action.kind == "backward":
                    assert action._replace(kind="forward") in own[:index]
            assert waiting == 0
            assert most == chunks_in_flight(stage, num_stages, num_chunks, count)
            assert most <= chunks_in_flight(stage, num_stages, num_chunks)
            # PipeDream-flush's count, and Megatron-LM's.
            ahead = num_stages - 1 - stage
            if num_chunks == 1:
                assert most == min(ahead + 1, count)
            elif count % num_stages == 0:
                most_of_all = (num_chunks - 1) * num_stages + 2 * ahead + 1
                assert most == min(most_of_all, num_chunks * count)


def source(stage: int, own: Pass, num_stages: int) -> tuple[int, Pass]:
    """The stage and the pass that make what this one needs."""
    step = -1 if own.kind == "forward" else 1
    chunk, other = divmod(own.chunk * num_stages + stage + step, num_stages)
    return other, own._replace(chunk=chunk)


def test_what_arrives_before_its_pass_is_no_more_than_is_planned() -> None:
    for num_stages, num_chunks, count in SIZES:
        if num_chunks > 1:
            for actions in pipeline_schedule(num_stages, num_chunks, count):
                waiting: set[Pass] = set()
                for action in actions:
                    if isinstance(action, Pass):
                        waiting.discard(action)
                    elif action.receives is not None:
                        waiting.add(action.receives)
                    assert len(waiting) <= ARRIVED + num_stages


def needs_none(stage: int, own: Pass, num_stages: int, num_chunks: int) -> bool:
    ends = (0, 0) if own.kind == "forward" else (num_chunks - 1, num_stages - 1)
    return (own.chunk, stage) == ends


def ends(schedule: Sequence[Sequence[Pass | Exchange]]) -> bool:
    """Whether all stages end, each exchange of which waits until the other stage is at the one that matches.

    Raises where a pass has not got what it needs, or gets another's.
    """
    left = [deque(actions) for actions in schedule]
    num_chunks = 1 + max(own.chunk for own in passes(schedule[0]))
    made: set[tuple[int, Pass]] = set()
    given: set[tuple[int, Pass]] = set()
    while any(left):
        before = sum(map(len, left))
        for stage, actions in enumerate(left):
            while actions and isinstance(own := actions[0], Pass):
                at_end = needs_none(stage, own, len(left), num_chunks)
                assert at_end or (stage, own) in given
                made.add((stage, own))
                actions.popleft()
            if not actions:
                continue
            peer, *sides = actions[0]
            other = left[peer][0] if left[peer] else None
            if not isinstance(other, Exchange) or other.peer != stage:
                continue
            if [side is None for side in sides] != [other.receives is None, other.sends is None]:
                continue
            pairs = ((stage, sides[0], peer, other.receives), (peer, other.sends, stage, sides[1]))
            for giver, sends, taker, receives in pairs:
                if receives is not None:
                    assert source(taker, receives, len(left)) == (giver, sends)
                    assert (giver, sends) in made
                    given.add((taker, receives))
            actions.popleft()
            left[peer].popleft()
        if sum(map(len, left)) == before:
            return False
    return True


def test_stages_whose_transfers_block_never_wait_for_each_other() -> None:
    for sizes, has_backward in itertools.product(SIZES, (True, False)):
        assert ends(pipeline_schedule(*sizes, has_backward)), sizes


def by_themselves(actions: Sequence[Pass | Exchange]) -> list[Pass | Exchange]:
    """The same passes, with each transfer by itself: a send after its pass, a receive before its pass."""
    exchanges = [action for action in actions if isinstance(action, Exchange)]
    sends = {e.sends: Exchange(e.peer, e.sends, None) for e in exchanges}
    receives = {e.receives: Exchange(e.peer, None, e.receives) for e in exchanges}
    alone: list[Pass | Exchange] = []
    for own in passes(actions):
        alone += [receives[own]] if own in receives else []
        alone.append(own)
        alone += [sends[own]] if own in sends else []
    return alone


def test_single_transfers_that_block_would_wait_for_ever() -> None:
    assert not ends(list(map(by_themselves, pipeline_schedule(2, 1, 2))))


def seconds(num_stages: int, num_chunks: int, count: int, costs: Mapping[str, float]) -> float:
    """How long all passes take where each waits for what it needs alone."""
    schedule = pipeline_schedule(num_stages, num_chunks, count)
    left = [deque(passes(actions)) for actions in schedule]
    clock = [0.0] * num_stages
    made: dict[tuple[int, Pass], float] = {}
    while any(left):
        for stage, own in enumerate(left):
            if not own:
                continue
            needs = source(stage, own[0], num_stages)
            if not needs_none(stage, own[0], num_stages, num_chunks) and needs not in made:
                continue
            clock[stage] = max(clock[stage], made.get(needs, 0.0)) + costs[own[0].kind]
            made[stage, own.popleft()] = clock[stage]
    return max(clock)


@pytest.mark.parametrize("backward", [1, 2, 3])
def test_stages_idle_as_long_as_the_formula_says(backward: float) -> None:
    """(num_stages - 1) / (num_chunks m) of the time that they compute, for every m from num_stages up."""
    costs = {"forward": 1.0, "backward": backward}
    for num_stages, num_chunks, count in SIZES:
        if count >= num_stages:
            computing = count * num_chunks * (1 + backward)
            idle = (num_stages - 1) / (num_chunks * count)
            found = seconds(num_stages, num_chunks, count, costs)
            assert found == pytest.approx(computing * (1 + idle))
