"""Losses and masks beside a small batch to try them on over ranks, and what numpy makes of the whole batch.

Log-probs are given, not computed: of the policy (NOW), of the policy before its updates (OLD) and of the reference.
Judges nothing.
"""

from __future__ import annotations

import numpy as np
from algorithms import advantages_of, replace
from loss_variants import LONGEST, VARIANTS, WIDE

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import policy_loss, token_weights
from mindgrpo.algorithm.sample import LENGTH, STOPPED, Arrays, Rollout, TrainBatch
from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.algorithm.token_selection import select_tokens
from mindgrpo.algorithm.train_batch import compute_advantages

NUM_PROMPTS, NUM_GENERATIONS = 5, 4
NUM_SAMPLES = NUM_PROMPTS * NUM_GENERATIONS
_draw = np.random.default_rng(17)
_lengths = _draw.integers(2, 13, NUM_SAMPLES)


def _tokens(low: float, high: float) -> Arrays:
    return [_draw.uniform(low, high, n).astype(np.float32) for n in _lengths]


def _moved(logps: Arrays, by: float) -> Arrays:
    return [own + _draw.normal(0, by, own.size).astype(np.float32) for own in logps]


OLD = _tokens(-4.0, -0.5)
NOW, REFERENCE, ENTROPY = _moved(OLD, 0.35), _moved(OLD, 0.4), _tokens(0.1, 3.0)
REWARDS = np.round(_draw.uniform(0.0, 2.0, NUM_SAMPLES), 2)
REWARDS[:NUM_GENERATIONS] = 0.5  # a group to learn nothing from
GREEDY = _draw.uniform(0.0, 2.0, NUM_PROMPTS)
BASELINES = _draw.uniform(0.0, 2.0, NUM_SAMPLES)
COMPONENTS = [(weight, _draw.uniform(0.0, 1.0, NUM_SAMPLES)) for weight in (1.0, 0.5)]


def _rollout() -> Rollout:
    prompts = [np.full(_draw.integers(2, 9), 7, np.int32) for _ in range(NUM_PROMPTS)]
    rollout = Rollout.single_turn(
        [prompts[i // NUM_GENERATIONS] for i in range(NUM_SAMPLES)],
        [np.arange(n, dtype=np.int32) for n in _lengths],
        [LENGTH if n > 9 else STOPPED for n in _lengths],
        _moved(OLD, 0.3),
        [i // NUM_GENERATIONS for i in range(NUM_SAMPLES)],
    )
    samples = []
    for sample in rollout.samples:
        wrote = sample.action_mask.copy()
        # An answer, after which the policy goes on.
        wrote[2:4] = wrote.size <= 4
        samples.append(replace(sample, action_mask=wrote))
    return replace(rollout, samples=tuple(samples))


ROLLOUT = _rollout()
TURN_REWARDS = [
    _draw.uniform(0.0, 1.0, int(mask[0]) + np.count_nonzero(mask[1:] > mask[:-1]))
    for mask in ROLLOUT.action_mask
]

GRPO = advantages_of(NUM_GENERATIONS)
_losses = {
    # One of each aggregation: their sums go over samples, tokens and prompts of all ranks.
    **{name: VARIANTS[name] for name in ("grpo, k3", "dapo, entropy", "dr_grpo", "luspo")},
    "cispo, by prompt": VARIANTS["cispo, by prompt"],
    # Tokens are chosen among those of all ranks, samples are left out for how far the policy has moved.
    "top entropy": replace(WIDE, top_entropy_quantile=0.4),
    "clip_cov of many": replace(
        WIDE, loss_type="clip_cov", clip_cov_ratio=0.3, clip_cov_low=0.1, beta=0.05
    ),
    "kl_cov of many": replace(WIDE, loss_type="kl_cov", kl_cov_ratio=0.3),
    "off-policy mask": VARIANTS["off-policy mask"],
}
_advantages = {
    # Of tokens.
    "reinforce_plus_plus": replace(
        GRPO, advantage_estimator="reinforce_plus_plus", kl_in_reward=True, beta=0.1
    ),
    "truncated samples": replace(GRPO, mask_truncated_completions=True),
    "equal groups": replace(GRPO, mask_equal_groups=True),
    "veto": replace(GRPO, rejection_veto=0.6),
}
_truncated = replace(
    GRPO, importance_sampling_correction="token_truncate", importance_sampling_cap=1.2
)
BATCH_VARIANTS: dict[str, tuple[AlgorithmConfig, AlgorithmConfig]] = {
    **{name: (own, GRPO) for name, own in _losses.items()},
    **{name: (WIDE, own) for name, own in _advantages.items()},
    "corrected": (replace(WIDE, importance_sampling_correction="token_truncate"), _truncated),
}


def batch_of(advantages: AlgorithmConfig, old: Arrays, reference: Arrays) -> TrainBatch:
    return compute_advantages(
        ROLLOUT,
        REWARDS,
        advantages,
        old,
        reference,
        TURN_REWARDS,
        COMPONENTS,
        GREEDY,
        BASELINES,
    )[0]


def of_whole_batch(
    loss_config: AlgorithmConfig, advantages: AlgorithmConfig
) -> tuple[float, list[np.ndarray]]:
    """The loss of one update and, by central differences, its slopes by each sample's log-probs and entropies, [2, n]
    each: from the samples one after another, without rows or ranks.
    """
    batch, lengths = batch_of(advantages, OLD, REFERENCE), ROLLOUT.action_lengths
    groups = np.array(ROLLOUT.group_ids)
    weights = token_weights(lengths, loss_config, batch.sample_mask, groups, LONGEST)
    own = np.flatnonzero(weights > 0)

    def tokens(values: Arrays | np.ndarray) -> np.ndarray:
        masks = ROLLOUT.action_mask
        rows = [np.broadcast_to(values[i], masks[i].shape)[masks[i]] for i in own]
        return np.concatenate(rows).astype(np.float64)

    factors = np.ones(NUM_SAMPLES) if batch.rollout_is_weights is None else batch.rollout_is_weights
    whole = Tokens(
        tokens(NOW),
        tokens(OLD),
        tokens(REFERENCE),
        tokens(ENTROPY),
        tokens(batch.loss_advantages),
        tokens(weights),
        tokens(factors),
        lengths[own],
    )
    rng = np.random.default_rng((loss_config.seed, 0))
    kept, penalties = select_tokens(whole, loss_config, rng)
    whole = replace(whole, rollout_is_weights=whole.rollout_is_weights * kept, penalties=penalties)
    slopes = [np.zeros((2, n)) for n in _lengths]
    masks = [
        (sample, place) for sample in own for place in np.flatnonzero(ROLLOUT.action_mask[sample])
    ]
    for row, name in enumerate(("logps", "entropy")):
        base = getattr(whole, name)
        for i, (sample, place) in enumerate(masks):
            ends = []
            for step in (1e-6, -1e-6):
                moved = base.copy()
                moved[i] += step
                changed = replace(whole, **{name: moved})
                ends.append(policy_loss(changed, loss_config, whole.logps))
            slopes[sample][row, place] = (ends[0] - ends[1]) / 2e-6
    return policy_loss(whole, loss_config), slopes
