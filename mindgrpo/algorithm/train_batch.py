"""Builds a TrainBatch from a rollout, its rewards and log-probs: advantages, masks and importance weights.

Pure numpy. Context tokens have no advantage, and count in no sum or mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mindgrpo.algorithm.advantages import (
    distilled,
    reinforce_plus_plus,
    turn_advantages,
    zero_std_groups,
)
from mindgrpo.algorithm.estimators import AlgorithmConfig, Earned
from mindgrpo.algorithm.gae import Valued, generalised_advantages, rewards_by_token, whitened
from mindgrpo.algorithm.losses import kl_estimate
from mindgrpo.algorithm.rollout_correction import (
    RolloutCorrection,
    correct_rollout,
    rejected_samples,
)
from mindgrpo.algorithm.sample import LENGTH, Arrays, Rollout, TrainBatch


def compute_advantages(
    rollout: Rollout,
    rewards: np.ndarray,
    config: AlgorithmConfig,
    old_logps: Arrays | None = None,
    reference_logps: Arrays | None = None,
    turn_rewards: Arrays | None = None,
    components: Sequence[tuple[float, np.ndarray]] = (),
    greedy: np.ndarray | None = None,
    baselines: np.ndarray | None = None,
    failed: np.ndarray | None = None,
    values: Arrays | None = None,
) -> tuple[TrainBatch, RolloutCorrection | None]:
    """Returns the batch, and the rollout's correction (None without importance sampling correction).

    `rewards` float [samples]; `components`, `greedy` and `baselines` as in `Earned`, if the estimator needs them;
    `turn_rewards` float [turns] per sample, for advantages per turn. `old_logps`, `reference_logps` and the critic's
    `values` are float32 [completion length] per sample. Samples that `failed` (bool [samples], None: none) have a
    substitute for a reward: their advantage is 0. Raises ValueError on non-finite rewards, and if an input that the
    settings need is missing.
    """
    sample_mask = None
    if config.mask_truncated_completions:
        sample_mask = np.array([reason != LENGTH for reason in rollout.finish_reasons])
    if config.mask_equal_groups:
        differ = ~zero_std_groups(rewards, config.num_generations).repeat(config.num_generations)
        sample_mask = differ if sample_mask is None else sample_mask & differ
    penalties = _penalties(rollout, config, old_logps, reference_logps)
    failed = _without_reward(failed, greedy, config, len(rollout))
    earned = Earned(rewards, rollout.action_lengths, components, greedy, baselines)
    rated = _rated(rollout, earned, penalties, config, sample_mask, failed, turn_rewards, values)
    advantages, token_advantages, valued = rated
    if config.distillation_coef > 0:
        of_rewards = advantages if token_advantages is None else token_advantages
        token_advantages = _distilled(rollout, of_rewards, config, old_logps, reference_logps)
        advantages = _means(token_advantages, rollout)
    correction = rejected = None
    if config.is_corrected or config.rejects:
        if old_logps is None:
            raise ValueError("the correction of the rollout's log-probs needs the policy's")
        compared = old_logps, rollout.generator_logps, rollout.action_mask
    if config.is_corrected:
        correction = correct_rollout(
            *compared,
            config.importance_sampling_correction,
            config.importance_sampling_cap,
            config.importance_sampling_floor or 0.0,
        )
    if config.rejects:
        rejected = rejected_samples(*compared, config)
        sample_mask = ~rejected if sample_mask is None else sample_mask & ~rejected
    batch = TrainBatch(
        rollout,
        advantages,
        token_advantages,
        old_logps,
        reference_logps,
        None if correction is None else correction.weights,
        sample_mask,
        rejected,
        values=None if valued is None else valued.values,
        returns=None if valued is None else valued.returns,
    )
    return batch, correction


def _rated(
    rollout: Rollout,
    earned: Earned,
    penalties: Arrays,
    config: AlgorithmConfig,
    sample_mask: np.ndarray | None,
    failed: np.ndarray,
    turn_rewards: Arrays | None,
    values: Arrays | None,
) -> tuple[np.ndarray, Arrays | None, Valued | None]:
    """Returns advantages by sample, and by token where they differ within a sample; and what a critic is to learn."""
    rewards, estimate = earned.rewards, config.estimator.advantages
    if config.estimator.needs_critic:
        valued = _gae(
            rollout, rewards, penalties, config, sample_mask, failed, turn_rewards, values
        )
        return _means(valued.advantages, rollout), valued.advantages, valued
    if estimate is None:
        by_token = _reinforce_plus_plus(rollout, rewards, penalties, config, sample_mask, failed)
        return _means(by_token, rollout), by_token if config.reward_beta > 0 else None, None
    if config.turn_advantages:
        if turn_rewards is None:
            raise ValueError("advantages of turns need their rewards")
        by_token = _by_turn(rollout, turn_rewards, config)
        return _means(by_token, rollout), by_token, None
    # The whole completion's KL is taken from its one reward (as in arXiv:2402.14740).
    if config.reward_beta > 0:
        rewards = rewards - np.array([penalty.sum() for penalty in penalties])
    lengths = np.where(failed, 0, earned.lengths)
    advantages = estimate(replace(earned, rewards=rewards, lengths=lengths), config)
    return np.where(failed, np.float32(0), advantages), None, None


def _without_reward(
    failed: np.ndarray | None, greedy: np.ndarray | None, config: AlgorithmConfig, num_samples: int
) -> np.ndarray:
    """Returns bool [samples]: whether the scoring of a sample, or of its group's greedy completion, failed."""
    without = np.zeros(num_samples, bool) if failed is None else failed
    return without if greedy is None else without | np.isnan(greedy).repeat(config.num_generations)


