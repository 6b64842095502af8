"""Advantages, weights that correct the rollout, and masks, against formulas written out here.

Does not prove that the loss uses them rightly, nor that a step computes the log-probs that they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from algorithms import advantages_of, loss_of, replace

from mindgrpo.algorithm.advantages import (
    best_of_group,
    decoupled_advantages,
    distilled,
    group_advantages,
    leave_one_out,
    maximum_likelihood,
    optimal_baseline,
    reinforce_plus_plus,
    rescaled_advantages,
    zero_std_groups,
)
from mindgrpo.algorithm.estimators import ESTIMATORS, AlgorithmConfig
from mindgrpo.algorithm.losses import token_weights
from mindgrpo.algorithm.rollout_correction import correct_rollout, rejected_samples
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.algorithm.train_batch import compute_advantages


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation_of(values: list[float], freedom: int) -> float:
    mean = mean_of(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - freedom))


def transcribed(rewards: np.ndarray, group: int, scale: str) -> np.ndarray:
    """A_i = (r_i - mean) / (std + 1e-6), group by group, with Python's own sums."""
    out = []
    for start in range(0, len(rewards), group):
        part = [float(r) for r in rewards[start : start + group]]
        divisor = {
            "group": deviation_of(part, 1) + 1e-6,
            "batch": deviation_of(rewards.tolist(), 1) + 1e-6,
            "none": 1.0,
        }[scale]
        out += [(r - mean_of(part)) / divisor for r in part]
    return np.array(out)


SCALES = ["group", "batch", "none"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("group", [2, 3, 8])
def test_advantages_are_those_of_the_formula(group: int, scale: str) -> None:
    rewards = np.random.default_rng(group).normal(size=group * 5)
    found = group_advantages(rewards, group, scale)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, transcribed(rewards, group, scale), rtol=1e-6, atol=1e-7)


def test_scaled_advantages_have_mean_zero_and_deviation_one_in_every_group() -> None:
    rewards = np.random.default_rng(0).normal(3.0, 7.0, size=32)
    groups = group_advantages(rewards, 8, "group").astype(np.float64).reshape(-1, 8)
    np.testing.assert_allclose(groups.mean(axis=1), 0.0, atol=1e-6)
    np.testing.assert_allclose(groups.std(axis=1, ddof=1), 1.0, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_a_group_of_one_has_advantage_zero(scale: str) -> None:
    rewards = np.array([0.0, 5.0, -1.0])
    np.testing.assert_array_equal(group_advantages(rewards, 1, scale), np.zeros(3))


@pytest.mark.parametrize("scale", SCALES)
def test_equal_rewards_have_advantage_exactly_zero_and_leave_other_groups_alone(scale: str) -> None:
    rewards = np.array([0.1, 0.1, 0.1, 0.0, 0.3, 0.6])  # 0.1 has no exact mean in binary
    found = group_advantages(rewards, 3, scale)
    np.testing.assert_array_equal(found[:3], 0.0)
    np.testing.assert_allclose(found[3:], transcribed(rewards, 3, scale)[3:], rtol=1e-6)
    np.testing.assert_array_equal(zero_std_groups(rewards, 3), [True, False])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rewards_that_are_not_numbers_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="1 rewards are not finite"):
        group_advantages(np.array([1.0, bad]), 2, "group")


@pytest.mark.parametrize("group", [2, 3, 8])
def test_leave_one_out_compares_with_the_others_of_the_group(group: int) -> None:
    rewards = np.random.default_rng(group).normal(size=group * 4)
    found = leave_one_out(rewards, group)
    for i, advantage in enumerate(found):
        start = i // group * group
        others = [float(rewards[j]) for j in range(start, start + group) if j != i]
        assert advantage == pytest.approx(rewards[i] - mean_of(others), rel=1e-5, abs=1e-7)
    np.testing.assert_array_equal(leave_one_out(np.full(4, 0.1), 4), np.zeros(4))


def groups_of(values: np.ndarray, group: int) -> list[list[float]]:
    return [values[i : i + group].tolist() for i in range(0, len(values), group)]


