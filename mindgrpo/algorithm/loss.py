"""GRPO's loss on host arrays: token weights and the figures of a step, and the reference the graph is held to.

Pure numpy. The graph that is differentiated is update/loss_cell.py; `grpo_loss` says the same without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def token_weights(completion_lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 [samples], the weight of each token of a sample: 1 / (N |o_i|) (arXiv:2402.03300, equation 3).

    N counts the update's samples, the empty ones too, over all micro-batches and ranks, so neither packing nor
    layout changes the loss.
    """
    lengths = np.asarray(completion_lengths, np.float64)
    return (1.0 / (np.maximum(lengths, 1.0) * max(1, lengths.size))).astype(np.float32)


def k3(logps: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """k3 = exp(ref - logp) - (ref - logp) - 1 >= 0, an unbiased estimate of KL(policy || reference).

    (J. Schulman, "Approximating KL divergence", 2020; arXiv:2402.03300, equation 4.)
    """
    difference = reference - logps
    return np.exp(difference) - difference - 1.0


def grpo_loss(
    logps: np.ndarray,
    old: np.ndarray,
    reference: np.ndarray,
    advantages: np.ndarray,
    weights: np.ndarray,
    epsilon: tuple[float, float],
    beta: float,
) -> float:
    """sum_t w_t (-min(rho A, clip(rho, 1 - low, 1 + high) A) + beta k3), rho = exp(logp - old).

    All arrays float [tokens]; arXiv:2402.03300, equation 3, with the separate clip ends of DAPO
    (arXiv:2503.14476, section 3.1).
    """
    ratio = np.exp(logps - old)
    clipped = np.clip(ratio, 1.0 - epsilon[0], 1.0 + epsilon[1])
    surrogate = np.minimum(ratio * advantages, clipped * advantages)
    return float((weights * (beta * k3(logps, reference) - surrogate)).sum())


def is_clipped(
    logps: np.ndarray, old: np.ndarray, advantage: float, epsilon: tuple[float, float]
) -> np.ndarray:
    """bool [tokens]: the clip, not the ratio, decided the token's term."""
    ratio = np.exp(logps - old)
    low = (ratio < 1.0 - epsilon[0]) & (advantage < 0)
    high = (ratio > 1.0 + epsilon[1]) & (advantage > 0)
    return np.asarray(low | high)


def token_mean(values: Sequence[np.ndarray]) -> float:
    """0.0 where there is no token at all."""
    count = sum(v.size for v in values)
    return float(sum(v.astype(np.float64).sum() for v in values) / count) if count else 0.0
