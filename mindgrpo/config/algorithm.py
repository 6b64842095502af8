"""The keys of `rl_config` that choose the algorithm: loss, advantages, KL, clips, corrections, which samples count."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mindgrpo.config.section import Section, spelled

DEFAULT_CAP = 2.0
DEFAULT_ROUNDS = 3

# What each estimator divides by, where scale_rewards does not say.
SCALES = {
    "grpo": "group",
    "rloo": "none",
    "reinforce_plus_plus": "batch",
    "reinforce_plus_plus_baseline": "batch",
}


class AlgorithmKeys(Section):
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo"] = "grpo"
    """what a token weighs: grpo, one over its sample's length, then the mean over samples; dapo and bnpo, one over
    the update's tokens; dr_grpo, one over samples x max_tokens; cispo, as dapo, with the ratio as a clipped constant
    weight"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """the ratio of each token, or its geometric mean over the sample (GSPO)"""
    epsilon_low: float = Field(0.2, gt=0, le=1)
    """clips the ratio at 1 - epsilon_low"""
    epsilon_high: float = Field(0.2, gt=0)
    """clips the ratio at 1 + epsilon_high, also for cispo"""
    delta: float | None = Field(None, gt=1)
    """two-sided clip: bounds the ratio where the other clip does not"""
    dual_clip: float | None = Field(None, gt=1)
    """dual clip: bounds the ratio where the advantage is negative"""

    advantage_estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """grpo: reward less the group's mean; rloo: less the mean of the group's others; reinforce_plus_plus: less the
    mean of the step's tokens; ..._baseline: less the group's mean, then that"""
    # Users of other trainers write true for the group's deviation and false for none.
    scale_rewards: Annotated[Literal["group", "batch", "none"] | None, spelled("group", "none")] = (
        None
    )
    """divide advantages by the standard deviation of the group's rewards, of the step's, or do not; null: as the
    estimator's paper does (grpo: group, rloo: none, reinforce_plus_plus: batch)"""

    advantage_std_floor: float = Field(1e-6, gt=0)
    """added to the standard deviation before dividing by it; 1e-6 is verl's value, TRL adds 1e-4"""

    beta: float = Field(0.01, ge=0)
    """weight of the KL term; 0 loads no reference"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """of d = logp - reference: k1, d; k2, d^2 / 2; k3, exp(-d) + d - 1. In the loss k1 has a gradient of mean 0: it
    is for kl_in_reward"""
    kl_in_reward: bool = False
    """take beta x KL from the rewards instead of adding it to the loss; computes old log-probs"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus; 0: none"""

    mask_truncated_completions: bool = False
    """leave completions that were cut at max_tokens out of the loss"""
    dynamic_sampling: bool = False
    """replace groups whose rewards are all equal by groups of further prompts"""
    dynamic_sampling_rounds: int | None = Field(
        None,
        ge=1,
        le=100,
        description=f"at most so many replacements a step; null: {DEFAULT_ROUNDS}",
    )

    importance_sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """weigh the policy's term by trainer's over generator's probability, at most the cap (truncate) or 0 above it
    (mask); computes old log-probs"""
    importance_sampling_cap: float | None = Field(
        None, ge=1, description=f"of importance_sampling_correction; null: {DEFAULT_CAP}"
    )
    enable_oldpolicy: bool = True
    """old log-probs where a rollout takes more than one update"""

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or SCALES[self.advantage_estimator]

    @property
    def correction_cap(self) -> float:
        return self.importance_sampling_cap or DEFAULT_CAP

    @property
    def resampling_rounds(self) -> int:
        """The most replacements a step; 0 without dynamic sampling."""
        return (self.dynamic_sampling_rounds or DEFAULT_ROUNDS) if self.dynamic_sampling else 0
