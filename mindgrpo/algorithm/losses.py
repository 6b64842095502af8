"""Computes losses on host arrays: token weights, the metrics of an update, and a reference for the graph's loss.

Pure numpy. The graph that is differentiated is in training/stage_graphs.py; `policy_loss` computes the same value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.loss_config import LossConfig


def token_weights(
    lengths: Sequence[int] | np.ndarray,
    loss_config: LossConfig,
    sample_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Returns float32 [samples], the weight in the loss of each token of a sample, over the whole of an update.

    With N samples, `lengths` |o_i| being the tokens of each that the policy wrote:
      grpo            1 / (N |o_i|)      DeepSeekMath, arXiv:2402.03300, equation 3
      bnpo, dapo      1 / sum_j |o_j|    DAPO, arXiv:2503.14476, equation 12
      cispo           1 / sum_j |o_j|    MiniMax-M1, arXiv:2506.13585, equation 4
      dr_grpo         1 / (N L)          Dr. GRPO, arXiv:2503.20783, section 3.2, L = max_completion_length

    N counts the empty samples too, and all micro-batches and ranks, so neither packing nor layout changes the loss;
    bnpo's local batch is the update for the same reason. Samples outside of `sample_mask` (bool [samples]; DAPO's
    over-long filtering, section 3.4) weigh nothing and count neither in N nor in the sum.
    """
    sizes = np.asarray(lengths, np.float64)
    mask = np.ones(sizes.size) if sample_mask is None else np.asarray(sample_mask, np.float64)
    number = max(1.0, mask.sum())
    if loss_config.loss_type == "grpo":
        weights = 1.0 / (np.maximum(sizes, 1.0) * number)
    elif loss_config.loss_type == "dr_grpo":
        weights = np.full(sizes.size, 1.0 / (number * loss_config.max_completion_length))
    else:
        weights = np.full(sizes.size, 1.0 / max(1.0, float((sizes * mask).sum())))
    return (weights * mask).astype(np.float32)


