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
    """weight of each token. grpo: 1 / length of its sample, then the mean over samples; dapo, bnpo: 1 / number of
    tokens of the update; dr_grpo: 1 / (samples x max_tokens); cispo: as dapo, with the clipped ratio as a constant
    weight"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """token: the ratio of each token; sequence: its geometric mean over the sample (GSPO)"""
    epsilon_low: float = Field(0.2, gt=0, le=1)
    """lower clip bound of the ratio: 1 - epsilon_low"""
    epsilon_high: float = Field(0.2, gt=0)
    """upper clip bound of the ratio: 1 + epsilon_high, also for cispo"""
    delta: float | None = Field(None, gt=1)
    """two-sided clip: upper bound of the ratio in the unclipped term"""
    dual_clip: float | None = Field(None, gt=1)
    """dual clip: bounds the surrogate if the advantage is negative"""

    advantage_estimator: Literal[
        "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ] = "grpo"
    """baseline that is subtracted from the reward. grpo: mean of the group; rloo: mean of the other samples of the
    group; reinforce_plus_plus: mean over the tokens of the step; reinforce_plus_plus_baseline: mean of the group, then
    mean over the tokens of the step"""
    # Users of other trainers write true for the group's deviation and false for none.
    scale_rewards: Annotated[Literal["group", "batch", "none"] | None, spelled("group", "none")] = (
        None
    )
    """divide advantages by the standard deviation of the rewards of the group, of the step (batch), or not at all
    (none); null: as in the paper of the estimator (grpo: group, rloo: none, reinforce_plus_plus: batch)"""

    advantage_std_floor: float = Field(1e-6, gt=0)
    """added to the standard deviation before dividing by it; 1e-6 is verl's value, TRL adds 1e-4"""

    beta: float = Field(0.01, ge=0)
    """weight of the KL term; 0: no KL term, and no reference model is loaded"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """with d = logp - reference: k1: d; k2: d^2 / 2; k3: exp(-d) + d - 1. In the loss, the gradient of k1 has mean 0:
    use k1 with kl_in_reward"""
    kl_in_reward: bool = False
    """subtract beta x KL from the rewards instead of adding it to the loss; needs old log-probs"""
    entropy_coef: float = Field(0.0, ge=0)
    """weight of the entropy bonus; 0: none"""

    mask_truncated_completions: bool = False
    """exclude completions that were cut at max_tokens from the loss"""
    dynamic_sampling: bool = False
    """replace groups with equal rewards (zero advantage) by groups of further prompts"""
    dynamic_sampling_rounds: int | None = Field(
        None,
        ge=1,
        le=100,
        description=f"maximum number of replacement rounds per step; null: {DEFAULT_ROUNDS}",
    )

    importance_sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """multiply the surrogate by p_trainer / p_generator of the token or of the sequence, limited to the cap (truncate)
    or set to 0 above it (mask); needs old log-probs"""
    importance_sampling_cap: float | None = Field(
        None, ge=1, description=f"cap of importance_sampling_correction; null: {DEFAULT_CAP}"
    )
    enable_oldpolicy: bool = True
    """compute old log-probs if a rollout has more than one update; false: the ratio is 1"""

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
