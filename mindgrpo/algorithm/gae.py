"""Generalised advantage estimation with a critic's values, and the critic's loss. Pure numpy, in float64.

Sequences are a sample's own tokens only: context, such as the answers of tools, has no value and no reward, and is
passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.sample import Arrays


@dataclass(frozen=True)
class Valued:
    """Advantages, values and returns by sample, float32 [completion length] each, 0 on context."""

    advantages: Arrays
    values: Arrays
    returns: Arrays


def generalised_advantages(
    rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float, last_value: float = 0.0
) -> np.ndarray:
    """Computes A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, as float64 [tokens].

    arXiv:1506.02438, equation 16; `last_value` is that of the state behind the last token.
    """
    following = np.append(values[1:], last_value)
    deltas = rewards + gamma * following - values
    advantages, carried = np.zeros(len(values)), 0.0
    for t in range(len(values) - 1, -1, -1):
        carried = deltas[t] + gamma * lam * carried
        advantages[t] = carried
    return advantages


def rewards_by_token(
    mask: np.ndarray, penalties: np.ndarray, reward: float, turn_rewards: np.ndarray | None
) -> np.ndarray:
    """Returns float64 [own tokens]: minus the KL `penalties` [completion length], plus rewards.

    `reward` is that of the last token of `mask` [completion length]; with `turn_rewards` [turns], each is that of the
    last token of its turn, and turns are separated by context. Raises ValueError if there are not as many turns.
    """
    rewards = -penalties[mask].astype(np.float64)
    if not rewards.size:
        return rewards
    if turn_rewards is None:
        rewards[-1] += reward
        return rewards
    ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
    if len(ends) != len(turn_rewards):
        raise ValueError(f"{len(ends)} turns have {len(turn_rewards)} rewards")
    rewards[np.cumsum(mask)[ends] - 1] += turn_rewards
    return rewards


def whitened(sequences: Sequence[np.ndarray], counts: np.ndarray, floor: float) -> Arrays:
    """Subtracts the mean over the tokens of sequences that count (bool [samples]), and divides by their deviation."""
    counted = [own for own, is_counted in zip(sequences, counts, strict=True) if is_counted]
    tokens = np.concatenate([*counted, np.zeros(0)])
    if not tokens.size:
        return [np.zeros(len(own)) for own in sequences]
    deviation = tokens.std(ddof=1) if tokens.size > 1 else 0.0
    return [(own - tokens.mean()) / (deviation + floor) for own in sequences]


def value_loss(
    values: np.ndarray, old: np.ndarray, returns: np.ndarray, clip: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Computes 0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), float64 [tokens]; without `clip` the first alone.

    Also returns bool [tokens]: whether the clipped value counts (PPO2; arXiv:2005.12729, section 3).
    """
    plain = (values.astype(np.float64) - returns) ** 2
    if clip is None:
        return 0.5 * plain, np.zeros(len(plain), bool)
    clipped = np.clip(values.astype(np.float64), old - clip, old + clip)
    other = (clipped - returns) ** 2
    return 0.5 * np.maximum(plain, other), other > plain


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float | None:
    """Computes 1 - Var(R - v) / Var(R); None for constant returns."""
    variance = float(returns.astype(np.float64).var()) if returns.size else 0.0
    return None if variance == 0.0 else 1.0 - float((returns - values).var()) / variance
