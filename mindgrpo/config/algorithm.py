"""The keys of `rl_config` that choose the algorithm: loss, advantages, KL, selection of samples, correction."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mindgrpo.algorithm.loss_config import (
    ESTIMATORS,
    LOSS_TYPES,
    REJECTIONS,
    STD_FLOOR,
    AdvantageConfig,
    LossConfig,
)
from mindgrpo.settings.section import Section, spelled

DEFAULT_CAP = AdvantageConfig.correction_cap
DEFAULT_ROUNDS = 3


def _of_loss(name: str, description: str, **bounds: Any) -> Any:
    """Declares a key that some losses read, null by default: then LossConfig's value, which the description states."""
    default = getattr(LossConfig, name)
    return Field(None, description=f"{description}; null: {default:g}", **bounds)


class AlgorithmKeys(Section):
    loss_type: Literal[
        "grpo",
        "bnpo",
        "dr_grpo",
        "dapo",
        "cispo",
        "sapo",
        "dppo_tv",
        "dppo_kl",
        "gmpo",
        "luspo",
        "vespo",
        "gpg",
        "clip_cov",
        "kl_cov",
    ] = "grpo"
    """what the update maximises, and how it is averaged unless loss_aggregation says so. grpo (sample_mean), dapo and
    bnpo (token_mean), dr_grpo (constant): the clipped ratio; luspo (sample_sum): the clipped ratio of the sample; cispo
    (token_mean): the clipped ratio as a constant weight (no gradient); sapo (sample_mean): a soft gate of the ratio;
    dppo_tv, dppo_kl (constant): tokens whose probability has moved too far are left out; gmpo (sample_mean): the
    geometric mean of the sample's clipped ratios; vespo (token_mean): a weight by the product of the sample's ratios;
    gpg (token_mean): no ratio; clip_cov (token_mean): the clipped ratio without some tokens of high covariance of
    log-prob and advantage; kl_cov (token_mean): the ratio, with a penalty on such tokens"""
    loss_aggregation: (
        Literal["token_mean", "sample_mean", "sample_sum", "prompt_mean", "constant"] | None
    ) = None
    """how token losses are averaged. token_mean: over all tokens of the update; sample_mean: over the tokens of each
    sample, then over samples; sample_sum: sum over the tokens of each sample, then mean over samples; prompt_mean: over
    the tokens of each prompt's samples, then over prompts; constant: sum of all tokens / (samples x max_tokens); null:
    as in the paper of loss_type"""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """token: each token has its own importance ratio; sequence: all tokens of a sample share the geometric mean
    (GSPO)"""
    epsilon_low: float | None = Field(None, gt=0, le=1)
    """lower clip bound of the ratio: 1 - epsilon_low; dppo_tv: how far a token's probability may fall; dppo_kl: the
    binary KL divergence at which it has fallen too far; gmpo: of the logarithm of the ratio; null: as in the paper of
    loss_type (0.2; dppo_tv 0.15, dppo_kl 0.05, gmpo 0.4, luspo 2e-3, clip_cov 1)"""
    epsilon_high: float | None = Field(None, gt=0)
    """upper clip bound of the ratio: 1 + epsilon_high, also for cispo; dppo_tv, dppo_kl, gmpo: as epsilon_low, of what
    rises; null: as in the paper of loss_type (0.2; dppo_tv 0.15, dppo_kl 0.05, gmpo 0.4, luspo 2.5e-3, clip_cov 1)"""
    delta: float | None = Field(None, gt=1)
    """two-sided clipping: upper bound of the ratio in the unclipped term; null: off"""
    dual_clip: float | None = Field(None, gt=1)
    """dual clipping: lower bound of the surrogate for negative advantages, as a multiple of the advantage; null: off"""
    sapo_temperature_pos: float | None = _of_loss(
        "sapo_temperature_pos", "temperature of sapo's gate for positive advantages", gt=0
    )
    sapo_temperature_neg: float | None = _of_loss(
        "sapo_temperature_neg", "temperature of sapo's gate for other advantages", gt=0
    )
    dppo_ratio_cap: float | None = _of_loss(
        "dppo_ratio_cap", "maximum of the ratio in dppo_tv and dppo_kl", ge=1
    )
    vespo_k_pos: float | None = _of_loss(
        "vespo_k_pos", "exponent of vespo's weight for advantages >= 0", ge=0
    )
    vespo_lambda_pos: float | None = _of_loss(
        "vespo_lambda_pos", "decay of vespo's weight for advantages >= 0", gt=0
    )
    vespo_k_neg: float | None = _of_loss(
        "vespo_k_neg", "exponent of vespo's weight for negative advantages", ge=0
    )
    vespo_lambda_neg: float | None = _of_loss(
        "vespo_lambda_neg", "decay of vespo's weight for negative advantages", gt=0
    )

    clip_cov_ratio: float | None = _of_loss(
        "clip_cov_ratio", "share of tokens that clip_cov leaves out", gt=0, le=1
    )
    clip_cov_low: float | None = _of_loss(
        "clip_cov_low", "covariance above which clip_cov leaves tokens out", gt=0
    )
    clip_cov_high: float | None = _of_loss(
        "clip_cov_high", "covariance below which clip_cov leaves tokens out", gt=0
    )
    kl_cov_ratio: float | None = _of_loss(
        "kl_cov_ratio", "share of tokens that kl_cov holds to the old policy", gt=0, le=1
    )
    kl_cov_coef: float | None = _of_loss(
        "kl_cov_coef", "coefficient of |log ratio| of kl_cov's tokens", gt=0
    )
    top_entropy_quantile: float = Field(LossConfig.top_entropy_quantile, gt=0, le=1)
    """share of an update's tokens, those of highest entropy, whose surrogate counts; 1: all; below 1, as with clip_cov
    and kl_cov, every update has one more forward pass"""

    advantage_estimator: Literal[
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gdpo",
        "maxrl",
        "opo",
        "pass_at_k",
        "gpg",
        "remax",
        "rae",
    ] = "grpo"
    """baseline that is subtracted from the reward. grpo, gpg: mean of the group; rloo: mean of the other samples of the
    group; reinforce_plus_plus: mean over the tokens of the step; reinforce_plus_plus_baseline: mean of the group, then
    mean over the tokens of the step; gdpo: mean of the group, for each reward function by itself; maxrl: mean of the
    group, which is the divisor too; opo: mean of the group weighted by length; pass_at_k: the second best of the group,
    for the best one only; remax: the reward of a greedy completion, one more of each prompt, which is not trained on;
    rae: the moving average of the rewards of the sample's role, over the run"""
    role_column: str | None = None
    """column of the rows that names the role whose baseline rae uses, such as a game and a player; null: one baseline
    for all rows"""
    role_baseline_ema_gamma: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share that rae's baseline keeps of itself when it moves by a sample's reward; null: "
        f"{AdvantageConfig.role_baseline_ema_gamma:g}",
    )
    # Users of other trainers write true for the group's deviation and false for none.
    scale_rewards: Annotated[Literal["group", "batch", "none"] | None, spelled("group", "none")] = (
        None
    )
    """divide advantages by the standard deviation of the rewards of the group, of the step (batch), or not at all
    (none); null: as in the paper of the estimator (grpo, pass_at_k: group; reinforce_plus_plus, gdpo: batch; others:
    none)"""

    advantage_std_floor: float = Field(STD_FLOOR, gt=0)
    """added to the standard deviation before dividing by it; verl uses 1e-6, TRL 1e-4"""

    beta: float = Field(0.01, ge=0)
    """coefficient of the KL penalty; 0: no KL penalty; no reference model is loaded unless distillation_coef is set"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """estimator of the KL divergence, with d = logp - reference logp. k1: d; k2: d^2 / 2; k3: exp(-d) + d - 1. Use k1
    only with kl_in_reward: in the loss its gradient has mean 0"""
    kl_in_reward: bool = False
    """subtract beta x KL from the rewards instead of adding it to the loss; requires old log-probs"""
    unbiased_kl: bool = False
    """multiply the KL term of the loss by the importance ratio, so that its gradient is that of the KL divergence also
    when the policy has moved (DeepSeek-V3.2)"""
    distillation_coef: float = Field(0.0, ge=0)
    """on-policy distillation: add this times (log-prob by the reference model - log-prob by the policy) to each token's
    advantage. ref_config.load names the teacher, of any size, with the policy's tokenizer; rewards may be left out. 0:
    off"""
    entropy_coef: float = Field(0.0, ge=0)
    """coefficient of the entropy bonus; 0: no bonus"""

    mask_truncated_completions: bool = False
    """exclude completions that were truncated at max_tokens from the loss"""
    mask_equal_groups: bool = False
    """exclude groups whose rewards are all equal from the loss and its averages (ScaleRL's zero-variance filter)"""
    no_positive_resampling: float | None = Field(None, gt=0, le=1)
    """do not draw a prompt again once so large a share of its samples, such as 0.9, has a reward of eval_pass_threshold
    at least (ScaleRL); once no prompt is left, all are drawn again. max_steps and epochs count as without it; null:
    off"""
    dynamic_sampling: bool = False
    """replace groups whose rewards are all equal (zero advantage) with groups of new prompts"""
    dynamic_sampling_rounds: int | None = Field(
        None,
        ge=1,
        le=100,
        description=f"maximum number of rounds of replacement per step; null: {DEFAULT_ROUNDS}",
    )

    importance_sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """correct for differences between generator and trainer: multiply the surrogate by p_trainer / p_generator of the
    token or of the sequence; above importance_sampling_cap, or below importance_sampling_floor, the weight is clamped
    to it (truncate) or set to 0 (mask). Requires old log-probs"""
    importance_sampling_cap: float | None = Field(
        None,
        ge=1,
        description=f"maximum weight in importance_sampling_correction; null: {DEFAULT_CAP}",
    )
    importance_sampling_floor: float | None = Field(None, gt=0, le=1)
    """minimum weight in importance_sampling_correction (IcePop: 0.5 with token_mask and a cap of 5); null: none"""
    rejection_geometric_low: float | None = Field(None, gt=0, le=1)
    """leave out samples whose geometric mean of p_trainer / p_generator is below, such as 0.99; null: off"""
    rejection_geometric_high: float | None = Field(None, ge=1)
    """leave out samples whose geometric mean of p_trainer / p_generator is above, such as 1.01; null: off"""
    rejection_k3: float | None = Field(None, gt=0)
    """leave out samples whose mean k3 divergence of trainer and generator is above; null: off"""
    rejection_veto: float | None = Field(None, gt=0, lt=1)
    """leave out samples with a token of which p_trainer / p_generator is below, such as 1e-4; null: off"""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """off-policy sequence masking (DeepSeek-V3.2): no surrogate for samples with a negative advantage of which the mean
    of old log-prob - log-prob is above; usually with old_logps generator; null: off"""
    old_logps: Literal["trainer", "generator"] | None = None
    """whose log-probs the ratio compares with. trainer: the policy's before the first update; generator: those that the
    tokens were sampled with, so that the ratio also corrects the generator's mismatch and no pass is needed; null: as
    in the paper of loss_type (dppo_tv, dppo_kl, vespo: generator, others: trainer)"""
    enable_oldpolicy: bool = True
    """use the policy's log-probs before the first update if a rollout has more than one: computed, or with
    context.batch_invariant the generator's; false: the ratio is always 1"""

    @property
    def clip_bounds(self) -> tuple[float, float] | None:
        """Returns epsilon_low and epsilon_high; None of a loss that clips nothing."""
        bounds = LOSS_TYPES[self.loss_type].epsilon
        if bounds is None:
            return None
        low, high = self.epsilon_low, self.epsilon_high
        return bounds[0] if low is None else low, bounds[1] if high is None else high

    @property
    def aggregation(self) -> str:
        return self.loss_aggregation or LOSS_TYPES[self.loss_type].aggregation

    @property
    def old_source(self) -> str:
        """Returns whose the old log-probs are: the trainer's or the generator's."""
        return self.old_logps or LOSS_TYPES[self.loss_type].old

    @property
    def needing_trainers(self) -> list[str]:
        """Returns keys that compare the trainer's log-probs before its first update with others."""
        named = [name for name in REJECTIONS if getattr(self, name) is not None]
        if self.kl_in_reward:
            named.append("kl_in_reward")
        if self.distillation_coef > 0:
            named.append("distillation_coef")
        if self.importance_sampling_correction != "none":
            named.append("importance_sampling_correction")
        return named

    @property
    def selects_tokens(self) -> bool:
        """Returns whether every update begins with a pass that chooses tokens."""
        return LossConfig(self.loss_type, top_entropy_quantile=self.top_entropy_quantile).selects

    @property
    def loss_of_samples(self) -> bool:
        """Returns whether a ratio, or what is made of it, is one number a sample."""
        by_sequence = self.importance_sampling_level == "sequence"
        return by_sequence or LOSS_TYPES[self.loss_type].of_samples

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or ESTIMATORS[self.advantage_estimator].scales[0]

    @property
    def correction_cap(self) -> float:
        return self.importance_sampling_cap or DEFAULT_CAP

    @property
    def resampling_rounds(self) -> int:
        """Returns the maximum of replacement rounds a step; 0 without dynamic sampling."""
        return (self.dynamic_sampling_rounds or DEFAULT_ROUNDS) if self.dynamic_sampling else 0