@pytest.mark.parametrize("group", [2, 5])
def test_maxrl_divides_by_the_mean_that_it_subtracts(group: int) -> None:
    rewards = np.random.default_rng(group).integers(0, 3, group * 6).astype(float)
    rewards[:group], rewards[group : 2 * group] = 0.0, -1.0
    rewards[group] = 0.5
    expected = []
    for part in groups_of(rewards, group):
        mean = mean_of(part)
        expected += [(r - mean) / (mean + 1e-6) if mean > 0 else 0.0 for r in part]
    found = maximum_likelihood(rewards, group)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(found[: 2 * group], 0.0)


def test_opo_weighs_the_baseline_by_length() -> None:
    rewards, lengths = np.array([1.0, 0.0, 2.0, 3.0, 0.1, 0.1]), np.array([1, 3, 2, 2, 7, 1])
    found = optimal_baseline(rewards, lengths, 2)
    np.testing.assert_allclose(found, [0.75, -0.25, -0.5, 0.5, 0, 0], rtol=1e-6)
    assert np.isfinite(optimal_baseline(rewards, np.zeros(6, int), 2)).all()


def test_pass_at_k_rewards_the_best_of_a_group_for_its_lead() -> None:
    rewards = np.array([0.1, 0.9, 0.4, 1.0, 1.0, 0.0, 0.2, 0.2, 0.2])
    lead = 0.5 / (deviation_of([0.1, 0.9, 0.4], 1) + 1e-6)
    np.testing.assert_allclose(best_of_group(rewards, 3, "group"), [0, lead, *[0] * 7], rtol=1e-6)
    np.testing.assert_allclose(best_of_group(rewards, 3, "none"), [0, 0.5, *[0] * 7], rtol=1e-6)


def test_gpg_makes_up_for_groups_without_a_gradient() -> None:
    rewards = np.array([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 3.0, 1.0])
    expected = [-1.0, 1.0, 0, 0, 0, 0, 2.0, -2.0]  # twice the differences: 2 of 4 groups count
    np.testing.assert_allclose(rescaled_advantages(rewards, 2), expected, rtol=1e-6)
    np.testing.assert_array_equal(rescaled_advantages(np.ones(4), 2), np.zeros(4))


@pytest.mark.parametrize("missing", [False, True])
def test_gdpo_normalises_each_reward_by_itself_and_then_the_sum(missing: bool) -> None:
    rng, group, weights = np.random.default_rng(3), 4, (1.0, 0.25)
    functions = [rng.normal(size=12) * scale for scale in (1.0, 100.0)]
    functions[0][4:8] = 0.1
    for function in functions:
        function[8:] = 0.1  # the last group is equal in every reward
    if missing:
        functions[1][[1, 2]] = np.nan
    sums = np.zeros(12)
    for weight, values in zip(weights, functions, strict=True):
        for i, value in enumerate(values.tolist()):
            start = i // group * group
            part = [v for v in values[start : start + group].tolist() if not math.isnan(v)]
            if not math.isnan(value):
                deviation = deviation_of(part, 1) if len(set(part)) > 1 else 1.0
                mean = mean_of(part) if len(set(part)) > 1 else value
                sums[i] += weight * (value - mean) / (deviation + 1e-6)
    expected = (sums - sums.mean()) / (deviation_of(sums.tolist(), 1) + 1e-6)
    found = decoupled_advantages(list(zip(weights, functions, strict=True)), group)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[8:], 0.0)


LENGTHS = (3, 1, 0, 4, 2, 5)
COUNTED = np.array([True, True, True, True, False, True])


def penalties() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    return [rng.normal(size=n) for n in LENGTHS]


@pytest.mark.parametrize("group", [None, 3])
def test_reinforce_plus_plus_is_the_normalised_reward_to_go(group: int | None) -> None:
    rewards, given = np.random.default_rng(8).normal(size=6), penalties()
    returns: list[list[float]] = []
    for i, length in enumerate(LENGTHS):
        reward = float(rewards[i])
        if group is not None:
            start = i // group * group
            reward -= mean_of(rewards[start : start + group].tolist())
        returns.append([reward - sum(given[i][t:].tolist()) for t in range(length)])
    tokens = [a for row, counts in zip(returns, COUNTED, strict=True) if counts for a in row]
    mean, deviation = mean_of(tokens), deviation_of(tokens, 0)
    found = reinforce_plus_plus(rewards, given, COUNTED, group)
    for row, expected in zip(found, returns, strict=True):
        normal = [(a - mean) / (deviation + 1e-6) for a in expected]
        assert row.dtype == np.float32
        np.testing.assert_allclose(row, normal, rtol=1e-5, atol=1e-6)


