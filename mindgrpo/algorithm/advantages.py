"""Computes advantages from rewards, with one function per estimator. Pure numpy.

Group statistics are over `num_generations` consecutive samples, batch statistics over the whole step; neither depends
on how samples are distributed over updates or ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

# Added to a standard deviation before dividing by it, as in verl.
STD_FLOOR = 1e-6


def group_advantages(
    rewards: np.ndarray, num_generations: int, scale: str, std_floor: float = STD_FLOOR
) -> np.ndarray:
    """Computes A_i = (r_i - mean(group)) / (std + std_floor) as float32 [samples].

    GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1.2). `scale` "group" divides by the group's standard deviation;
    "batch" by that of the step's rewards (arXiv:2508.08221); "none" does not divide (Dr. GRPO, arXiv:2503.20783,
    section 3.2). Standard deviations divide by n - 1. Groups of one sample, or whose rewards are all equal, have
    advantage 0. `rewards` float [samples]; raises ValueError on NaN.
    """
    groups = _groups(rewards, num_generations)
    centred = groups - groups.mean(axis=1, keepdims=True)
    if scale == "group" and num_generations > 1:
        centred = centred / (groups.std(axis=1, ddof=1, keepdims=True) + std_floor)
    elif scale == "batch" and groups.size > 1:
        centred = centred / (groups.std(ddof=1) + std_floor)
    centred[zero_std_groups(rewards, num_generations)] = 0.0
    return centred.reshape(-1).astype(np.float32)


def leave_one_out(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Computes A_i = r_i - sum over j != i of r_j / (k - 1) as float32 [samples], k = num_generations >= 2.

    RLOO (arXiv:2402.14740, the leave-one-out estimator). Raises ValueError on NaN.
    """
    groups = _groups(rewards, num_generations)
    others = (groups.sum(axis=1, keepdims=True) - groups) / (num_generations - 1)
    advantages = groups - others
    advantages[zero_std_groups(rewards, num_generations)] = 0.0
    return advantages.reshape(-1).astype(np.float32)


def decoupled_advantages(
    components: Sequence[tuple[float, np.ndarray]],
    num_generations: int,
    std_floor: float = STD_FLOOR,
) -> np.ndarray:
    """Normalises each reward function within its group, sums, and normalises over the step; returns float32 [samples].

    With z_k = (r_k - mean(group)) / (std(group) + std_floor) and S_i = sum_k w_k z_ik, A_i = (S_i - mean(S)) / (std(S)
    + std_floor) (GDPO, arXiv:2601.05242; standard deviations divide by n - 1). `components` are (weight, float
    [samples]) for each reward function; a nan counts neither in means nor in the sum. A_i is 0 where S_i is 0, as in
    groups in which each function's rewards are all equal.
    """
    total = np.zeros(len(components[0][1]))
    for weight, values in components:
        groups = values.astype(np.float64).reshape(-1, num_generations)
        known = ~np.isnan(groups)
        count = np.maximum(known.sum(axis=1, keepdims=True), 1)
        kept = np.where(known, groups, 0.0)
        centred = np.where(known, groups - kept.sum(axis=1, keepdims=True) / count, 0.0)
        highest = np.where(known, groups, -np.inf).max(axis=1, keepdims=True)
        lowest = np.where(known, groups, np.inf).min(axis=1, keepdims=True)
        deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        total += weight * np.where(highest > lowest, centred / (deviation + std_floor), 0).reshape(
            -1
        )
    deviation = total.std(ddof=1) if total.size > 1 else 0.0
    advantages = (total - total.mean()) / (deviation + std_floor)
    return np.where(total == 0, 0.0, advantages).astype(np.float32)


def maximum_likelihood(
    rewards: np.ndarray, num_generations: int, std_floor: float = STD_FLOOR
) -> np.ndarray:
    """Computes A_i = (r_i - mean(group)) / (mean(group) + std_floor) as float32 [samples].

    MaxRL (arXiv:2602.02710), of rewards of at least 0; groups whose mean is not above 0 have advantage 0. Raises
    ValueError on NaN.
    """
    means = _groups(rewards, num_generations).mean(axis=1, keepdims=True)
    advantages = group_advantages(rewards, num_generations, "none").reshape(means.size, -1)
    divided = np.where(means > 0, advantages / (np.maximum(means, 0.0) + std_floor), 0.0)
    return divided.reshape(-1).astype(np.float32)


