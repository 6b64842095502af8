"""Selects tokens of an update by the policy's log-probs and entropies before the update. Pure numpy.

The selection is over all tokens of the update, so that neither packing nor layout changes it.
"""

from __future__ import annotations

import numpy as np

from mindgrpo.algorithm.losses import clipped
from mindgrpo.algorithm.surrogates import LossConfig, Tokens


def covariances(tokens: Tokens) -> np.ndarray:
    """Returns (A - mean of A) (log p - mean of log p), float [tokens] (arXiv:2505.22617, equation 10)."""
    advantages, logps = tokens.advantages, tokens.logps
    return np.asarray((advantages - advantages.mean()) * (logps - logps.mean()))


def select_tokens(
    tokens: Tokens, config: LossConfig, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two float [tokens]: each token's factor of the surrogate, and its coefficient of |log rho|.

    clip_cov: a random fraction clip_cov_ratio of all tokens, at least one, sampled from unclipped tokens with a
    covariance between clip_cov_low and clip_cov_high, get factor 0. kl_cov: the fraction kl_cov_ratio of tokens with
    the highest covariance, at least one, get the coefficient kl_cov_coef (Clip-Cov and KL-Cov, arXiv:2505.22617,
    section 4). top_entropy_quantile: only tokens of the highest entropy keep factor 1 (arXiv:2506.01939).
    """
    count = tokens.logps.size
    factors, penalties = np.ones(count), np.zeros(count)
    if not count:
        return factors, penalties
    if config.loss_type == "clip_cov":
        covariance = covariances(tokens)
        free = (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)
        low, high = clipped(tokens, config)
        candidates = np.flatnonzero(free & ~low & ~high)
        number = min(max(1, int(config.clip_cov_ratio * count)), candidates.size)
        factors[rng.choice(candidates, number, replace=False)] = 0.0
    if config.loss_type == "kl_cov":
        number = max(1, int(config.kl_cov_ratio * count))
        penalties[np.argsort(-covariances(tokens), kind="stable")[:number]] = config.kl_cov_coef
    if config.top_entropy_quantile < 1.0:
        least = np.quantile(tokens.entropy, 1.0 - config.top_entropy_quantile)
        factors[tokens.entropy < least] = 0.0
    return factors, penalties