def test_reinforce_plus_plus_of_equal_rewards_is_finite_and_zero() -> None:
    rows = reinforce_plus_plus(np.full(4, 0.1), [np.zeros(3)] * 4, np.ones(4, bool), None)
    np.testing.assert_allclose(np.concatenate(rows), 0.0, atol=1e-6)
    nothing = reinforce_plus_plus(np.ones(2), [np.zeros(0)] * 2, np.ones(2, bool), 2)
    assert [row.size for row in nothing] == [0, 0]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_a_tokens_factor_is_its_ratio_up_to_the_cap(mode: str) -> None:
    trainer = [np.log([0.2, 0.5, 0.9]), np.log([0.3])]
    generator = [np.log([0.1, 0.6, 0.1]), np.log([0.15])]
    masks = [np.ones(n.size, bool) for n in trainer]
    found = correct_rollout(trainer, generator, masks, mode, 1.9)
    above = 1.9 if mode == "token_truncate" else 0.0
    np.testing.assert_allclose(found.weights[0], [above, 5 / 6, above], rtol=1e-6)
    np.testing.assert_allclose(found.weights[1], [above], rtol=1e-6)
    assert found.capped == 0.75 and found.largest == pytest.approx(9.0)
    assert found.mean == pytest.approx((2 + 5 / 6 + 9 + 2) / 4)


@pytest.mark.parametrize(("mode", "ends"), [("token_truncate", (0.5, 5.0)), ("token_mask", (0, 0))])
def test_a_floor_bounds_ratios_as_the_cap_does(mode: str, ends: tuple[float, float]) -> None:
    trainer, generator = [np.log([0.04, 0.5, 0.9])], [np.log([0.1, 0.6, 0.1])]
    found = correct_rollout(trainer, generator, [np.ones(3, bool)], mode, 5.0, 0.5)
    np.testing.assert_allclose(found.weights[0], [ends[0], 5 / 6, ends[1]], rtol=1e-6)
    assert found.capped == pytest.approx(2 / 3)


# Of ratios 2 and 1/2 the geometric mean is 1, and of one token more it is their own.
RATIOS = ([2.0, 0.5], [1.0, 1.0], [0.96, 1.0], [1.0, 1.05], [], [1e-5, 1e5])


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"rejection_geometric_low": 0.99}, [2]),
        ({"rejection_geometric_high": 1.01}, [3]),
        ({"rejection_geometric_low": 0.975, "rejection_geometric_high": 1.03}, []),
        # (2 - 1 - log 2 + 0.5 - 1 + log 2) / 2 = 0.25
        ({"rejection_k3": 0.2499}, [0, 5]),
        ({"rejection_k3": 0.2501}, [5]),
        ({"rejection_veto": 1e-4}, [5]),
        ({"rejection_veto": 0.51, "rejection_geometric_high": 1.01}, [0, 3, 5]),
    ],
    ids=str,
)
def test_samples_that_both_rate_too_differently_are_left_out(
    bounds: dict[str, float], expected: list[int]
) -> None:
    generator = [np.full(len(row) + 1, -1.0, np.float32) for row in RATIOS]
    # The last token is context, of which the ratio is no one's.
    trainer = [
        np.append(g[:-1] + np.log(row), 5.0) for g, row in zip(generator, RATIOS, strict=True)
    ]
    masks = [np.arange(g.size) < g.size - 1 for g in generator]
    found = rejected_samples(trainer, generator, masks, advantages_of(2, **bounds))
    assert np.flatnonzero(found).tolist() == expected


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_a_samples_factor_is_the_product_of_its_tokens_ratios(mode: str) -> None:
    trainer = [np.log([0.2, 0.5, 0.9]), np.log([0.3, 0.1])]
    generator = [np.log([0.1, 0.6, 0.1]), np.log([0.15, 0.4])]
    masks = [np.ones(n.size, bool) for n in trainer]
    found = correct_rollout(trainer, generator, masks, mode, 1.9)
    above = 1.9 if mode == "sequence_truncate" else 0.0
    np.testing.assert_allclose(found.weights[0], [above] * 3, rtol=1e-6)
    np.testing.assert_allclose(found.weights[1], [0.5, 0.5], rtol=1e-6)
    assert found.capped == 0.6 and found.largest == pytest.approx(15.0)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_a_ratio_beyond_all_numbers_is_capped_and_empty_samples_are_passed(mode: str) -> None:
    masks = [np.ones(1, bool), np.ones(0, bool)]
    found = correct_rollout(
        [np.array([0.0]), np.zeros(0)], [np.array([-1e4]), np.zeros(0)], masks, mode, 2
    )
    assert found.weights[0].tolist() == [2.0 if mode == "token_truncate" else 0.0]
    assert (found.weights[1].size, found.capped) == (0, 1.0)
    assert correct_rollout([], [], [], mode, 2).mean == 1.0


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask", "token_truncate"])
def test_figures_of_ratios_beyond_all_numbers_are_finite(mode: str) -> None:
    """A long sample's product overflows, however small the difference of a token is."""
    count = 1000
    trainer, generator = [np.full(count, -1.0), np.log([0.5])], [np.full(count, -2.0), np.log([1])]
    masks = [np.ones(count, bool), np.ones(1, bool)]
    found = correct_rollout(trainer, generator, masks, mode, 2.0)
    largest = math.exp(20) if mode.startswith("sequence") else math.e
    assert found.largest == pytest.approx(largest)
    assert found.mean == pytest.approx((count * largest + 0.5) / (count + 1))
    assert found.capped == pytest.approx(count / (count + 1))
    expected = 0.0 if mode == "sequence_mask" else 2.0
    assert set(found.weights[0].tolist()) == {expected} and found.weights[1].tolist() == [0.5]


