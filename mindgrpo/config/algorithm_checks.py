"""Rules that span several keys of the algorithm: sentences about choices that have no meaning together."""

from __future__ import annotations

from collections.abc import Iterator

from mindgrpo.algorithm.estimators import ESTIMATORS
from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.config.rl import RLConfig


def algorithm_contradictions(rl: RLConfig) -> Iterator[str]:
    yield from _loss(rl)
    yield from _clips(rl)
    yield from _estimator(rl)
    yield from _critic(rl)
    yield from _kl_in_reward(rl)
    yield from _old_of_generator(rl)
    yield from _switched_off(rl)
    if rl.distillation_coef and rl.mask_equal_groups:
        yield (
            "rl_config.mask_equal_groups leaves out groups whose rewards are all equal, but "
            f"rl_config.distillation_coef {rl.distillation_coef:g} gives their tokens advantages, too; set "
            "mask_equal_groups to false"
        )


def is_set(rl: RLConfig, name: str) -> bool:
    """Returns whether a key has another value than its default."""
    return bool(getattr(rl, name) != RLConfig.model_fields[name].default)


def without_rewards(rl: RLConfig) -> Iterator[str]:
    """Yields a sentence for each key that is about rewards, of a run in which every sample earns 0."""
    why = "and without rewards (no function, or weights of 0)"
    if rl.dynamic_sampling:
        yield (
            f"rl_config.dynamic_sampling replaces groups whose rewards are all equal, {why} all are; set "
            "dynamic_sampling to false"
        )
    if rl.no_positive_resampling is not None:
        yield (
            f"rl_config.no_positive_resampling {rl.no_positive_resampling:g} passes over prompts by their rewards, "
            f"{why} there is nothing to go by; leave no_positive_resampling out"
        )
    known = ESTIMATORS[rl.advantage_estimator]
    if known.by_function or known.needs_greedy:
        yield (
            f"rl_config.advantage_estimator {rl.advantage_estimator} compares rewards, {why} there are none to "
            "compare; leave advantage_estimator out"
        )


def _loss(rl: RLConfig) -> Iterator[str]:
    loss = LOSS_TYPES[rl.loss_type]
    for name in dict.fromkeys(key for other in LOSS_TYPES.values() for key in other.keys):
        value = getattr(rl, name)
        if is_set(rl, name) and name not in loss.keys:
            users = ", ".join(kind for kind, other in LOSS_TYPES.items() if name in other.keys)
            yield (
                f"rl_config.{name} is {value}, which rl_config.loss_type {rl.loss_type} does not use, but {users}; "
                f"set rl_config.{name} to null"
            )
    for name in ("epsilon_low", "epsilon_high"):
        if loss.epsilon is None and getattr(rl, name) is not None:
            yield (
                f"rl_config.{name} is {getattr(rl, name)}, but rl_config.loss_type {rl.loss_type} clips nothing; set "
                f"rl_config.{name} to null"
            )
    low, high = rl.clip_cov_low, rl.clip_cov_high
    if low >= high:
        yield (
            f"rl_config.clip_cov_low {low} is not below rl_config.clip_cov_high {high}, so that no token is left out; "
            "raise clip_cov_high"
        )
    if rl.importance_sampling_level not in loss.levels:
        yield (
            f"rl_config.loss_type {rl.loss_type} is defined with rl_config.importance_sampling_level "
            f"{loss.levels[0]}, not with {rl.importance_sampling_level}; set it to {loss.levels[0]}"
        )


def _clips(rl: RLConfig) -> Iterator[str]:
    if rl.delta is not None and rl.dual_clip is not None:
        yield (
            f"rl_config.delta {rl.delta} and rl_config.dual_clip {rl.dual_clip} bound the same ratios, those of "
            "negative advantages; set one of them to null"
        )
    _, high = rl.clip_bounds
    if rl.delta is not None and rl.clips and rl.delta <= 1 + high:
        yield (
            f"rl_config.delta {rl.delta} must be above 1 + rl_config.epsilon_high, which is "
            f"{1 + high:g}, or it would undo that clip; raise rl_config.delta"
        )


def _estimator(rl: RLConfig) -> Iterator[str]:
    estimator, known = rl.advantage_estimator, ESTIMATORS[rl.advantage_estimator]
    if rl.num_generations == 1 and known.compares and not rl.distillation_coef:
        yield (
            f"rl_config.advantage_estimator {estimator} compares the samples of a group, but "
            "rl_config.num_generations is 1, so every advantage would be 0; raise num_generations or use "
            "reinforce_plus_plus, remax or rae"
        )
    for name in ("role_column", "role_baseline_ema_gamma"):
        if is_set(rl, name) and not known.needs_baselines:
            yield (
                f"rl_config.{name} is {getattr(rl, name)}, which rl_config.advantage_estimator {estimator} does not "
                f"use, but rae; leave {name} out or use rae"
            )
    if known.needs_baselines and rl.kl_in_reward:
        yield (
            "rl_config.kl_in_reward changes the rewards, and rl_config.advantage_estimator rae averages them as they "
            "are; set kl_in_reward to false or use grpo"
        )
    if known.needs_greedy and rl.environment is not None:
        yield (
            f"rl_config.advantage_estimator remax draws a greedy completion of a prompt, but rl_config.environment "
            f"{', '.join(rl.environment)} gives each conversation its own; leave the environment out or use grpo"
        )
    for name, does in (("dynamic_sampling", "replaces"), ("mask_equal_groups", "leaves out")):
        if rl.num_generations == 1 and getattr(rl, name):
            yield (
                f"rl_config.{name} {does} groups whose rewards are all equal, and a group of "
                f"rl_config.num_generations 1 always is; raise num_generations or turn {name} off"
            )
    if known.by_function:
        for name, active in (
            ("kl_in_reward", rl.kl_in_reward),
            ("dynamic_sampling", rl.dynamic_sampling),
            ("mask_equal_groups", rl.mask_equal_groups),
        ):
            if active:
                yield (
                    f"rl_config.{name} is about the total reward, and rl_config.advantage_estimator gdpo about each "
                    f"function's; set {name} to false or use grpo"
                )
    if rl.reward_scale not in known.scales:
        yield (
            f"rl_config.scale_rewards is {rl.scale_rewards}, but rl_config.advantage_estimator "
            f"{estimator} is defined with {known.scales[0]}; leave scale_rewards out or use grpo"
        )