def optimal_baseline(rewards: np.ndarray, lengths: np.ndarray, num_generations: int) -> np.ndarray:
    """Computes A_i = r_i - sum_j l_j r_j / sum_j l_j over the group as float32 [samples].

    OPO (arXiv:2505.23585); `lengths` int [samples] count the policy's own tokens. Raises ValueError on NaN.
    """
    groups = _groups(rewards, num_generations)
    sizes = lengths.astype(np.float64).reshape(groups.shape)
    baseline = (sizes * groups).sum(axis=1, keepdims=True)
    baseline = baseline / np.maximum(sizes.sum(axis=1, keepdims=True), 1.0)
    advantages = groups - baseline
    advantages[zero_std_groups(rewards, num_generations)] = 0.0
    return advantages.reshape(-1).astype(np.float32)


def best_of_group(
    rewards: np.ndarray, num_generations: int, scale: str, std_floor: float = STD_FLOOR
) -> np.ndarray:
    """Computes A_i = r_i - (second-best reward) for the best sample of a group, 0 for the others; float32 [samples].

    Pass@k training (as in verl's grpo_passk, arXiv:2503.19595): `scale` "group" divides by the group's standard
    deviation, "none" does not. If two samples tie for the best, all have 0. Raises ValueError on NaN.
    """
    groups = _groups(rewards, num_generations)
    ordered = np.sort(groups, axis=1)
    lead = ordered[:, -1] - ordered[:, -2]
    if scale == "group":
        lead = lead / (groups.std(axis=1, ddof=1) + std_floor)
    advantages = np.where(groups == ordered[:, -1:], lead[:, None], 0.0)
    return advantages.reshape(-1).astype(np.float32)


