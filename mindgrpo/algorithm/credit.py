"""From a step's rewards to what each of its tokens is pushed by: KL in the reward, advantages, factors, what counts.

Pure. Refuses samples that lack the log-probs which the settings call for.
"""

from __future__ import annotations

import numpy as np

from mindgrpo.algorithm.advantages import group_advantages, leave_one_out, reinforce_plus_plus
from mindgrpo.algorithm.loss_config import Credit
from mindgrpo.algorithm.losses import kl_estimate
from mindgrpo.algorithm.rollout_correction import Mismatch, correct_mismatch
from mindgrpo.algorithm.types import LENGTH, Samples


def assign_credit(samples: Samples, rewards: np.ndarray, credit: Credit) -> Mismatch | None:
    """Sets `advantages`, `token_advantages`, `factors` and `counted` of `samples`; what the correction measured.

    `rewards` float [samples]. Raises ValueError on rewards that are not finite, and without log-probs it needs.
    """
    if credit.mask_truncated:
        samples.counted = np.array([reason != LENGTH for reason in samples.finish_reasons])
    penalties = _penalties(samples, credit)
    group, estimator = credit.num_generations, credit.advantage_estimator
    if estimator.startswith("reinforce_plus_plus"):
        counted = np.ones(len(samples), bool) if samples.counted is None else samples.counted
        baseline = group if estimator.endswith("baseline") else None
        tokens = reinforce_plus_plus(rewards, penalties, counted, baseline, credit.std_floor)
        samples.advantages = np.array(
            [values.mean() if values.size else 0.0 for values in tokens], np.float32
        )
        samples.token_advantages = tokens if credit.reward_beta > 0 else None
    else:
        # The whole completion's KL is taken from its one reward (as in arXiv:2402.14740).
        total = rewards
        if credit.reward_beta > 0:
            total = rewards - np.array([penalty.sum() for penalty in penalties])
        if estimator == "rloo":
            samples.advantages = leave_one_out(total, group)
        else:
            samples.advantages = group_advantages(
                total, group, credit.scale_rewards, credit.std_floor
            )
    return _correct(samples, credit)


def _penalties(samples: Samples, credit: Credit) -> list[np.ndarray]:
    """float64 [completion length] a sample: beta KL_t of the policy that drew it; zeros without KL in the reward."""
    if credit.reward_beta <= 0:
        return [np.zeros(n) for n in samples.completion_lengths]
    if samples.old_logps is None or samples.reference_logps is None:
        raise ValueError("KL in the reward needs the policy's and the reference's log-probs")
    pairs = zip(samples.old_logps, samples.reference_logps, strict=True)
    return [
        credit.reward_beta
        * kl_estimate(own.astype(np.float64), reference.astype(np.float64), credit.kl_estimator)
        for own, reference in pairs
    ]


def _correct(samples: Samples, credit: Credit) -> Mismatch | None:
    if credit.correction == "none":
        return None
    if samples.old_logps is None:
        raise ValueError("the correction for the generator's mismatch needs the policy's log-probs")
    mismatch = correct_mismatch(
        samples.old_logps, samples.generator_logps, credit.correction, credit.correction_cap
    )
    samples.factors = mismatch.factors
    return mismatch
