"""Losses, token weights, KL estimates and clip marks in numpy, against the papers' formulas written out token by token.

Does not prove anything of the graph that is differentiated (test_loss_cell.py does), nor of advantages.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from algorithms import replace
from loss_variants import COUNTED, GROUPS, LENGTHS, LONGEST, VARIANTS, WIDE, tokens_of
from tables import each_row

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import (
    clipped,
    kl_estimate,
    policy_loss,
    token_weights,
)
from mindgrpo.algorithm.surrogates import LOSS_TYPES, Tokens


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def gain_of(
    ratio: float,
    advantage: float,
    logp: float,
    o: AlgorithmConfig,
    sample: list[tuple[float, float]],
) -> float:
    """One token's part of what the paper maximises; `sample` has its sample's new and old probabilities."""
    below, above = o.clip_bounds
    low, high = 1 - below, 1 + above
    up = advantage > 0
    if o.loss_type == "sapo":
        tau = o.sapo_temperature_pos if up else o.sapo_temperature_neg
        return 4 / tau * 0.5 * (1 + math.tanh(tau * (ratio - 1) / 2)) * advantage
    if o.loss_type in ("dppo_tv", "dppo_kl"):
        pi = math.exp(logp)
        mu = pi / ratio
        limit, moved = (above, pi - mu) if up else (below, mu - pi)
        distance = abs(moved)
        if o.loss_type == "dppo_kl":
            distance = mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        if moved > 0 and distance > limit:
            return 0.0
        return min(ratio, o.dppo_ratio_cap) * advantage * logp
    if o.loss_type == "gmpo":
        ends = (0.0, math.exp(above)) if up else (math.exp(-below), math.inf)
        product = math.prod(clip(new / old, *ends) for new, old in sample)
        return product ** (1 / len(sample)) * advantage
    if o.loss_type == "vespo":
        w = math.prod(new / old for new, old in sample)
        k, decay = o.vespo_k_neg, o.vespo_lambda_neg
        if advantage >= 0:
            k, decay = o.vespo_k_pos, o.vespo_lambda_pos
        return math.exp(decay) * w**k * math.exp(-decay * w) * advantage * logp
    if o.loss_type in ("kl_cov", "gpg"):
        return advantage * (logp if o.loss_type == "gpg" else ratio)
    if o.loss_type == "cispo":
        return clip(ratio, low, high) * advantage * logp
    if o.delta is not None:
        return min(min(ratio, o.delta) * advantage, clip(ratio, low, high) * advantage)
    plain = min(ratio * advantage, clip(ratio, low, high) * advantage)
    if o.dual_clip is not None and advantage < 0:
        return max(plain, o.dual_clip * advantage)
    return plain


def kl_of(logp: float, reference: float, estimator: str) -> float:
    inverse = math.exp(reference) / math.exp(logp)
    return {
        "k1": -math.log(inverse),
        "k2": math.log(inverse) ** 2 / 2,
        "k3": inverse - 1 - math.log(inverse),
    }[estimator]


# What each loss is averaged over in its paper.
PAPERS = {
    "dr_grpo": "constant",
    "dppo_tv": "constant",
    "dppo_kl": "constant",
    "luspo": "sample_sum",
}
PAPERS |= dict.fromkeys(("grpo", "sapo", "gmpo"), "sample_mean")


def weight_of(i: int, o: AlgorithmConfig) -> float:
    """The weight of each token of sample i, which counts."""
    of = {j: int(LENGTHS[j]) for j in range(len(LENGTHS)) if COUNTED[j]}
    kind = o.loss_aggregation or PAPERS.get(o.loss_type, "token_mean")
    if kind == "sample_mean":
        return 1 / len(of) / of[i]
    if kind == "sample_sum":
        return 1 / len(of)
    if kind == "constant":
        return 1 / len(of) / LONGEST
    if kind == "prompt_mean":
        own = sum(n for j, n in of.items() if GROUPS[j] == GROUPS[i])
        return 1 / len({int(GROUPS[j]) for j in of}) / own
    return 1 / sum(of.values())


def transcribed(t: Tokens, o: AlgorithmConfig) -> float:
    """- sum over samples and tokens, in Python's own numbers."""
    total, start = 0.0, 0
    for i, length in enumerate(LENGTHS.tolist()):
        places = range(start, start + length)
        start += length
        if not COUNTED[i]:
            continue
        sample = [(math.exp(t.logps[k]), math.exp(t.old[k])) for k in places]
        product = math.prod(new / old for new, old in sample)
        for k in places:
            ratio = math.exp(t.logps[k]) / math.exp(t.old[k])
            if o.importance_sampling_level == "sequence":
                ratio = product ** (1 / length)
            gain = gain_of(ratio, t.advantages[k], t.logps[k], o, sample)
            most = o.off_policy_mask_threshold
            if most is not None and t.advantages[k] < 0 and -math.log(product) / length > most:
                gain = 0.0
            term = -t.rollout_is_weights[k] * gain
            if o.loss_type == "kl_cov":
                held = t.penalties[k] * abs(math.log(ratio))
                term += t.rollout_is_weights[k] * held
            kl = kl_of(t.logps[k], t.reference[k], o.kl_estimator)
            term += o.beta * kl * (ratio if o.unbiased_kl else 1.0)
            term -= o.entropy_coef * t.entropy[k]
            total += weight_of(i, o) * term
    return total


