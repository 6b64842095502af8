"""The algorithm's keys: which choices are refused together, and what the rest of the program makes of them.

Does not prove that a loss is right; test_losses.py and test_advantages.py do.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError
from tables import each_row

from mindgrpo.algorithm.estimators import ESTIMATORS, AlgorithmConfig
from mindgrpo.algorithm.surrogates import LOSS_TYPES
from mindgrpo.config import BatchPlan, Config
from mindgrpo.run.banner import algorithm_lines
from mindgrpo.training.surrogates import CELLS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.md"
RECIPES = PAGE.parent.parent / "examples/recipes"


def config(**keys: Any) -> Config:
    return Config.model_validate({"rl_config": keys})


@each_row(
    ("keys", "sentence"),
    [
        ({"loss_type": "cispo", "delta": 4.0}, "set rl_config.delta to null"),
        ({"loss_type": "cispo", "dual_clip": 3.0}, "set rl_config.dual_clip to null"),
        (
            {"loss_type": "cispo", "importance_sampling_level": "sequence"},
            "cispo is defined with rl_config.importance_sampling_level token",
        ),
        ({"delta": 4.0, "dual_clip": 3.0}, "bound the same ratios"),
        ({"loss_type": "luspo"}, "set it to sequence"),
        (
            {"distillation_coef": 0.5, "mask_equal_groups": True},
            "distillation_coef 0.5 gives their tokens advantages, too; set mask_equal_groups",
        ),
        ({"loss_type": "sapo", "epsilon_low": 0.1}, "sapo clips nothing"),
        ({"loss_type": "sapo", "vespo_k_pos": 1.0}, "does not use, but vespo"),
        (
            {"loss_type": "dppo_tv", "importance_sampling_correction": "token_mask"},
            "null, which is generator with loss_type dppo_tv",
        ),
        ({"old_logps": "generator", "kl_in_reward": True}, "rl_config.old_logps is generator"),
        ({"loss_type": "clip_cov", "clip_cov_low": 6.0}, "is not below rl_config.clip_cov_high"),
        ({"loss_type": "vespo", "enable_oldpolicy": False}, "makes every ratio 1"),
        (
            {
                "loss_type": "gmpo",
                "kl_in_reward": True,
                "advantage_estimator": "reinforce_plus_plus",
            },
            "gmpo by token needs one a sample",
        ),
        ({"delta": 1.2, "epsilon_high": 0.2}, "must be above 1 + rl_config.epsilon_high"),
        ({"advantage_estimator": "rloo", "num_generations": 1}, "compares the samples of a group"),
        ({"num_generations": 1}, "every advantage would be 0"),
        (
            {"advantage_estimator": "reinforce_plus_plus_baseline", "num_generations": 1},
            "use reinforce_plus_plus",
        ),
        ({"advantage_estimator": "rloo", "scale_rewards": "group"}, "is defined with none"),
        ({"role_column": "player"}, "does not use, but rae"),
        ({"role_baseline_ema_gamma": 0.9}, "does not use, but rae"),
        ({"advantage_estimator": "rae", "kl_in_reward": True}, "averages them as they are"),
        (
            {"advantage_estimator": "remax", "environment": "a.py:A"},
            "remax draws a greedy completion of a prompt",
        ),
        (
            {"advantage_estimator": "reinforce_plus_plus", "scale_rewards": "none"},
            "is defined with batch",
        ),
        (
            {"advantage_estimator": "gdpo", "kl_in_reward": True},
            "kl_in_reward is about the total reward",
        ),
        ({"advantage_estimator": "gdpo", "dynamic_sampling": True}, "gdpo about each function's"),
        ({"advantage_estimator": "gdpo", "mask_equal_groups": True}, "gdpo about each function's"),
        (
            {
                "advantage_estimator": "reinforce_plus_plus",
                "num_generations": 1,
                "mask_equal_groups": True,
            },
            "raise num_generations or turn mask_equal_groups off",
        ),
        ({"advantage_estimator": "pass_at_k", "scale_rewards": "batch"}, "is defined with group"),
        ({"kl_in_reward": True, "beta": 0.0}, "no KL to take from the rewards"),
        (
            {
                "kl_in_reward": True,
                "advantage_estimator": "reinforce_plus_plus",
                "importance_sampling_level": "sequence",
            },
            "an advantage of its own",
        ),
        ({"kl_in_reward": True, "enable_oldpolicy": False}, "needs the policy's log-probs before"),
        (
            {"importance_sampling_correction": "token_mask", "enable_oldpolicy": False},
            "rl_config.importance_sampling_correction needs the policy's log-probs before",
        ),
        ({"importance_sampling_cap": 3.0}, "so nothing is capped"),
        ({"importance_sampling_floor": 0.5}, "so nothing is bounded"),
        (
            {"rejection_k3": 0.1, "loss_type": "dppo_kl"},
            "rl_config.rejection_k3 compares the trainer's log-probs before",
        ),
        ({"unbiased_kl": True, "beta": 0.0}, "leaves none there"),
        ({"unbiased_kl": True, "enable_oldpolicy": False}, "how far the policy has moved"),
        ({"rejection_veto": 0.1, "enable_oldpolicy": False}, "rejection_veto needs the policy's"),
        ({"dynamic_sampling_rounds": 4}, "so nothing is replaced"),
        (
            {
                "dynamic_sampling": True,
                "num_generations": 1,
                "advantage_estimator": "reinforce_plus_plus",
            },
            "always is",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        config(**keys)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"loss_type": "cispo", "epsilon_low": 1.0, "epsilon_high": 4.0},
        {"delta": 1.21, "epsilon_high": 0.2},
        {"dual_clip": 1.1, "importance_sampling_level": "sequence"},
        {"advantage_estimator": "reinforce_plus_plus", "num_generations": 1},
        {"advantage_estimator": "rloo", "scale_rewards": "none"},
        {"advantage_estimator": "remax", "num_generations": 1},
        {"advantage_estimator": "rae", "num_generations": 1, "role_column": "player"},
        {"scale_rewards": "batch"},
        {"advantage_estimator": "pass_at_k", "scale_rewards": "none"},
        {"kl_in_reward": True, "importance_sampling_level": "sequence"},
        {"importance_sampling_correction": "sequence_mask", "importance_sampling_cap": 3.0},
        {"dynamic_sampling": True, "dynamic_sampling_rounds": 7, "num_generations": 2},
    ],
)
def test_choices_that_go_together_are_accepted(keys: dict[str, Any]) -> None:
    config(**keys)


@pytest.mark.parametrize(
    ("written", "read"), [(True, "group"), (False, "none"), ("batch", "batch")]
)
def test_scale_rewards_may_be_written_as_other_trainers_do(written: object, read: str) -> None:
    assert config(scale_rewards=written).rl_config.reward_scale == read


@pytest.mark.parametrize(
    ("estimator", "scale"),
    [
        ("grpo", "group"),
        ("rloo", "none"),
        ("reinforce_plus_plus", "batch"),
        ("reinforce_plus_plus_baseline", "batch"),
        ("gdpo", "batch"),
        ("pass_at_k", "group"),
        ("maxrl", "none"),
    ],
)
def test_without_a_scale_the_estimator_has_its_papers(estimator: str, scale: str) -> None:
    assert config(advantage_estimator=estimator).rl_config.reward_scale == scale
    known = get_args(AlgorithmConfig.model_fields["advantage_estimator"].annotation)
    assert set(ESTIMATORS) == set(known)


def test_the_kl_term_is_in_the_loss_or_in_the_reward_and_never_in_both() -> None:
    in_loss, in_reward = config(beta=0.5), config(beta=0.5, kl_in_reward=True)
    rl = in_loss.rl_config
    assert (rl.loss_beta, rl.reward_beta) == (0.5, 0.0)
    rl = in_reward.rl_config
    assert (rl.loss_beta, rl.reward_beta) == (0.0, 0.5)


def test_the_correction_reaches_loss_and_advantages_with_its_cap() -> None:
    off = config().rl_config
    on = config(importance_sampling_correction="sequence_mask").rl_config
    assert not off.is_corrected and not off.needs_old
    assert on.is_corrected and on.needs_old
    assert on.importance_sampling_cap == 2.0
    capped = config(importance_sampling_correction="token_truncate", importance_sampling_cap=5.0)
    assert capped.rl_config.importance_sampling_cap == 5.0


def test_every_loss_has_its_papers_clip_unless_another_is_set() -> None:
    assert set(LOSS_TYPES) == set(get_args(AlgorithmConfig.model_fields["loss_type"].annotation))
    assert {loss.surrogate for loss in LOSS_TYPES.values()} == set(CELLS)
    for name, loss in LOSS_TYPES.items():
        made = config(loss_type=name, importance_sampling_level=loss.levels[0]).rl_config
        assert made.clip_bounds == (loss.epsilon or (1.0, math.inf))
    mixed = config(loss_type="dapo", epsilon_high=0.28).rl_config
    assert mixed.clip_bounds == (0.2, 0.28)


def test_dynamic_sampling_is_off_unless_asked_for_and_bounded() -> None:
    assert config().rl_config.resampling_rounds == 0
    assert config(dynamic_sampling=True).rl_config.resampling_rounds == 3
    assert config(dynamic_sampling=True, dynamic_sampling_rounds=9).rl_config.resampling_rounds == 9


def told(**keys: Any) -> str:
    made = config(**keys)
    return "\n".join(algorithm_lines(made, BatchPlan.of(made)))


def test_the_summary_names_what_is_chosen() -> None:
    assert told() == (
        "loss grpo, ratios by token, clip 0.2 below, 0.2 above\n"
        "advantages grpo, scaled by group; KL k3 x 0.01 in the loss"
    )
    chosen = told(
        loss_type="dapo",
        delta=4.0,
        entropy_coef=0.02,
        beta=0.0,
        num_iterations=2,
        dynamic_sampling=True,
        mask_truncated_completions=True,
        importance_sampling_correction="token_mask",
    )
    assert "delta 4, entropy bonus 0.02" in chosen and "no KL" in chosen
    assert chosen.endswith(
        "groups of equal rewards replaced up to 3 times, truncated completions left out, "
        "token_mask above 2"
    )


@pytest.mark.parametrize(
    ("keys", "warning"),
    [
        ({"kl_estimator": "k1"}, "has mean 0"),
        ({"kl_in_reward": True}, "k1 is exact there"),
        ({"importance_sampling_level": "sequence", "num_iterations": 2}, "hardly reach clips"),
        ({"loss_type": "dr_grpo"}, "scale_rewards none as well"),
        ({"loss_type": "cispo"}, "every ratio is 1"),
        ({"loss_type": "gpg", "num_iterations": 2}, "are off-policy"),
        ({"delta": 4.0}, "every ratio is 1"),
        ({"off_policy_mask_threshold": 0.1}, "every ratio is 1"),
    ],
)
def test_a_choice_that_does_not_do_what_its_name_suggests_is_told(
    keys: dict[str, Any], warning: str
) -> None:
    found = [line for line in told(**keys).splitlines() if line.startswith("warning: ")]
    assert len(found) == 1 and warning in found[0]


def test_recipes_and_the_pages_settings_load_without_a_warning_but_that_of_one_update() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    recipes = [path.read_text("utf-8") for path in RECIPES.glob("*.yaml")]
    assert len(blocks) == 2 and len(recipes) > 15
    for text in blocks + recipes:
        Config.model_validate(yaml.safe_load(text))
        found = told(**yaml.safe_load(text)["rl_config"], num_generations=16).splitlines()
        assert not [line for line in found if line.startswith("warning") and "1, so" not in line]


def test_the_page_names_every_key_of_the_algorithm() -> None:
    text = PAGE.read_text("utf-8")
    fields = AlgorithmConfig.model_fields
    assert [name for name in fields if not re.search(rf"\b{name}\b", text)] == []
