"""The variants of the loss that tests go through, and tokens to try them on, as data. Judges nothing."""

from __future__ import annotations

import numpy as np
from algorithms import loss_of, replace

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import token_weights
from mindgrpo.algorithm.surrogates import Tokens, importance_ratio

LENGTHS = np.array([5, 1, 9, 0, 4, 6, 3])
# One of prompts has a sample without tokens, another one that does not count.
GROUPS = np.array([0, 0, 1, 1, 2, 2, 3])
COUNTED = np.array([True, True, True, True, False, True, True])
# At sequence level, a sample each: inside, above, below, -, above but not counted, above, below.
MEANS = np.array([0.02, 0.2, -0.15, 0.0, 0.3, 0.15, -0.1])
SIGNS = np.array([1.0, -0.7, -1.2, 0.5, 0.9, 0.6, 0.8])
WIDE = loss_of(epsilon_low=0.2, epsilon_high=0.3)
# Of a completion, in tokens.
LONGEST = 16
# A mean over a sample moves less than a token: narrow ends, so that some samples are clipped.
NARROW = replace(WIDE, importance_sampling_level="sequence", epsilon_low=0.05, epsilon_high=0.08)

VARIANTS: dict[str, AlgorithmConfig] = {
    "grpo": WIDE,
    "grpo, k3": replace(WIDE, beta=0.05),
    "k1": replace(WIDE, beta=0.05, kl_estimator="k1"),
    "k2": replace(WIDE, beta=0.05, kl_estimator="k2"),
    "bnpo": replace(WIDE, loss_type="bnpo"),
    "dr_grpo": replace(WIDE, loss_type="dr_grpo", beta=0.05),
    "dapo, entropy": replace(WIDE, loss_type="dapo", entropy_coef=0.03),
    "cispo": replace(WIDE, loss_type="cispo"),
    "cispo, by prompt": replace(WIDE, loss_type="cispo", loss_aggregation="prompt_mean"),
    "cispo without a lower end, all terms": replace(
        WIDE,
        loss_type="cispo",
        epsilon_low=1.0,
        beta=0.05,
        entropy_coef=0.03,
        importance_sampling_correction="token_truncate",
    ),
    "sapo": replace(WIDE, loss_type="sapo", beta=0.05),
    "sapo, far temperatures": replace(
        WIDE, loss_type="sapo", sapo_temperature_pos=3.0, sapo_temperature_neg=0.5
    ),
    "dppo_tv": replace(WIDE, loss_type="dppo_tv", epsilon_low=0.02, epsilon_high=0.03),
    "dppo_kl, cap": replace(
        WIDE, loss_type="dppo_kl", epsilon_low=0.004, epsilon_high=0.006, dppo_ratio_cap=1.1
    ),
    "gmpo": replace(WIDE, loss_type="gmpo", importance_sampling_correction="token_truncate"),
    "gmpo, by token": replace(WIDE, loss_type="gmpo", loss_aggregation="token_mean"),
    "luspo": replace(NARROW, loss_type="luspo"),
    "vespo": replace(WIDE, loss_type="vespo", beta=0.05),
    "vespo, other powers": replace(WIDE, loss_type="vespo", vespo_k_pos=1.0, vespo_lambda_neg=0.5),
    "gpg": replace(WIDE, loss_type="gpg", importance_sampling_correction="token_truncate"),
    "clip_cov": replace(WIDE, loss_type="clip_cov", epsilon_high=1.0),
    "kl_cov": replace(
        WIDE, loss_type="kl_cov", importance_sampling_correction="token_truncate", beta=0.05
    ),
    "off-policy mask": replace(WIDE, off_policy_mask_threshold=0.08, beta=0.05, unbiased_kl=True),
    "gspo, off-policy mask": replace(NARROW, off_policy_mask_threshold=0.12, beta=0.05),
    "k2, unbiased": replace(WIDE, beta=0.05, kl_estimator="k2", unbiased_kl=True),
    "delta": replace(WIDE, delta=1.5),
    "dual clip": replace(WIDE, dual_clip=1.4, beta=0.05),
    "dual clip inside the other": replace(WIDE, dual_clip=1.1),
    "corrected": replace(WIDE, importance_sampling_correction="token_truncate", beta=0.05),
    "gspo": NARROW,
    "gspo, dual clip, all terms": replace(
        NARROW,
        dual_clip=1.1,
        beta=0.05,
        entropy_coef=0.03,
        importance_sampling_correction="token_truncate",
    ),
    "gspo, dapo, delta": replace(NARROW, loss_type="dapo", delta=1.1),
}


def tokens_of(loss_config: AlgorithmConfig, on_policy: bool = False, seed: int = 0) -> Tokens:
    """Float32 values as float64: ratios on both sides of every end, none near a corner."""
    rng = np.random.default_rng(seed)
    count = int(LENGTHS.sum())
    owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    old = rng.uniform(-4.0, -0.5, count)
    steps = np.resize([-0.6, -0.1, 0.05, 0.15, 0.5], count) + rng.uniform(-0.02, 0.02, count)
    if loss_config.by_sequence:
        sums = np.bincount(owners, steps, minlength=len(LENGTHS))
        steps = steps + (MEANS - sums / np.maximum(LENGTHS, 1))[owners]
    weights = token_weights(LENGTHS, loss_config, COUNTED, GROUPS, LONGEST)[owners]
    advantages = rng.normal(size=count)
    if loss_config.of_samples:
        advantages = SIGNS[owners]
    arrays = (
        old + steps,
        old + steps if on_policy else old,
        old + rng.normal(0, 0.4, count),
        rng.uniform(0.1, 3.0, count),
        advantages,
        weights,
        rng.uniform(0.0, 2.0, count) if loss_config.is_corrected else np.ones(count),
        rng.choice([0.0, 0.5], count),
    )
    *numbers, penalties = (x.astype(np.float32).astype(np.float64) for x in arrays)
    made = Tokens(*numbers, lengths=LENGTHS, penalties=penalties)
    if not on_policy:
        _assert_no_corner(made, loss_config)
    return made


def _assert_no_corner(tokens: Tokens, loss_config: AlgorithmConfig) -> None:
    level = loss_config.importance_sampling_level
    ratio = importance_ratio(tokens.logps, tokens.old, tokens.lengths, level)
    low, high = loss_config.clip_bounds
    ends = (
        1 - low,
        1 + high,
        loss_config.delta,
        loss_config.dual_clip,
    )
    for end in ends:
        assert end is None or np.abs(ratio - end).min() > 1e-3
