"""Importance weights that correct for the mismatch between generator and trainer, and rejection of samples. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.exponentials import exp
from mindgrpo.algorithm.sample import Arrays

# The cap of ratios in metrics: the product over a long sample may overflow.
LARGEST_RATIO = math.exp(20.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance `weights`, float32 [completion length] per sample, and statistics of the ratios before clamping.

    The statistics are over the policy's own tokens, each with its sample's ratio at sequence level, limited to
    LARGEST_RATIO: their `mean`, the `largest`, and `capped`, the fraction above the cap or below the floor.
    """

    weights: list[np.ndarray]
    mean: float
    largest: float
    capped: float


def correct_rollout(
    trainer: Arrays,
    generator: Arrays,
    action_mask: Arrays,
    mode: str,
    cap: float,
    floor: float = 0.0,
) -> RolloutCorrection:
    """Computes the policy term's weights from rho_t = p_trainer(o_t) / p_generator(o_t), truncated or masked by `mode`.

    token_truncate: min(rho_t, C) (F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025). sequence_*: rho is the product over the sample, the same for all its tokens (J. Liu et al.,
    "When Speed Kills Stability", 2025). *_mask: rho where floor <= rho <= C, else 0 (masked importance sampling, same
    text; with a floor IcePop, arXiv:2510.18855). *_truncate: at least `floor`.
    `trainer` and `generator` float [completion length] per sample are log-probs before the step's first update; tokens
    outside of `action_mask` (bool, likewise) are ignored.
    """
    level, _, cut = mode.partition("_")
    ratios = []
    for own, other, mask in zip(trainer, generator, action_mask, strict=True):
        difference = np.where(mask, own.astype(np.float64) - other, 0.0)
        if level == "sequence":
            difference = np.full(difference.shape, difference.sum())
        with np.errstate(over="ignore"):  # an infinite ratio is above any cap
            ratios.append(exp(difference))
    above, below = (cap, floor) if cut == "truncate" else (0.0, 0.0)
    weights = [
        np.where(ratio > cap, above, np.where(ratio < floor, below, ratio)).astype(np.float32)
        for ratio in ratios
    ]
    actions = [ratio[mask] for ratio, mask in zip(ratios, action_mask, strict=True)]
    tokens = np.concatenate([*actions, np.zeros(0)])
    if not tokens.size:
        return RolloutCorrection(weights, 1.0, 1.0, 0.0)
    capped = float(((tokens > cap) | (tokens < floor)).mean())
    bounded_tokens = np.minimum(tokens, LARGEST_RATIO)
    return RolloutCorrection(
        weights, float(bounded_tokens.mean()), float(bounded_tokens.max()), capped
    )


def rejected_samples(
    trainer: Arrays, generator: Arrays, action_mask: Arrays, config: AlgorithmConfig
) -> np.ndarray:
    """Returns bool [samples]: whether to reject a sample because generator and trainer disagree too much about it.

    With d_t = log p_trainer(o_t) - log p_generator(o_t), a sample is rejected if exp(mean of d) is outside of
    rejection_geometric_low and _high (geometric sequence masking, J. Liu et al., "When Speed Kills Stability", 2025),
    if the mean of exp(d) - 1 - d (the k3 estimate) is above rejection_k3, or if any exp(d_t) is below rejection_veto.
    Arguments as in `correct_rollout`; bounds of None reject nothing.
    """
    low, high = config.rejection_geometric_low, config.rejection_geometric_high
    rejected = []
    for own, other, mask in zip(trainer, generator, action_mask, strict=True):
        difference = (own.astype(np.float64) - other)[mask]
        if not difference.size:
            rejected.append(False)
            continue
        ratio = exp(np.minimum(difference, math.log(LARGEST_RATIO)))
        mean, k3 = math.exp(min(difference.mean(), 20.0)), float((ratio - 1.0 - difference).mean())
        rejected.append(
            (low is not None and mean < low)
            or (high is not None and mean > high)
            or (config.rejection_k3 is not None and k3 > config.rejection_k3)
            or (config.rejection_veto is not None and float(ratio.min()) < config.rejection_veto)
        )
    return np.array(rejected, bool)
