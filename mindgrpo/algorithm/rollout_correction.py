"""Factors that correct for a generator whose probabilities are not quite the trainer's. Pure numpy.

Refuses to guess: both sides' log-probs of the same tokens are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@dataclass(frozen=True)
class Mismatch:
    """`factors` float32 [completion length] a sample; the other figures are of the ratios before the cap.

    `mean` and `largest` are over tokens, each with its sample's ratio at sequence level; `capped` is the share of
    tokens whose ratio is above the cap.
    """

    factors: list[np.ndarray]
    mean: float
    largest: float
    capped: float


def correct_mismatch(
    trainer: Sequence[np.ndarray], generator: Sequence[np.ndarray], mode: str, cap: float
) -> Mismatch:
    """Weights for the policy's term: rho_t = p_trainer(o_t) / p_generator(o_t), at most `cap`, or 0 above it.

    token_truncate: min(rho_t, C) (F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", 2025). sequence_*: rho is the product over the sample, the same for all its tokens (J. Liu et al.,
    "When Speed Kills Stability", 2025). *_mask: rho where rho <= C, else 0 (masked importance sampling, same text).
    `trainer` and `generator` float [completion length] a sample, log-probs before the step's first update.
    """
    level, _, way = mode.partition("_")
    ratios = []
    for own, other in zip(trainer, generator, strict=True):
        difference = own.astype(np.float64) - other
        if level == "sequence":
            difference = np.full(difference.shape, difference.sum())
        with np.errstate(over="ignore"):  # an infinite ratio is above any cap
            ratios.append(np.exp(difference))
    above = [ratio > cap for ratio in ratios]
    bounded = cap if way == "truncate" else 0.0
    factors = [
        np.where(high, bounded, ratio).astype(np.float32)
        for high, ratio in zip(above, ratios, strict=True)
    ]
    tokens = np.concatenate([*ratios, np.zeros(0)])
    if not tokens.size:
        return Mismatch(factors, 1.0, 1.0, 0.0)
    share = float(np.concatenate(above).mean())
    return Mismatch(factors, float(tokens.mean()), float(tokens.max()), share)
