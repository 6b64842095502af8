"""Describes a run's algorithm in a few lines, with a warning where a choice does not do what its name suggests."""

from __future__ import annotations

from mindgrpo.config import BatchPlan, Config

# Ratios of whole samples stay much nearer to 1 than tokens'; the paper clips at 3e-4 and 4e-4.
WIDE_FOR_SEQUENCES = 0.1


def algorithm_lines(config: Config, batch: BatchPlan) -> list[str]:
    rl = config.rl_config
    bounds = {
        "delta": rl.delta,
        "dual clip": rl.dual_clip,
        "entropy bonus": rl.entropy_coef or None,
    }
    extra = [f"{name} {value:g}" for name, value in bounds.items() if value is not None]
    loss = [
        f"loss {rl.loss_type}",
        f"ratios by {rl.importance_sampling_level}",
        f"clip {rl.epsilon_low:g} below, {rl.epsilon_high:g} above",
        *extra,
    ]
    kl = "no KL"
    if rl.beta > 0:
        kl = f"KL {rl.kl_estimator} x {rl.beta:g} in the {'reward' if rl.kl_in_reward else 'loss'}"
    samples = []
    if rl.dynamic_sampling:
        samples.append(f"groups of equal rewards replaced up to {rl.resampling_rounds} times")
    if rl.mask_truncated_completions:
        samples.append("truncated completions left out")
    if rl.importance_sampling_correction != "none":
        samples.append(f"{rl.importance_sampling_correction} above {rl.correction_cap:g}")
    lines = [
        ", ".join(loss),
        f"advantages {rl.advantage_estimator}, scaled by {rl.reward_scale}; {kl}",
        *([", ".join(samples)] if samples else []),
    ]
    return lines + [f"warning: {warning}" for warning in _warnings(config, batch)]


def _warnings(config: Config, batch: BatchPlan) -> list[str]:
    rl = config.rl_config
    warnings = []
    if rl.beta > 0 and rl.kl_estimator == "k1" and not rl.kl_in_reward:
        warnings.append(
            "the gradient of k1 in the loss has mean 0 and does not limit the divergence; use k2 or k3, or "
            "rl_config.kl_in_reward"
        )
    if rl.kl_in_reward and rl.kl_estimator != "k1":
        warnings.append(
            f"{rl.kl_estimator} in the reward has another gradient than the KL divergence; "
            "rl_config.kl_estimator k1 is exact there"
        )
    by_sequence = rl.importance_sampling_level == "sequence"
    if by_sequence and max(rl.epsilon_low, rl.epsilon_high) >= WIDE_FOR_SEQUENCES:
        warnings.append(
            f"ratios of whole samples hardly reach clips of {rl.epsilon_low:g} and "
            f"{rl.epsilon_high:g}; GSPO's paper has rl_config.epsilon_low 3e-4, epsilon_high 4e-4"
        )
    if rl.advantage_estimator == "rloo" and rl.loss_type == "grpo":
        warnings.append(
            "loss_type grpo divides each sample by its length, which RLOO's paper does not; "
            "rl_config.loss_type dr_grpo has its gradient"
        )
    if rl.loss_type == "dr_grpo" and rl.reward_scale != "none":
        warnings.append("Dr. GRPO's paper has rl_config.scale_rewards none as well")
    bounded = rl.delta is not None or rl.dual_clip is not None
    if batch.updates_per_step == 1 and (bounded or by_sequence or rl.loss_type == "cispo"):
        warnings.append(
            "with one update a rollout every ratio is 1, so clips and ratio levels change nothing; "
            "see rl_config.updates_per_rollout and num_iterations"
        )
    return warnings