def _means(by_token: Arrays, rollout: Rollout) -> np.ndarray:
    """Returns float32 [samples], means over the policy's own tokens."""
    actions = [values[mask] for values, mask in zip(by_token, rollout.action_mask, strict=True)]
    return np.array([values.mean() if values.size else 0.0 for values in actions], np.float32)


def _by_turn(rollout: Rollout, turn_rewards: Arrays, config: AlgorithmConfig) -> Arrays:
    """Returns float32 [completion length] per sample: each token has its turn's advantage, context tokens 0.

    Turns are separated by context. Raises ValueError if the numbers of turns and rewards differ.
    """
    advantages = turn_advantages(
        turn_rewards, config.num_generations, config.reward_scale, config.advantage_std_floor
    )
    by_token = []
    for values, mask in zip(advantages, rollout.action_mask, strict=True):
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        if np.count_nonzero(begins) != len(values):
            raise ValueError(f"{np.count_nonzero(begins)} turns have {len(values)} rewards")
        turn_of = np.cumsum(begins) - 1
        by_token.append(np.where(mask, values[np.maximum(turn_of, 0)], 0).astype(np.float32))
    return by_token


def _reinforce_plus_plus(
    rollout: Rollout,
    rewards: np.ndarray,
    penalties: Arrays,
    config: AlgorithmConfig,
    sample_mask: np.ndarray | None,
    failed: np.ndarray,
) -> Arrays:
    """Returns advantages float32 [completion length] per sample, 0 on context.

    Samples that `failed` have advantages 0, and count neither in the mean nor in the deviation.
    """
    baseline = config.num_generations if config.estimator.compares else None
    counted = ~failed if sample_mask is None else sample_mask & ~failed
    actions = [p[mask] for p, mask in zip(penalties, rollout.action_mask, strict=True)]
    advantages = reinforce_plus_plus(
        rewards, actions, counted, baseline, config.advantage_std_floor
    )
    by_token = []
    for values, mask, is_failed in zip(advantages, rollout.action_mask, failed, strict=True):
        spread = np.zeros(mask.size, np.float32)
        spread[mask] = 0 if is_failed else values
        by_token.append(spread)
    return by_token