def _critic(rl: RLConfig) -> Iterator[str]:
    estimator, known = rl.advantage_estimator, ESTIMATORS[rl.advantage_estimator]
    for name in (
        "gamma",
        "lam",
        "lam_critic",
        "lam_length_alpha",
        "bootstrap_truncated",
        "cliprange_value",
        "critic_warmup",
    ):
        if is_set(rl, name) and not known.needs_critic:
            yield (
                f"rl_config.{name} is {getattr(rl, name)}, which rl_config.advantage_estimator {estimator} does not "
                f"use, but gae; leave {name} out or use gae"
            )
    for name, active in (
        ("turn_advantages", rl.turn_advantages),
        ("distillation_coef", rl.distillation_coef > 0),
    ):
        if known.needs_critic and active:
            yield (
                f"rl_config.{name} gives tokens advantages of its own, and rl_config.advantage_estimator gae those "
                f"of a critic; leave {name} out or use grpo"
            )
    if known.needs_critic and rl.has_sample_ratio:
        yield (
            f"rl_config.advantage_estimator gae gives every token an advantage of its own, and rl_config.loss_type "
            f"{rl.loss_type} by {rl.importance_sampling_level} needs one a sample; choose a loss by token"
        )


def _kl_in_reward(rl: RLConfig) -> Iterator[str]:
    if rl.kl_in_reward and rl.beta == 0:
        yield (
            "rl_config.kl_in_reward is true, but rl_config.beta is 0, so there is no KL to take from the rewards; "
            "raise beta or set kl_in_reward to false"
        )
    own = "rl_config.distillation_coef" if rl.distillation_coef else ""
    if rl.kl_in_reward and rl.advantage_estimator.startswith("reinforce_plus_plus"):
        own = f"rl_config.kl_in_reward with rl_config.advantage_estimator {rl.advantage_estimator}"
    if own and rl.has_sample_ratio:
        yield (
            f"{own} gives every token an advantage of its own, and rl_config.loss_type {rl.loss_type} by "
            f"{rl.importance_sampling_level} needs one a sample; choose a loss by token or leave "
            f"{own.split()[0]} out"
        )


def _old_of_generator(rl: RLConfig) -> Iterator[str]:
    """Yields what needs the trainer's log-probs before its update, where the generator's take their place."""
    if rl.old_source != "generator":
        return
    source = (
        "generator" if rl.old_logps else f"null, which is generator with loss_type {rl.loss_type}"
    )
    for name in rl.needing_trainers:
        yield (
            f"rl_config.{name} compares the trainer's log-probs before its update, but rl_config.old_logps is "
            f"{source}, so that they are not computed; leave {name} out or set old_logps to trainer"
        )
    if not rl.enable_oldpolicy:
        yield (
            f"rl_config.old_logps is {source}, but rl_config.enable_oldpolicy false makes every ratio 1; set "
            "enable_oldpolicy to true or old_logps to trainer"
        )


def _switched_off(rl: RLConfig) -> Iterator[str]:
    if rl.unbiased_kl and (rl.beta == 0 or rl.kl_in_reward):
        yield (
            f"rl_config.unbiased_kl is about the KL in the loss, and rl_config.beta {rl.beta:g} with "
            f"rl_config.kl_in_reward {rl.kl_in_reward} leaves none there; set unbiased_kl to false"
        )
    if not rl.enable_oldpolicy:
        masks = rl.off_policy_mask_threshold is not None
        for name, active in (
            ("off_policy_mask_threshold", masks),
            ("unbiased_kl", rl.unbiased_kl),
        ):
            if active:
                yield (
                    f"rl_config.{name} depends on how far the policy has moved, but rl_config.enable_oldpolicy false "
                    f"makes every ratio 1; set enable_oldpolicy to true or leave {name} out"
                )
        for name in rl.needing_trainers:
            yield (
                f"rl_config.{name} needs the policy's log-probs before its update, but rl_config.enable_oldpolicy "
                f"is false; set enable_oldpolicy to true or leave {name} out"
            )
    for name, effect in (("cap", "capped"), ("floor", "bounded")):
        key = f"importance_sampling_{name}"
        if is_set(rl, key) and not rl.is_corrected:
            yield (
                f"rl_config.{key} is {getattr(rl, key)}, but rl_config.importance_sampling_correction is "
                f"none, so nothing is {effect}; set the correction to token_truncate or leave the {name} out"
            )
    if is_set(rl, "dynamic_sampling_rounds") and not rl.dynamic_sampling:
        yield (
            f"rl_config.dynamic_sampling_rounds is {rl.dynamic_sampling_rounds}, but rl_config.dynamic_sampling is "
            "false, so nothing is replaced; set dynamic_sampling to true or leave the rounds out"
        )