def rescaled_advantages(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Computes A_i = G / G' (r_i - mean(group)) as float32 [samples], where G' of G groups have unequal rewards.

    GPG (arXiv:2504.02546): the factor keeps groups without a gradient from shrinking the update. Raises ValueError on
    NaN.
    """
    is_flat = zero_std_groups(rewards, num_generations)
    factor = is_flat.size / max(1, np.count_nonzero(~is_flat))
    advantages = group_advantages(rewards, num_generations, "none")
    return (factor * advantages.astype(np.float64)).astype(np.float32)


def against_greedy(rewards: np.ndarray, greedy: np.ndarray, num_generations: int) -> np.ndarray:
    """Computes A_i = r_i - r(greedy completion of the same prompt) as float32 [samples].

    ReMax (arXiv:2310.10505, section 4.1); `greedy` float [groups] are the greedy completions' rewards. Raises
    ValueError on NaN among `rewards`.
    """
    advantages = _groups(rewards, num_generations) - greedy.astype(np.float64)[:, None]
    return advantages.reshape(-1).astype(np.float32)


def role_baselines(
    rewards: np.ndarray,
    roles: Sequence[str],
    baselines: Mapping[str, float],
    gamma: float,
    failed: np.ndarray | None = None,
) -> tuple[np.ndarray, dict[str, float]]:
    """Updates each role's moving average, b = gamma b + (1 - gamma) r from b = 0, with its samples' rewards in order.

    Role-conditioned advantage estimation (SPIRAL, arXiv:2506.24119): a sample's advantage is r - b, with b updated by r
    first. Returns each sample's b, float64 [samples], and the final baselines by role. `rewards` float [samples];
    samples that `failed` (bool [samples]) do not update b. Raises ValueError on NaN.
    """
    after, own = dict(baselines), np.zeros(len(roles))
    known = np.ones(len(roles), bool) if failed is None else ~failed
    for i, (role, reward) in enumerate(zip(roles, _groups(rewards, 1)[:, 0].tolist(), strict=True)):
        own[i] = after.get(role, 0.0)
        if known[i]:
            after[role] = own[i] = gamma * own[i] + (1.0 - gamma) * reward
    return own, after


def turn_advantages(
    turn_rewards: Sequence[np.ndarray],
    num_generations: int,
    scale: str,
    std_floor: float = STD_FLOOR,
) -> list[np.ndarray]:
    """Computes A_i,k = sum over l >= k of (r_i,l - mean(R)) / (std(R) + std_floor) as float32 [turns] per sample.

    GRPO with process supervision (DeepSeekMath, arXiv:2402.03300, section 4.1.3), with turns as steps: R are the
    rewards of all turns of all samples of the group. `scale` selects the deviation as in `group_advantages`, to which
    this reduces if every sample has one turn. `turn_rewards` float [turns] per sample; a sample with a nan is excluded
    from R and gets advantages 0, as do groups whose rewards are all equal. Raises ValueError on infinite rewards.
    """
    if any(np.isinf(rewards).any() for rewards in turn_rewards):
        raise ValueError("rewards of turns are not finite")
    step = _known(turn_rewards)
    advantages = []
    for first in range(0, len(turn_rewards), num_generations):
        group = turn_rewards[first : first + num_generations]
        known = _known(group)
        is_flat = not known.size or bool((known == known[0]).all())
        over = {"group": known, "batch": step, "none": known[:0]}[scale]
        deviation = over.std(ddof=1) + std_floor if over.size > 1 else 1.0
        for rewards in group:
            if is_flat or np.isnan(rewards).any():
                advantages.append(np.zeros(len(rewards), np.float32))
                continue
            normalised = (rewards.astype(np.float64) - known.mean()) / deviation
            advantages.append(np.cumsum(normalised[::-1])[::-1].astype(np.float32))
    return advantages


def _known(turn_rewards: Sequence[np.ndarray]) -> np.ndarray:
    kept = [rewards for rewards in turn_rewards if not np.isnan(rewards).any()]
    return np.concatenate([np.zeros(0), *kept])


def reinforce_plus_plus(
    rewards: np.ndarray,
    penalties: Sequence[np.ndarray],
    sample_mask: np.ndarray,
    num_generations: int | None,
    std_floor: float = STD_FLOOR,
) -> list[np.ndarray]:
    """Computes (A_t - mean) / (std + std_floor), A_t = r - sum of penalties from t on, as float32 [completion length].

    One array per sample. The mean and the standard deviation (divided by n) are over all tokens of the step
    (REINFORCE++, arXiv:2501.03262, global normalisation). With `num_generations` the group's mean is subtracted from r
    first, as in its variant with a baseline. `penalties` float [completion length] per sample are beta times each
    token's KL estimate; samples outside of `sample_mask` (bool [samples]) do not count in mean and deviation. Raises
    ValueError on NaN.
    """
    centred = _groups(rewards, num_generations or 1)
    if num_generations is not None:
        centred = centred - centred.mean(axis=1, keepdims=True)
    returns = [
        reward - np.cumsum(penalty[::-1], dtype=np.float64)[::-1]
        for reward, penalty in zip(centred.reshape(-1), penalties, strict=True)
    ]
    kept = [values for values, keep in zip(returns, sample_mask, strict=True) if keep]
    tokens = np.concatenate(kept) if kept else np.zeros(0)
    mean, deviation = (float(tokens.mean()), float(tokens.std())) if tokens.size else (0.0, 0.0)
    return [((values - mean) / (deviation + std_floor)).astype(np.float32) for values in returns]


def distilled(
    advantages: np.ndarray, logps: np.ndarray, teacher_logps: np.ndarray, coef: float
) -> np.ndarray:
    """Computes A_t + coef (log nu(y_t) - log pi(y_t)) as float32 [tokens] of one sample.

    pi is the policy that sampled, nu the teacher. The expected gradient is that of each token's reverse KL, the
    on-policy case of GKD (arXiv:2306.13649, equation 4 with beta 1).
    """
    gap = teacher_logps.astype(np.float64) - logps.astype(np.float64)
    return (advantages + coef * gap).astype(np.float32)


def zero_std_groups(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    """Returns bool [groups]: whether all rewards of a group are equal, so that it has no gradient."""
    groups = rewards.reshape(-1, num_generations)
    return (groups == groups[:, :1]).all(axis=1)


def _groups(rewards: np.ndarray, num_generations: int) -> np.ndarray:
    if not np.isfinite(rewards).all():
        raise ValueError(f"{int((~np.isfinite(rewards)).sum())} rewards are not finite")
    return rewards.astype(np.float64).reshape(-1, num_generations)