def _gae(
    rollout: Rollout,
    rewards: np.ndarray,
    penalties: Arrays,
    config: AlgorithmConfig,
    sample_mask: np.ndarray | None,
    failed: np.ndarray,
    turn_rewards: Arrays | None,
    values: Arrays | None,
) -> Valued:
    """Computes whitened advantages, and returns; those of samples that `failed` are 0, and their values."""
    if values is None:
        raise ValueError("gae needs the critic's values")
    advantages, returns, kept = [], [], []
    for i, (own, mask) in enumerate(zip(values, rollout.action_mask, strict=True)):
        of_turns = None if turn_rewards is None else turn_rewards[i]
        earned = rewards_by_token(mask, penalties[i], float(rewards[i]), of_turns)
        known = own[mask].astype(np.float64)
        is_cut = config.bootstrap_truncated and rollout.finish_reasons[i] == LENGTH
        last = float(known[-1]) if is_cut and known.size else 0.0
        lam = config.lam
        if config.lam_length_alpha is not None:
            lam = max(0.0, 1.0 - 1.0 / (config.lam_length_alpha * max(1, known.size)))
        of_critic = config.lam if config.lam_critic is None else config.lam_critic
        advantages.append(generalised_advantages(earned, known, config.gamma, lam, last))
        later = generalised_advantages(earned, known, config.gamma, of_critic, last)
        returns.append(known if failed[i] else later + known)
        kept.append(known)
    counts = ~failed if sample_mask is None else sample_mask & ~failed
    normal = whitened(advantages, counts, config.advantage_std_floor)
    normal = [np.zeros(len(a)) if f else a for a, f in zip(normal, failed, strict=True)]
    return Valued(*(_on_actions(rollout, each) for each in (normal, kept, returns)))


def _on_actions(rollout: Rollout, sequences: Sequence[np.ndarray]) -> Arrays:
    """Spreads values of the policy's own tokens to float32 [completion length] per sample, 0 on context."""
    spread = [np.zeros(mask.size, np.float32) for mask in rollout.action_mask]
    for own, mask, values in zip(spread, rollout.action_mask, sequences, strict=True):
        own[mask] = values
    return spread


def _distilled(
    rollout: Rollout,
    advantages: Arrays | np.ndarray,
    config: AlgorithmConfig,
    old_logps: Arrays | None,
    reference_logps: Arrays | None,
) -> Arrays:
    """Returns float32 [completion length] per sample, 0 on context; raises ValueError where log-probs are None."""
    if old_logps is None or reference_logps is None:
        raise ValueError("distillation needs the policy's and the reference's log-probs")
    coef = config.distillation_coef
    return [
        np.where(mask, distilled(own, logps, teacher, coef), np.float32(0))
        for own, logps, teacher, mask in zip(
            advantages, old_logps, reference_logps, rollout.action_mask, strict=True
        )
    ]


def _penalties(
    rollout: Rollout,
    config: AlgorithmConfig,
    old_logps: Arrays | None,
    reference_logps: Arrays | None,
) -> list[np.ndarray]:
    """Computes beta KL_t of the sampling policy, float64 [completion length] per sample; 0 on context.

    All are 0 without KL in the reward; with it, raises ValueError if log-probs are None.
    """
    if config.reward_beta <= 0:
        return [np.zeros(n) for n in rollout.completion_lengths]
    if old_logps is None or reference_logps is None:
        raise ValueError("KL in the reward needs the policy's and the reference's log-probs")
    penalties = []
    for own, reference, mask in zip(old_logps, reference_logps, rollout.action_mask, strict=True):
        pair = own.astype(np.float64), reference.astype(np.float64)
        kl = kl_estimate(*pair, config.kl_estimator)
        penalties.append(np.where(mask, config.reward_beta * kl, 0.0))
    return penalties
