"""Group-relative advantages (DeepSeekMath, arXiv:2402.03300, section 4.1.2). Refuses rewards that are not numbers."""

from __future__ import annotations

import numpy as np

STD_FLOOR = 1e-6


def group_advantages(rewards: np.ndarray, num_generations: int, scale: str) -> np.ndarray:
    """float32 [samples]: A_i = (r_i - mean(group)) / (std(group) + 1e-6); without the division for scale "none".

    The standard deviation is the sample one (n - 1). A group of one, and a group whose rewards are all equal, have
    advantage 0. `rewards` float [samples], groups of `num_generations` neighbours; raises ValueError on NaN.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(f"{int((~np.isfinite(rewards)).sum())} rewards are not finite")
    groups = rewards.astype(np.float64).reshape(-1, num_generations)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale == "group" and num_generations > 1:
        centred = centred / (groups.std(axis=1, ddof=1, keepdims=True) + STD_FLOOR)
    equal = zero_std_groups(rewards, num_generations)
    centred[equal] = 0.0
    return centred.reshape(-1).astype(np.float32)


def zero_std_groups(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """bool [groups]: nothing to learn from these, all their rewards are equal."""
    groups = rewards.reshape(-1, num_generations)
    return (groups == groups[:, :1]).all(axis=1)
