"""Computes what a loss maximises, its surrogate, on host arrays: one function a name of `loss_config.LOSS_TYPES`.

Pure numpy. training/surrogates.py has the same as cells of the graph that is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.loss_config import LossConfig


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


def clipped_surrogate(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes min(rho A, clip(rho, 1 - low, 1 + high) A) (arXiv:2402.03300, equation 3).

    Separate low and high: DAPO, arXiv:2503.14476, equation 10. Two-sided: rho in the first term is min(rho, delta)
    (INTELLECT-2, arXiv:2505.07291, two-sided clipping). Dual clip: not below c A where A < 0 (arXiv:1912.09729,
    equation 5).
    """
    advantages = tokens.advantages
    ratio = importance_ratio(
        tokens.logps, tokens.old, tokens.lengths, config.importance_sampling_level
    )
    bounded = ratio if config.delta is None else np.minimum(ratio, config.delta)
    clipped = np.clip(ratio, 1.0 - config.epsilon_low, 1.0 + config.epsilon_high)
    value = np.minimum(bounded * advantages, clipped * advantages)
    if config.dual_clip is not None:
        value = np.where(advantages < 0, np.maximum(value, config.dual_clip * advantages), value)
    return np.asarray(value)


def cispo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(clip(rho, 1 - low, 1 + high)) A log p (MiniMax-M1, arXiv:2506.13585, equations 4 and 5)."""
    ratio = importance_ratio(held, tokens.old, tokens.lengths, "token")
    weight = np.clip(ratio, 1.0 - config.epsilon_low, 1.0 + config.epsilon_high)
    return np.asarray(weight * tokens.advantages * tokens.logps)


# (tokens, settings, log-probs where the surrogate stops gradients) -> float [tokens].
Surrogate = Callable[[Tokens, LossConfig, np.ndarray], np.ndarray]
SURROGATES: dict[str, Surrogate] = {
    "clip": clipped_surrogate,
    "cispo": cispo,
}
