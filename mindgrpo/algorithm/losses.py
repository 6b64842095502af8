"""Computes token weights, an update's metrics, and the reference value of the graph's loss, in pure numpy.

The differentiated graph is in training/stage_graphs.py; `policy_loss` computes the same value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mindgrpo.algorithm.exponentials import exp
from mindgrpo.algorithm.surrogates import (
    LOSS_TYPES,
    LossConfig,
    Tokens,
    cispo,
    dppo,
    dppo_keeps,
    gmpo,
    importance_ratio,
    sample_means,
)


def token_weights(
    lengths: Sequence[int] | np.ndarray,
    loss_config: LossConfig,
    sample_mask: np.ndarray | None = None,
    groups: Sequence[int] | np.ndarray | None = None,
    max_tokens: int = 1,
) -> np.ndarray:
    """Returns float32 [samples]: the weight of each of a sample's tokens in the update's loss.

    With N samples and `lengths` |o_i|, the number of the policy's own tokens in each:
      sample_mean   1 / (N |o_i|)                  DeepSeekMath, arXiv:2402.03300, equation 3
      token_mean    1 / sum_j |o_j|                DAPO, arXiv:2503.14476, equation 12
      sample_sum    1 / N                          LUSPO, arXiv:2602.05261
      constant      1 / (N L)                      Dr. GRPO, arXiv:2503.20783, section 3.2, L = max_tokens
      prompt_mean   1 / (P sum_{j of i's group} |o_j|)   ScaleRL, arXiv:2510.13786, of P groups

    N includes empty samples and covers all micro-batches and ranks, so that neither packing nor layout changes the
    loss; for the same reason bnpo's local batch is the whole update. Samples outside of `sample_mask` (bool [samples];
    DAPO's overlong filtering, section 3.4) have weight 0 and count in no N, P or sum. `groups` int [samples] are the
    samples' prompts; None: each sample has its own. If several updates share a group, each counts its own samples.
    """
    sizes = np.asarray(lengths, np.float64)
    mask = np.ones(sizes.size) if sample_mask is None else np.asarray(sample_mask, np.float64)
    number = max(1.0, mask.sum())
    if loss_config.aggregation == "sample_mean":
        weights = 1.0 / (np.maximum(sizes, 1.0) * number)
    elif loss_config.aggregation == "constant":
        weights = np.full(sizes.size, 1.0 / (number * max_tokens))
    elif loss_config.aggregation == "sample_sum":
        weights = np.full(sizes.size, 1.0 / number)
    elif loss_config.aggregation == "prompt_mean":
        of = np.unique(np.arange(sizes.size) if groups is None else groups, return_inverse=True)[1]
        counted = np.bincount(of, mask) > 0
        tokens = np.maximum(np.bincount(of, sizes * mask), 1.0)
        weights = 1.0 / (tokens[of] * max(1.0, counted.sum()))
    else:
        weights = np.full(sizes.size, 1.0 / max(1.0, float((sizes * mask).sum())))
    return (weights * mask).astype(np.float32)


def kl_estimate(logps: np.ndarray, reference: np.ndarray, estimator: str) -> np.ndarray:
    """Estimates KL(policy || reference) of each token, sampled by the policy; float, as the inputs.

    With d = logp - ref: k1 = d, unbiased; k2 = d^2 / 2; k3 = exp(-d) + d - 1 >= 0, unbiased (J. Schulman,
    "Approximating KL divergence", 2020; k3: arXiv:2402.03300, equation 4).
    """
    difference = logps - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    return exp(-difference) + difference - 1.0


def has_gradient(
    advantages: Sequence[np.ndarray] | np.ndarray, weights: np.ndarray, loss_config: LossConfig
) -> np.ndarray:
    """Returns bool [samples]: whether a sample's term of `policy_loss` has a gradient.

    It has none with weight 0, nor with advantages 0 (a group of equal rewards) unless the loss has a KL, entropy or
    penalty term. `advantages` holds a number or float [completion length] per sample.
    """
    weighted = weights > 0
    if loss_config.loss_beta > 0 or loss_config.entropy_coef > 0 or loss_config.penalises:
        return weighted
    return weighted & np.array([bool(np.any(value)) for value in advantages], bool)


def policy_loss(tokens: Tokens, loss_config: LossConfig, held: np.ndarray | None = None) -> float:
    """Computes the loss sum_t w_t (-f_t S_t + f_t c_t |log rho_t| + beta KL_t - c H_t).

    S is the surrogate (surrogates.py), f the importance weight that corrects for the generator, c_t the penalty of
    kl_cov (token_selection.py), H the entropy. `held` float [tokens] replace the log-probs under stop-gradients, for
    finite differences; None: the policy's. The surrogate and penalty are 0 where A < 0 and the sample's mean of
    -log rho is above off_policy_mask_threshold; with unbiased_kl, KL_t is multiplied by rho_t (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1).
    """
    held = tokens.logps if held is None else held
    gain = LOSS_TYPES[loss_config.loss_type].surrogate(tokens, loss_config, held)
    if loss_config.penalises:
        gain = gain - tokens.penalties * np.abs(tokens.logps - tokens.old)
    if loss_config.off_policy_mask_threshold is not None:
        gain = np.where(off_policy(tokens, loss_config.off_policy_mask_threshold, held), 0.0, gain)
    terms = -tokens.rollout_is_weights * gain
    if loss_config.loss_beta > 0:
        kl = kl_estimate(tokens.logps, tokens.reference, loss_config.kl_estimator)
        if loss_config.unbiased_kl:
            level = loss_config.importance_sampling_level
            kl = kl * importance_ratio(tokens.logps, tokens.old, tokens.lengths, level)
        terms = terms + loss_config.loss_beta * kl
    if loss_config.entropy_coef > 0:
        terms = terms - loss_config.entropy_coef * tokens.entropy
    return float((tokens.weights * terms).sum())


def off_policy(tokens: Tokens, threshold: float, held: np.ndarray) -> np.ndarray:
    """Returns bool [tokens]: tokens of samples masked by `threshold` (off_policy_mask_threshold); see `policy_loss`."""
    drift = sample_means(tokens.old - held, tokens.lengths)
    return np.asarray((tokens.advantages < 0) & (drift > threshold))


def clipped(tokens: Tokens, loss_config: LossConfig) -> tuple[np.ndarray, np.ndarray]:
    """Returns two bool [tokens]: whether a token was clipped at the lower, and at the upper bound.

    With importance ratios per sample, returns two bool [samples with tokens] instead. For cispo: whether the weight was
    clipped; for dppo: whether the token was dropped. The bound of delta or dual_clip counts as upper.
    """
    surrogate = LOSS_TYPES[loss_config.loss_type].surrogate
    if surrogate is dppo:
        out, rises = ~dppo_keeps(tokens, loss_config, tokens.logps), tokens.advantages > 0
        return out & ~rises, out & rises
    below, above = loss_config.clip_bounds
    ends = 1.0 - below, 1.0 + above
    if surrogate is gmpo:
        ends = math.exp(-below), math.exp(above)
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
    low, high = ratio < ends[0], ratio > ends[1]
    if surrogate is cispo:
        return low, high
    low, high = low & (advantages < 0), high & (advantages > 0)
    bound = loss_config.delta if loss_config.dual_clip is None else loss_config.dual_clip
    if bound is not None:
        high = high | ((ratio > bound) & (advantages < 0))
    return low, high
