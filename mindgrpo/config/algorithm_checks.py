"""Which choices of algorithm go together, one function a rule. Refuses to repair what it finds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mindgrpo.config.algorithm import SCALES
from mindgrpo.config.section import Contradiction

if TYPE_CHECKING:
    from mindgrpo.config.schema import Config


def _refuse(sentence: str, *names: str) -> Contradiction:
    return Contradiction(sentence, *(f"rl_config.{name}" for name in names))


def _cispo_has_one_clip(config: Config) -> None:
    rl = config.rl_config
    if rl.loss_type != "cispo":
        return
    for name, value in (("delta", rl.delta), ("dual_clip", rl.dual_clip)):
        if value is not None:
            raise _refuse(
                f"rl_config.{name} is {value}, but rl_config.loss_type cispo already bounds every ratio at "
                f"1 + epsilon_high; set rl_config.{name} to null",
                name,
                "loss_type",
            )
    if rl.importance_sampling_level == "sequence":
        raise _refuse(
            "rl_config.importance_sampling_level sequence clips a sample's ratio, and rl_config.loss_type cispo "
            "weighs each token by its own; set one of them to token or to grpo",
            "importance_sampling_level",
            "loss_type",
        )


def _bounds_beyond_the_clip(config: Config) -> None:
    rl = config.rl_config
    if rl.delta is not None and rl.dual_clip is not None:
        raise _refuse(
            f"rl_config.delta {rl.delta} and rl_config.dual_clip {rl.dual_clip} bound the same ratios, those of "
            "negative advantages; set one of them to null",
            "delta",
            "dual_clip",
        )
    if rl.delta is not None and rl.delta <= 1 + rl.epsilon_high:
        raise _refuse(
            f"rl_config.delta {rl.delta} must be above 1 + rl_config.epsilon_high, which is "
            f"{1 + rl.epsilon_high:g}, or it would undo that clip; raise rl_config.delta",
            "delta",
            "epsilon_high",
        )


def _estimator_and_group(config: Config) -> None:
    rl = config.rl_config
    if rl.num_generations == 1 and rl.advantage_estimator in (
        "rloo",
        "reinforce_plus_plus_baseline",
    ):
        raise _refuse(
            f"rl_config.advantage_estimator {rl.advantage_estimator} compares the samples of a group, but "
            "rl_config.num_generations is 1; raise num_generations or use reinforce_plus_plus",
            "advantage_estimator",
            "num_generations",
        )
    if rl.dynamic_sampling and rl.num_generations == 1:
        raise _refuse(
            "rl_config.dynamic_sampling replaces groups whose rewards are all equal, and a group of "
            "rl_config.num_generations 1 always is; raise num_generations or turn dynamic_sampling off",
            "dynamic_sampling",
            "num_generations",
        )


def _estimator_and_scale(config: Config) -> None:
    rl = config.rl_config
    own = SCALES[rl.advantage_estimator]
    if rl.advantage_estimator != "grpo" and rl.reward_scale != own:
        raise _refuse(
            f"rl_config.scale_rewards is {rl.scale_rewards}, but rl_config.advantage_estimator "
            f"{rl.advantage_estimator} is defined with {own}; leave scale_rewards out or use grpo",
            "scale_rewards",
            "advantage_estimator",
        )


def _kl_in_reward(config: Config) -> None:
    rl = config.rl_config
    if not rl.kl_in_reward:
        return
    if rl.beta == 0:
        raise _refuse(
            "rl_config.kl_in_reward is true, but rl_config.beta is 0, so there is no KL to take from the rewards; "
            "raise beta or set kl_in_reward to false",
            "kl_in_reward",
            "beta",
        )
    per_token = rl.advantage_estimator.startswith("reinforce_plus_plus")
    if per_token and rl.importance_sampling_level == "sequence":
        raise _refuse(
            f"rl_config.kl_in_reward with rl_config.advantage_estimator {rl.advantage_estimator} gives every token "
            "an advantage of its own, and rl_config.importance_sampling_level sequence needs one a sample; set "
            "importance_sampling_level to token or kl_in_reward to false",
            "importance_sampling_level",
            "kl_in_reward",
            "advantage_estimator",
        )


def _old_log_probs(config: Config) -> None:
    rl = config.rl_config
    wanted = {
        "kl_in_reward": rl.kl_in_reward,
        "importance_sampling_correction": rl.importance_sampling_correction != "none",
    }
    for name, active in wanted.items():
        if active and not rl.enable_oldpolicy:
            raise _refuse(
                f"rl_config.{name} needs the policy's log-probs before its update, but rl_config.enable_oldpolicy "
                f"is false; set enable_oldpolicy to true or leave {name} out",
                name,
                "enable_oldpolicy",
            )


def _details_of_what_is_off(config: Config) -> None:
    rl = config.rl_config
    if rl.importance_sampling_cap is not None and rl.importance_sampling_correction == "none":
        raise _refuse(
            f"rl_config.importance_sampling_cap is {rl.importance_sampling_cap}, but "
            "rl_config.importance_sampling_correction is none, so nothing is capped; set the correction to "
            "token_truncate or leave the cap out",
            "importance_sampling_cap",
            "importance_sampling_correction",
        )
    if rl.dynamic_sampling_rounds is not None and not rl.dynamic_sampling:
        raise _refuse(
            f"rl_config.dynamic_sampling_rounds is {rl.dynamic_sampling_rounds}, but rl_config.dynamic_sampling is "
            "false, so nothing is replaced; set dynamic_sampling to true or leave the rounds out",
            "dynamic_sampling_rounds",
            "dynamic_sampling",
        )


ALGORITHM_CHECKS: tuple[Callable[[Config], None], ...] = (
    _cispo_has_one_clip,
    _bounds_beyond_the_clip,
    _estimator_and_group,
    _estimator_and_scale,
    _kl_in_reward,
    _old_log_probs,
    _details_of_what_is_off,
)