_rng = np.random.default_rng(9)
GENERATOR, OLD, REFERENCE = (
    [_rng.normal(-2, 0.5, n).astype(np.float32) for n in LENGTHS] for _ in range(3)
)
ROLLOUT = Rollout.single_turn(
    [np.zeros(2, np.int32)] * len(LENGTHS),
    [np.zeros(n, np.int32) for n in LENGTHS],
    ["stop" if counts else "length" for counts in COUNTED],
    GENERATOR,
    [i // 3 for i in range(len(LENGTHS))],
)
REWARDS = np.array([0.0, 1.0, 0.5, 1.0, 1.0, 0.0])
GREEDY = np.array([0.75, 0.25])
BASELINES = np.linspace(-0.3, 0.7, REWARDS.size)
COMPONENTS = [(1.0, np.arange(6.0)), (-0.5, np.array([1.0, 0, 0, 1, 1, 0]))]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_kl_in_the_reward_is_taken_from_the_whole_samples_reward(name: str, estimator: str) -> None:
    config = advantages_of(3, name, kl_in_reward=True, beta=0.1, kl_estimator=estimator)
    batch, correction = compute_advantages(ROLLOUT, REWARDS, config, OLD, REFERENCE)
    totals = []
    for i, reward in enumerate(REWARDS):
        d = OLD[i].astype(float) - REFERENCE[i]
        kl = {"k1": d, "k2": d * d / 2, "k3": np.exp(-d) + d - 1}[estimator]
        totals.append(reward - 0.1 * kl.sum())
    if name == "grpo":
        expected = transcribed(np.array(totals), 3, "group")
    else:
        groups = np.array(totals).reshape(2, 3)
        expected = (groups - (groups.sum(axis=1, keepdims=True) - groups) / 2).reshape(-1)
    np.testing.assert_allclose(batch.advantages, expected, rtol=1e-5)
    assert batch.token_advantages is None and batch.rollout_is_weights is None
    assert batch.sample_mask is None and correction is None
    assert (batch.rollout, batch.old_logps, batch.reference_logps) == (ROLLOUT, OLD, REFERENCE)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("maxrl", lambda: maximum_likelihood(REWARDS, 3)),
        ("opo", lambda: optimal_baseline(REWARDS, ROLLOUT.action_lengths, 3)),
        ("pass_at_k", lambda: best_of_group(REWARDS, 3, "group")),
        ("gpg", lambda: rescaled_advantages(REWARDS, 3)),
        ("gdpo", lambda: decoupled_advantages(COMPONENTS, 3)),
        ("remax", lambda: (REWARDS - np.repeat(GREEDY, 3)).astype(np.float32)),
        ("rae", lambda: (REWARDS - BASELINES).astype(np.float32)),
    ],
)
def test_an_estimator_is_found_by_its_name(name: str, function: Callable[[], np.ndarray]) -> None:
    config = advantages_of(3, name)
    batch, _ = compute_advantages(
        ROLLOUT, REWARDS, config, components=COMPONENTS, greedy=GREEDY, baselines=BASELINES
    )
    np.testing.assert_array_equal(batch.advantages, function())
    assert batch.advantages.any() and batch.advantages.dtype == np.float32
    needs = {"gdpo": "each function", "remax": "of greedy completions", "rae": "of roles"}
    if name in needs:
        with pytest.raises(ValueError, match=needs[name]):
            compute_advantages(ROLLOUT, REWARDS, config)