@each_row("name", VARIANTS)
@each_row("on_policy", [True, False])
def test_every_loss_is_its_papers_formula(name: str, on_policy: bool) -> None:
    loss_config = VARIANTS[name]
    tokens = tokens_of(loss_config, on_policy)
    expected = transcribed(tokens, loss_config)
    # Weights are float32, and the terms may all but cancel.
    assert policy_loss(tokens, loss_config) == pytest.approx(expected, rel=1e-6, abs=2e-8)


def test_the_tokens_of_the_tests_tell_every_variant_from_the_others() -> None:
    found = [round(transcribed(tokens_of(o), o), 9) for o in VARIANTS.values()]
    assert len(set(found)) == len(found)


@each_row("aggregation", [None, "prompt_mean", "constant", "token_mean"])
@each_row("loss_type", LOSS_TYPES)
def test_weights_are_those_of_the_formula_and_none_where_a_sample_does_not_count(
    loss_type: str, aggregation: str | None
) -> None:
    loss_config = replace(WIDE, loss_type=loss_type, loss_aggregation=aggregation)
    found = token_weights(LENGTHS, loss_config, COUNTED, GROUPS, LONGEST)
    assert found.dtype == np.float32
    for i, weight in enumerate(found):
        if LENGTHS[i]:
            expected = weight_of(i, loss_config) if COUNTED[i] else 0.0
            assert weight == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "cispo"])
def test_the_weights_of_all_tokens_add_to_one_but_for_empty_samples(loss_type: str) -> None:
    lengths = np.array([5, 1, 40])
    weights = token_weights(lengths, replace(WIDE, loss_type=loss_type))
    assert float((weights * lengths).sum()) == pytest.approx(1.0, rel=1e-6)


def test_grpo_gives_every_sample_the_same_share_and_dapo_every_token() -> None:
    lengths = np.array([5, 1, 40])
    shares = token_weights(lengths, WIDE) * lengths
    np.testing.assert_allclose(shares, 1 / 3, rtol=1e-6)
    assert len(set(token_weights(lengths, replace(WIDE, loss_type="dapo")).tolist())) == 1


def test_dr_grpo_does_not_look_at_lengths() -> None:
    loss_config = replace(WIDE, loss_type="dr_grpo")
    np.testing.assert_array_equal(
        token_weights([1, 16], loss_config), token_weights([7, 2], loss_config)
    )


def test_an_empty_completion_counts_as_a_sample_and_has_a_finite_weight() -> None:
    np.testing.assert_allclose(token_weights([4, 0], WIDE), [1 / 8, 1 / 2], rtol=1e-6)
    assert token_weights([], WIDE).shape == (0,)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])
def test_where_no_sample_counts_all_weights_are_zero_and_finite(loss_type: str) -> None:
    loss_config = replace(WIDE, loss_type=loss_type)
    found = token_weights([4, 3], loss_config, np.array([False, False]))
    np.testing.assert_array_equal(found, [0.0, 0.0])


def test_samples_that_do_not_count_change_nothing_whatever_they_hold() -> None:
    for loss_config in (
        WIDE,
        replace(WIDE, loss_type="dapo"),
        replace(WIDE, loss_aggregation="prompt_mean"),
    ):
        alone = token_weights(
            LENGTHS[COUNTED], loss_config, groups=GROUPS[COUNTED], max_tokens=LONGEST
        )
        found = token_weights(LENGTHS, loss_config, COUNTED, GROUPS, LONGEST)
        np.testing.assert_array_equal(found[COUNTED], alone)


