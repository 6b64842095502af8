"""Chooses tokens of a whole update by the policy's log-probs and entropies before it. Pure numpy.

Which tokens are chosen depends on all of the update's, so neither packing nor layout changes it.
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
    """Returns two float [tokens]: what multiplies each token's surrogate, and the weight of its |log rho|.

    clip_cov: a random clip_cov_ratio of all tokens, drawn among those whose covariance is above clip_cov_low and below
    clip_cov_high and which are not clipped, lose their term; kl_cov: the kl_cov_ratio of tokens with the highest
    covariance are held by kl_cov_coef |log rho| (Clip-Cov and KL-Cov, arXiv:2505.22617, section 4). One token at least.
    top_entropy_quantile: the surrogate counts for the tokens of highest entropy only (arXiv:2506.01939).
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
