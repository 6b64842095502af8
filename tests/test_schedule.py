"""Learning rates and pipeline order, against formulas written out here.

Does not prove that stages really run in this order.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.algorithm.schedule import Action, learning_rate, one_forward_one_backward


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


SCHEDULES = [(s, n, m) for n in (1, 2, 4) for s in range(n) for m in (1, 2, 3, 8)]


@pytest.mark.parametrize("stage, num_stages, count", SCHEDULES)
def test_every_micro_batch_goes_each_way_once_and_in_order(
    stage: int, num_stages: int, count: int
) -> None:
    actions = one_forward_one_backward(stage, num_stages, count)
    for kind in ("forward", "backward"):
        assert [a.micro_batch for a in actions if a.kind == kind] == list(range(count))
    waiting = 0
    most = min(num_stages - stage, count)
    for place, (kind, micro_batch) in enumerate(actions):
        waiting += 1 if kind == "forward" else -1
        assert 0 <= waiting <= most
        if kind == "backward":
            assert Action("forward", micro_batch) in actions[:place]
    assert waiting == 0


def test_the_last_stage_alternates() -> None:
    kinds = [action.kind for action in one_forward_one_backward(3, 4, 5)]
    assert kinds == ["forward", "backward"] * 5


def test_neighbouring_stages_never_wait_for_each_other_in_a_ring() -> None:
    """Runs all stages' lists together; an action waits until what it needs has arrived."""
    num_stages, count = 4, 6
    left = [one_forward_one_backward(stage, num_stages, count) for stage in range(num_stages)]
    done: set[tuple[int, str, int]] = set()
    while any(left):
        before = len(done)
        for stage, actions in enumerate(left):
            if not actions:
                continue
            kind, i = actions[0]
            other = stage - 1 if kind == "forward" else stage + 1
            at_end = not 0 <= other < num_stages
            if at_end or (other, kind, i) in done:
                done.add((stage, kind, i))
                actions.pop(0)
        assert len(done) > before, "every stage waits"