def test_k3_is_never_negative_and_every_estimate_is_zero_where_both_agree() -> None:
    rng = np.random.default_rng(1)
    logps, reference = rng.normal(size=100), rng.normal(size=100)
    assert (kl_estimate(logps, reference, "k3") >= 0).all()
    for estimator in ("k1", "k2", "k3"):
        np.testing.assert_array_equal(kl_estimate(logps, logps, estimator), 0.0)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean_under_the_policy(estimator: str) -> None:
    rng = np.random.default_rng(2)
    policy, reference = rng.dirichlet(np.ones(9), size=2)
    divergence = float((policy * np.log(policy / reference)).sum())
    estimates = kl_estimate(np.log(policy), np.log(reference), estimator)
    assert float((policy * estimates).sum()) == pytest.approx(divergence, abs=1e-12)


def test_k2s_gradient_is_the_divergences_under_the_policy() -> None:
    """E[grad k2] = E[(log p - log q) grad log p] = grad KL; of k1 it is E[grad log p] = 0."""
    rng = np.random.default_rng(3)
    logits, reference = rng.normal(size=7), np.log(rng.dirichlet(np.ones(7)))

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return np.asarray(x - np.log(np.exp(x).sum()))

    policy = np.exp(log_softmax(logits))
    for i in range(7):
        ends = [logits + sign * 1e-6 * np.eye(7)[i] for sign in (1, -1)]
        exact = [float((np.exp(log_softmax(x)) * (log_softmax(x) - reference)).sum()) for x in ends]
        for estimator, expected in (("k2", exact[0] - exact[1]), ("k1", 0.0)):
            means = [
                float((policy * kl_estimate(log_softmax(x), reference, estimator)).sum())
                for x in ends
            ]
            assert (means[0] - means[1]) / 2e-6 == pytest.approx(expected / 2e-6, abs=1e-8)


def marks(
    ratios: list[float], advantages: list[float], loss_config: AlgorithmConfig
) -> tuple[list[bool], list[bool]]:
    count = len(ratios)
    zeros, ones = np.zeros(count), np.ones(count)
    tokens = Tokens(
        np.log(ratios), zeros, zeros, zeros, np.array(advantages), ones, ones, np.array([1] * count)
    )
    low, high = clipped(tokens, loss_config)
    return low.tolist(), high.tolist()


def test_a_token_counts_as_clipped_only_where_the_clip_decides() -> None:
    ratios = [0.5, 1.0, 1.5] * 2 + [0.5, 1.5]
    advantages = [1.0] * 3 + [-1.0] * 3 + [0.0] * 2
    low, high = marks(ratios, advantages, WIDE)
    assert low == [False, False, False, True, False, False, False, False]
    assert high == [False, False, True, False, False, False, False, False]


def test_with_ratios_of_samples_a_sample_is_clipped_as_one_however_long_it_is() -> None:
    lengths = np.array([1, 6, 0, 3])
    ratios = np.repeat([0.5, 1.0, 1.0, 1.5], lengths)
    advantages = np.repeat([-1.0, 1.0, 1.0, 1.0], lengths)
    zeros, ones = np.zeros(10), np.ones(10)
    tokens = Tokens(np.log(ratios), zeros, zeros, zeros, advantages, ones, ones, lengths)
    low, high = clipped(tokens, replace(WIDE, importance_sampling_level="sequence"))
    assert (low.tolist(), high.tolist()) == ([True, False, False], [False, False, True])


def test_cispo_clips_weights_whatever_the_advantage_and_dual_bounds_count_as_upper_ends() -> None:
    ratios, advantages = [0.5, 1.5, 1.5, 1.5], [1.0, 1.0, -1.0, 0.0]
    low, high = marks(ratios, advantages, replace(WIDE, loss_type="cispo"))
    assert (low, high) == ([True, False, False, False], [False, True, True, True])
    for bound in ({"delta": 1.4}, {"dual_clip": 1.4}):
        assert marks(ratios, advantages, replace(WIDE, **bound))[1] == [False, True, True, False]
    assert marks(ratios, advantages, replace(WIDE, delta=1.6))[1] == [False, True, False, False]


def test_a_two_sided_clip_and_a_dual_clip_beyond_the_upper_end_are_the_same_bound() -> None:
    tokens = tokens_of(WIDE)
    two_sided = policy_loss(tokens, replace(WIDE, delta=1.5))
    assert two_sided == pytest.approx(policy_loss(tokens, replace(WIDE, dual_clip=1.5)), rel=1e-12)