# Of gdpo each function's rewards are read, where a failure is nan.
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gdpo"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_sample_whose_reward_failed_has_no_advantage_whatever_stands_in_its_place(
    name: str, beta: float
) -> None:
    """Sample 1, and with remax the second group, whose greedy completion failed."""
    failed = np.arange(REWARDS.size) == 1
    config = advantages_of(3, name, kl_in_reward=True, beta=beta)

    def made(number: float) -> list[float]:
        rewards = np.where(failed, number, REWARDS)
        greedy = np.array([0.75, np.nan]) if name == "remax" else None
        batch, _ = compute_advantages(
            *(ROLLOUT, rewards, config, OLD, REFERENCE, None, (), greedy, BASELINES, failed),
            values=OLD,
        )
        if batch.token_advantages is not None:
            assert not batch.token_advantages[1].any()
        return batch.advantages.tolist()

    of_mean = made(float(REWARDS[[0, 2]].mean()))
    assert of_mean[1] == made(7.0)[1] == 0.0 and any(of_mean)
    assert name != "remax" or of_mean[3:] == [0.0] * 3
    if name in ("opo", "remax", "rae", "reinforce_plus_plus", "gae"):
        assert of_mean == made(7.0)


@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus"])
def test_distillation_adds_what_the_teacher_finds_likelier_to_every_tokens_advantage(
    name: str,
) -> None:
    scale = "batch" if name == "reinforce_plus_plus" else "group"
    plain, _ = compute_advantages(ROLLOUT, REWARDS, advantages_of(3, name, scale))
    config = advantages_of(3, name, scale, distillation_coef=0.3)
    batch, _ = compute_advantages(ROLLOUT, REWARDS, config, OLD, REFERENCE)
    assert batch.token_advantages is not None
    for i, row in enumerate(batch.token_advantages):
        expected = [
            plain.advantages[i] + 0.3 * (float(teacher) - float(own))
            for own, teacher in zip(OLD[i], REFERENCE[i], strict=True)
        ]
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_distillation_is_in_expectation_that_of_the_reverse_kl() -> None:
    rng = np.random.default_rng(3)
    logits, teacher = rng.normal(size=(2, 7))

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return np.asarray(x - np.log(np.exp(x).sum()))

    def reverse_kl(x: np.ndarray) -> float:
        own = log_softmax(x)
        return float((np.exp(own) * (own - log_softmax(teacher))).sum())

    own = log_softmax(logits)
    probabilities = np.exp(own)
    advantages = distilled(np.zeros(7), own, log_softmax(teacher), 1.0)
    # E[A grad log pi], by the definition of the gradient of log-softmax.
    expected = sum(
        p * a * (np.eye(7)[token] - probabilities)
        for token, (p, a) in enumerate(zip(probabilities, advantages, strict=True))
    )
    step = 1e-5 * np.eye(7)
    numeric = [(reverse_kl(logits + d) - reverse_kl(logits - d)) / 2e-5 for d in step]
    np.testing.assert_allclose(expected, -np.array(numeric), atol=1e-6)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_reinforce_plus_plus_has_token_advantages_only_with_kl_in_the_reward(
    name: str, beta: float
) -> None:
    keys = {"kl_in_reward": True, "beta": beta, "kl_estimator": "k1"}
    config = advantages_of(3, name, "batch", mask_truncated_completions=True, **keys)
    batch, _ = compute_advantages(ROLLOUT, REWARDS, config, OLD, REFERENCE)
    pairs = zip(OLD, REFERENCE, strict=True)
    penalty = [beta * (own.astype(float) - reference) for own, reference in pairs]
    expected = reinforce_plus_plus(REWARDS, penalty, COUNTED, 3 if "baseline" in name else None)
    means = [row.mean() if row.size else 0.0 for row in expected]
    np.testing.assert_allclose(batch.advantages, means, rtol=1e-5, atol=1e-6)
    if beta == 0:
        assert batch.token_advantages is None
        return
    assert batch.token_advantages is not None
    for row, wanted in zip(batch.token_advantages, expected, strict=True):
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


