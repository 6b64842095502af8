"""Computes what a loss maximises, its surrogate, on host arrays: one function a name of `loss_config.LOSS_TYPES`.

Pure numpy. training/surrogates.py has the same as cells of the graph that is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.exponentials import exp, log
from mindgrpo.algorithm.loss_config import LossConfig

# Added to the probability of all other tokens, which is rounded to 0 where a token's is 1.
PROBABILITY_FLOOR = 1e-8
LARGEST_LOG_RATIO = 20.0


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
    penalties: np.ndarray | float = 0.0


def importance_ratio(
    logps: np.ndarray, old: np.ndarray, lengths: np.ndarray, level: str
) -> np.ndarray:
    """Computes the ratio rho of each token, float [tokens]: at level "token" exp(logp_t - old_t).

    At level "sequence" the exponential of that difference's mean over the sample, for all its tokens (GSPO,
    arXiv:2507.18071, equation 7).
    """
    difference = logps - old
    return exp(sample_means(difference, lengths) if level == "sequence" else difference)


def sample_means(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the mean of `values` over each token's sample, float [tokens]."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owners, values, minlength=len(lengths))
    return np.asarray((sums / np.maximum(lengths, 1))[owners])


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


def sapo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes 4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A (SAPO, arXiv:2511.20347)."""
    ratio = importance_ratio(tokens.logps, tokens.old, tokens.lengths, "token")
    signs = tokens.advantages > 0
    tau = np.where(signs, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return np.asarray(4.0 / tau / (1.0 + exp(-tau * (ratio - 1.0))) * tokens.advantages)


def dppo_keeps(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Returns bool [tokens]: which are inside of DPPO's trust region, or come back to it (arXiv:2602.04879).

    With pi = exp(log p) and mu = exp(old log p), of a token with A > 0 where pi - mu <= high, of others where
    pi - mu >= -low (total variation, dppo_tv); or where mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) is at most
    high or low, or pi has moved against the sign of A (binary KL, dppo_kl).
    """
    pi, mu = exp(held), exp(tokens.old)
    rises = tokens.advantages > 0
    if config.surrogate == "dppo_tv":
        moved = np.where(rises, pi - mu - config.epsilon_high, mu - pi - config.epsilon_low)
        return np.asarray(moved <= 0)
    rest = log((1.0 - mu + PROBABILITY_FLOOR) / (1.0 - pi + PROBABILITY_FLOOR))
    divergence = mu * (tokens.old - held) + (1.0 - mu) * rest
    bound = np.where(rises, config.epsilon_high, config.epsilon_low)
    return np.asarray((divergence <= bound) | np.where(rises, pi <= mu, pi >= mu))


def dppo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(min(rho, cap)) A log p of the tokens that `dppo_keeps`, 0 of others (DPPO, arXiv:2602.04879)."""
    ratio = importance_ratio(held, tokens.old, tokens.lengths, "token")
    weight = np.minimum(ratio, config.dppo_ratio_cap) * dppo_keeps(tokens, config, held)
    return np.asarray(weight * tokens.advantages * tokens.logps)


def gmpo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes exp(mean over the sample of log rho, clipped) A, the same for all its tokens (GMPO, arXiv:2507.20673).

    log rho is at most `high` where A > 0, and at least -`low` where A < 0.
    """
    log_ratio, sign = tokens.logps - tokens.old, np.sign(tokens.advantages)
    clipped = np.clip(log_ratio, -config.epsilon_low, config.epsilon_high)
    kept = sign * np.minimum(sign * log_ratio, sign * clipped)
    return np.asarray(exp(sample_means(kept, tokens.lengths)) * tokens.advantages)


def vespo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(phi(W)) A log p, phi(W) = W^k exp(lambda (1 - W)), k and lambda by the sign of A.

    W is the product of rho over the sample (VESPO, arXiv:2602.10693). As phi vanishes long before, log W counts as
    LARGEST_LOG_RATIO at most.
    """
    log_ratio = sample_means(held - tokens.old, tokens.lengths)
    lengths = np.repeat(tokens.lengths, tokens.lengths)
    log_w = np.minimum(log_ratio * lengths, LARGEST_LOG_RATIO)
    rises = tokens.advantages >= 0
    k = np.where(rises, config.vespo_k_pos, config.vespo_k_neg)
    strength = np.where(rises, config.vespo_lambda_pos, config.vespo_lambda_neg)
    phi = exp(k * log_w + strength * (1.0 - exp(log_w)))
    return np.asarray(phi * tokens.advantages * tokens.logps)


def plain_ratio(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes rho A, which nothing clips (KL-Cov, arXiv:2505.22617, equation 13)."""
    return np.asarray(exp(tokens.logps - tokens.old) * tokens.advantages)


def gpg(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes A log p, the plain policy gradient (GPG, arXiv:2504.02546)."""
    return np.asarray(tokens.advantages * tokens.logps)


# (tokens, settings, log-probs where the surrogate stops gradients) -> float [tokens].
Surrogate = Callable[[Tokens, LossConfig, np.ndarray], np.ndarray]
SURROGATES: dict[str, Surrogate] = {
    "clip": clipped_surrogate,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": dppo,
    "dppo_kl": dppo,
    "gmpo": gmpo,
    "vespo": vespo,
    "gpg": gpg,
    "ratio": plain_ratio,
}
