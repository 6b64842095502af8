"""Importance weights that correct for a generator whose probabilities are not quite the trainer's. Pure numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.sample import Arrays

# In metrics a ratio counts at most so much: the product over a long sample may be beyond every float.
LARGEST_RATIO = math.exp(20.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """`weights` float32 [completion length] per sample; the other figures are of the ratios before the cap.

    `mean` and `largest` are over the tokens that the policy wrote, each with its sample's ratio at sequence level and
    counted as LARGEST_RATIO at most; `capped` is the share of these whose ratio is above the cap.
    """

    weights: list[np.ndarray]
    mean: float
    largest: float
    capped: float


def correct_rollout(
    trainer: Arrays, generator: Arrays, action_mask: Arrays, mode: str, cap: float
) -> RolloutCorrection:
    """Computes weights of the policy's term: rho_t = p_trainer(o_t) / p_generator(o_t), at most `cap`, or 0 above it.

    token_truncate: min(rho_t, C) (F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025). sequence_*: rho is the product over the sample, the same for all its tokens (J. Liu et al.,
    "When Speed Kills Stability", 2025). *_mask: rho where rho <= C, else 0 (masked importance sampling, same text).
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
            ratios.append(np.exp(difference))
    bounded = cap if cut == "truncate" else 0.0
    weights = [np.where(ratio > cap, bounded, ratio).astype(np.float32) for ratio in ratios]
    actions = [ratio[mask] for ratio, mask in zip(ratios, action_mask, strict=True)]
    tokens = np.concatenate([*actions, np.zeros(0)])
    if not tokens.size:
        return RolloutCorrection(weights, 1.0, 1.0, 0.0)
    capped = float((tokens > cap).mean())
    bounded_tokens = np.minimum(tokens, LARGEST_RATIO)
    return RolloutCorrection(
        weights, float(bounded_tokens.mean()), float(bounded_tokens.max()), capped
    )
