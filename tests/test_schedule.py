"""Learning rates and pipeline order, against formulas written out here.

Does not prove that stages really run in this order.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.algorithm.schedule import Exchange, Pass, learning_rate, one_forward_one_backward


def rates(style: str, warmup: int = 4, decay: int = 20, floor: float = 0.1) -> list[float]:
    return [learning_rate(i, style, 1.0, floor, warmup, decay) for i in range(30)]


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
    assert learning_rate(5, "cosine", 1.0, 0.0, warmup=5, decay=3) == 1.0


SCHEDULES = [(s, n, m) for n in (1, 2, 3, 4, 8) for s in range(n) for m in (1, 2, 3, 8)]


def passes(actions: list[Pass | Exchange]) -> list[Pass]:
    return [action for action in actions if isinstance(action, Pass)]


@pytest.mark.parametrize("stage, num_stages, count", SCHEDULES)
def test_every_micro_batch_goes_each_way_once_and_in_order(
    stage: int, num_stages: int, count: int
) -> None:
    actions = passes(one_forward_one_backward(stage, num_stages, count))
    for kind in ("forward", "backward"):
        assert [a.micro_batch for a in actions if a.kind == kind] == list(range(count))
    waiting = 0
    most = min(num_stages - stage, count)
    for index, (kind, micro_batch) in enumerate(actions):
        waiting += 1 if kind == "forward" else -1
        assert 0 <= waiting <= most
        if kind == "backward":
            assert Pass("forward", micro_batch) in actions[:index]
    assert waiting == 0


@pytest.mark.parametrize("stage, num_stages, count", SCHEDULES)
def test_what_a_pass_needs_has_come_and_what_goes_on_was_computed(
    stage: int, num_stages: int, count: int
) -> None:
    come: set[tuple[str, int]] = set()
    computed: set[tuple[str, int]] = set()
    gone: list[tuple[str, int]] = []
    for action in one_forward_one_backward(stage, num_stages, count):
        if isinstance(action, Exchange):
            sent, received = ("forward", "backward")
            if action.neighbour == "previous":
                sent, received = received, sent
            if action.sends is not None:
                assert (sent, action.sends) in computed
                gone.append((sent, action.sends))
            if action.receives is not None:
                come.add((received, action.receives))
            continue
        at_end = stage == 0 if action.kind == "forward" else stage == num_stages - 1
        assert at_end or tuple(action) in come
        computed.add(tuple(action))
    expected = count * ((stage > 0) + (stage + 1 < num_stages))
    assert len(gone) == len(set(gone)) == expected


def test_the_last_stage_alternates() -> None:
    kinds = [action.kind for action in passes(one_forward_one_backward(3, 4, 5))]
    assert kinds == ["forward", "backward"] * 5


def ends(schedules: list[list[Pass | Exchange]]) -> bool:
    """Whether stages end whose exchanges wait until the neighbour is at the exchange that matches."""
    left = [list(actions) for actions in schedules]
    while any(left):
        before = sum(map(len, left))
        for stage, actions in enumerate(left):
            if not actions:
                continue
            action = actions[0]
            if isinstance(action, Pass):
                actions.pop(0)
                continue
            other = left[stage + (1 if action.neighbour == "next" else -1)]
            back = "previous" if action.neighbour == "next" else "next"
            if other and other[0] == Exchange(back, action.receives, action.sends):  # type: ignore[arg-type]
                actions.pop(0)
                other.pop(0)
        if sum(map(len, left)) == before:
            return False
    return True


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 16])
def test_stages_whose_transfers_block_never_wait_for_each_other(
    num_stages: int, count: int
) -> None:
    assert ends([one_forward_one_backward(s, num_stages, count) for s in range(num_stages)])


def unpaired(stage: int, num_stages: int, count: int) -> list[Pass | Exchange]:
    """The same passes, with each transfer by itself: a send after its pass, a receive before its pass."""
    actions: list[Pass | Exchange] = []
    for kind, i in passes(one_forward_one_backward(stage, num_stages, count)):
        before, after = ("previous", "next") if kind == "forward" else ("next", "previous")
        at = {"previous": stage > 0, "next": stage + 1 < num_stages}
        actions += [Exchange(before, None, i)] * at[before]  # type: ignore[arg-type]
        actions.append(Pass(kind, i))
        actions += [Exchange(after, i, None)] * at[after]  # type: ignore[arg-type]
    return actions


def test_single_transfers_that_block_would_wait_for_ever() -> None:
    assert not ends([unpaired(stage, 2, 2) for stage in range(2)])