def test_the_correction_weighs_old_against_generator_and_truncated_samples_do_not_count() -> None:
    config = advantages_of(
        3,
        importance_sampling_correction="token_truncate",
        importance_sampling_cap=1.5,
        mask_truncated_completions=True,
    )
    batch, correction = compute_advantages(ROLLOUT, REWARDS, config, OLD)
    assert correction is not None and batch.rollout_is_weights is correction.weights
    for i, weights in enumerate(correction.weights):
        ratio = np.exp(OLD[i].astype(float) - GENERATOR[i])
        np.testing.assert_allclose(weights, np.minimum(ratio, 1.5), rtol=1e-5)
    assert batch.sample_mask is not None and batch.sample_mask.tolist() == COUNTED.tolist()
    assert correction.largest > 1.5 and 0 < correction.capped < 1
    assert batch.rejected is None
    strict, _ = compute_advantages(ROLLOUT, REWARDS, replace(config, rejection_veto=0.9), OLD)
    assert strict.rejected is not None and strict.rejected[COUNTED].any()
    assert strict.sample_mask is not None
    np.testing.assert_array_equal(strict.sample_mask, COUNTED & ~strict.rejected)
    np.testing.assert_array_equal(strict.advantages, batch.advantages)


def test_groups_of_equal_rewards_are_masked_if_asked_for_beside_truncated_samples() -> None:
    rewards = np.array([0.5, 0.5, 0.5, 1.0, 1.0, 0.0])
    batch, _ = compute_advantages(ROLLOUT, rewards, advantages_of(3, mask_equal_groups=True))
    assert batch.sample_mask is not None
    assert batch.sample_mask.tolist() == [False] * 3 + [True] * 3
    both, _ = compute_advantages(
        ROLLOUT, rewards, advantages_of(3, mask_equal_groups=True, mask_truncated_completions=True)
    )
    np.testing.assert_array_equal(both.sample_mask, batch.sample_mask & COUNTED)
    # Which leaves what is averaged over to those that differ.
    weights = token_weights(np.full(6, 4), loss_of("dapo"), batch.sample_mask)
    np.testing.assert_allclose(weights, [0, 0, 0, 1 / 12, 1 / 12, 1 / 12])


@pytest.mark.parametrize(
    "config",
    [
        advantages_of(3, kl_in_reward=True, beta=0.1),
        advantages_of(3, distillation_coef=0.1),
        advantages_of(3, importance_sampling_correction="sequence_mask"),
        advantages_of(3, rejection_k3=0.1),
    ],
)
def test_advantages_without_the_log_probs_they_need_are_refused(config: AlgorithmConfig) -> None:
    assert config.needs_old
    with pytest.raises(ValueError, match="log-probs"):
        compute_advantages(ROLLOUT, REWARDS, config, None, REFERENCE)


def test_the_floor_under_a_deviation_is_a_setting() -> None:
    rewards = np.array([0.0, 1e-4])
    for floor in (1e-6, 1e-4):
        by_group = 5e-5 / (np.std(rewards, ddof=1) + floor)
        found = group_advantages(rewards, 2, "group", floor)
        np.testing.assert_allclose(found, [-by_group, by_group], rtol=1e-6)
        rows = reinforce_plus_plus(rewards, [np.zeros(1)] * 2, np.ones(2, bool), None, floor)
        np.testing.assert_allclose(rows[1], 5e-5 / (np.std(rewards) + floor), rtol=1e-6)
