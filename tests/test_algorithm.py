"""Advantages, token weights, k3, learning rates and pipeline order, against formulas written out here.

Does not prove that the loss is minimised by any graph, nor that stages really run in this order.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from mindgrpo.algorithm.advantage import group_advantages, zero_std_groups
from mindgrpo.algorithm.loss import is_clipped, k3, token_mean, token_weights
from mindgrpo.algorithm.schedule import Action, learning_rate, one_forward_one_backward


def transcribed(rewards: np.ndarray, group: int, scale: bool) -> np.ndarray:
    """A_i = (r_i - mean) / (std + 1e-6), group by group, with Python's own sums."""
    out = []
    for start in range(0, len(rewards), group):
        part = [float(r) for r in rewards[start : start + group]]
        mean = sum(part) / group
        variance = sum((r - mean) ** 2 for r in part) / (group - 1)
        divisor = math.sqrt(variance) + 1e-6 if scale else 1.0
        out += [(r - mean) / divisor for r in part]
    return np.array(out)


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("group", [2, 3, 8])
def test_advantages_are_those_of_the_formula(group: int, scale: str) -> None:
    rewards = np.random.default_rng(group).normal(size=group * 5)
    expected = transcribed(rewards, group, scale == "group")
    found = group_advantages(rewards, group, scale)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_scaled_advantages_have_mean_zero_and_deviation_one_in_every_group() -> None:
    rewards = np.random.default_rng(0).normal(3.0, 7.0, size=32)
    groups = group_advantages(rewards, 8, "group").astype(np.float64).reshape(-1, 8)
    np.testing.assert_allclose(groups.mean(axis=1), 0.0, atol=1e-6)
    np.testing.assert_allclose(groups.std(axis=1, ddof=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("scale", ["group", "none"])
def test_a_group_of_one_has_advantage_zero(scale: str) -> None:
    rewards = np.array([0.0, 5.0, -1.0])
    np.testing.assert_array_equal(group_advantages(rewards, 1, scale), np.zeros(3))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_have_advantage_exactly_zero_and_leave_other_groups_alone(scale: str) -> None:
    rewards = np.array([0.1, 0.1, 0.1, 0.0, 0.3, 0.6])  # 0.1 has no exact mean in binary
    found = group_advantages(rewards, 3, scale)
    np.testing.assert_array_equal(found[:3], 0.0)
    np.testing.assert_allclose(found[3:], transcribed(rewards[3:], 3, scale == "group"), rtol=1e-6)
    np.testing.assert_array_equal(zero_std_groups(rewards, 3), [True, False])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        group_advantages(np.array([1.0, bad]), 2, "group")


def test_every_sample_with_tokens_has_the_same_share_of_the_loss() -> None:
    lengths = np.array([5, 1, 40])
    weights = token_weights(lengths)
    np.testing.assert_allclose(weights * lengths, 1 / 3, rtol=1e-6)


def test_an_empty_completion_counts_as_a_sample_and_has_a_finite_weight() -> None:
    np.testing.assert_allclose(token_weights([4, 0]), [1 / 8, 1 / 2], rtol=1e-6)
    assert token_weights([]).shape == (0,)


def test_k3_is_the_formula_never_negative_and_zero_where_both_agree() -> None:
    rng = np.random.default_rng(1)
    logps, reference = rng.normal(size=100), rng.normal(size=100)
    ratio = np.exp(reference) / np.exp(logps)
    np.testing.assert_allclose(k3(logps, reference), ratio - np.log(ratio) - 1, atol=1e-12)
    assert (k3(logps, reference) >= 0).all()
    np.testing.assert_array_equal(k3(logps, logps), 0.0)


def test_k3_has_the_divergence_as_its_mean_under_the_policy() -> None:
    rng = np.random.default_rng(2)
    policy, reference = rng.dirichlet(np.ones(9), size=2)
    divergence = float((policy * np.log(policy / reference)).sum())
    mean = float((policy * k3(np.log(policy), np.log(reference))).sum())
    assert mean == pytest.approx(divergence, abs=1e-12)


def test_a_token_counts_as_clipped_only_where_the_clip_decides() -> None:
    ratios = np.log([0.5, 0.5, 1.0, 1.5, 1.5])
    old = np.zeros(5)
    positive = is_clipped(ratios, old, 1.0, (0.2, 0.3))
    negative = is_clipped(ratios, old, -1.0, (0.2, 0.3))
    np.testing.assert_array_equal(positive, [False, False, False, True, True])
    np.testing.assert_array_equal(negative, [True, True, False, False, False])
    assert not is_clipped(ratios, old, 0.0, (0.2, 0.3)).any()


def test_the_mean_over_tokens_is_not_the_mean_of_means_and_is_zero_without_tokens() -> None:
    assert token_mean([np.array([1.0, 1.0, 1.0]), np.array([5.0])]) == 2.0
    assert token_mean([np.zeros(0)]) == token_mean([]) == 0.0


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