def kl_estimate(logps: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """Estimates KL(policy || reference) of each token, from tokens that the policy drew.

    With d = logp - ref: k1 = d, unbiased; k2 = d^2 / 2; k3 = exp(-d) + d - 1 >= 0, unbiased (J. Schulman,
    "Approximating KL divergence", 2020; k3: arXiv:2402.03300, equation 4).
    """
    difference = logps - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return np.exp(-difference) + difference - 1.0


def has_gradient(
    advantages: Sequence[np.ndarray] | np.ndarray, weights: np.ndarray, loss_config: LossConfig
) -> np.ndarray:
    """Returns bool [samples]: whether a sample's term of `policy_loss` depends on the policy at all.

    It does not without a weight, nor with advantages 0 (a group of equal rewards) unless KL or entropy is in the loss.
    `advantages` holds a number or float [completion length] per sample.
    """
    weighted = weights > 0
    if loss_config.beta > 0 or loss_config.entropy_coef > 0:
        return weighted
    return weighted & np.array([bool(np.any(value)) for value in advantages], bool)


@dataclass(frozen=True)
class Tokens:
    """An update's tokens that the policy wrote, sample after sample: float [tokens] each, `lengths` int [samples]."""

    logps: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    rollout_is_weights: np.ndarray
    lengths: np.ndarray


def importance_ratio(
    logps: np.ndarray, old: np.ndarray, lengths: np.ndarray, level: str
) -> np.ndarray:
    """Computes the ratio rho of each token, float [tokens]: at level "token" exp(logp_t - old_t).

    At level "sequence" the exponential of that difference's mean over the sample, for all its tokens (GSPO,
    arXiv:2507.18071, equation 7).
    """
    difference = logps - old
    if level == "sequence":
        owners = np.repeat(np.arange(len(lengths)), lengths)
        sums = np.bincount(owners, difference, minlength=len(lengths))
        difference = (sums / np.maximum(lengths, 1))[owners]
    return np.exp(difference)


def surrogate(ratio: np.ndarray, advantages: np.ndarray, loss_config: LossConfig) -> np.ndarray:
    """Computes the clipped surrogate, which is maximised, per token.

    min(rho A, clip(rho, 1 - low, 1 + high) A) (arXiv:2402.03300, equation 3; separate low and high: DAPO,
    arXiv:2503.14476, equation 10). Two-sided: rho in the first term is min(rho, delta) (INTELLECT-2, arXiv:2505.07291,
    two-sided clipping). Dual clip: not below c A where A < 0 (arXiv:1912.09729, equation 5).
    """
    bounded = ratio if loss_config.delta is None else np.minimum(ratio, loss_config.delta)
    clipped = np.clip(ratio, 1.0 - loss_config.epsilon_low, 1.0 + loss_config.epsilon_high)
    value = np.minimum(bounded * advantages, clipped * advantages)
    if loss_config.dual_clip is not None:
        floor = loss_config.dual_clip * advantages
        value = np.where(advantages < 0, np.maximum(value, floor), value)
    return np.asarray(value)


def cispo_surrogate(
    ratio: np.ndarray, advantages: np.ndarray, logps: np.ndarray, loss_config: LossConfig
) -> np.ndarray:
    """Computes sg(clip(rho, 1 - low, 1 + high)) A logp per token; the weight is a constant, so no token loses its
    gradient.

    (MiniMax-M1, arXiv:2506.13585, equations 4 and 5.)
    """
    weight = np.clip(ratio, 1.0 - loss_config.epsilon_low, 1.0 + loss_config.epsilon_high)
    return np.asarray(weight * advantages * logps)


def policy_loss(tokens: Tokens, loss_config: LossConfig, held: np.ndarray | None = None) -> float:
    """Computes the loss sum_t w_t (-f_t S_t + beta KL_t - c H_t).

    S is the surrogate, f the importance weight that corrects for the generator, H the entropy. `held` float [tokens]
    are log-probs to use where the loss has stop-gradients, for finite differences; None: the policy's.
    """
    level = loss_config.importance_sampling_level
    if loss_config.loss_type == "cispo":
        constant = tokens.logps if held is None else held
        ratio = importance_ratio(constant, tokens.old, tokens.lengths, level)
        gain = cispo_surrogate(ratio, tokens.advantages, tokens.logps, loss_config)
    else:
        ratio = importance_ratio(tokens.logps, tokens.old, tokens.lengths, level)
        gain = surrogate(ratio, tokens.advantages, loss_config)
    terms = -tokens.rollout_is_weights * gain
    if loss_config.beta > 0:
        terms = terms + loss_config.beta * kl_estimate(
            tokens.logps, tokens.reference, loss_config.kl_estimator
        )
    if loss_config.entropy_coef > 0:
        terms = terms - loss_config.entropy_coef * tokens.entropy
    return float((tokens.weights * terms).sum())


def clipped(tokens: Tokens, loss_config: LossConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns two bool [tokens]: whether the lower, or the upper, end of the clip decided a token's term.

    With ratios of whole samples two bool [samples], of the samples that have tokens: a sample is clipped as one.
    For cispo: whether the weight was clipped. The bound of delta or dual_clip counts as an upper end.
    """
    level = loss_config.importance_sampling_level
    ratio = importance_ratio(tokens.logps, tokens.old, tokens.lengths, level)
    advantages = tokens.advantages
    if level == "sequence":
        starts = np.cumsum(tokens.lengths) - tokens.lengths
        rows = np.flatnonzero(tokens.lengths)
        owners = np.repeat(np.arange(len(tokens.lengths)), tokens.lengths)
        sums = np.bincount(owners, advantages, minlength=len(tokens.lengths))
        # A sample's advantage is one number unless KL in the reward makes it a token's own.
        advantages = (sums / np.maximum(tokens.lengths, 1))[rows]
        ratio = ratio[starts[rows]]
    low, high = ratio < 1.0 - loss_config.epsilon_low, ratio > 1.0 + loss_config.epsilon_high
    if loss_config.loss_type == "cispo":
        return low, high
    low, high = low & (advantages < 0), high & (advantages > 0)
    bound = loss_config.delta if loss_config.dual_clip is None else loss_config.dual_clip
    if bound is not None:
        high = high | ((ratio > bound) & (advantages < 0))
    return low, high
