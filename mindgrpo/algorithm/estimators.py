"""Declares the advantage estimators: how each computes advantages from rewards, its inputs, and its keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from mindgrpo.algorithm import advantages
from mindgrpo.algorithm.advantages import STD_FLOOR
from mindgrpo.algorithm.surrogates import LossConfig
from mindgrpo.settings.section import NULL_IS_DEFAULT, spelled


@dataclass(frozen=True)
class Earned:
    """Inputs of estimators: `rewards` float [samples], and `lengths` int [samples], the policy's own tokens.

    `components` are (weight, float [samples]) for each reward function, `greedy` float [groups] the rewards of greedy
    completions, `baselines` float [samples] those of the samples' roles; None if the estimator needs none.
    """

    rewards: np.ndarray
    lengths: np.ndarray
    components: Sequence[tuple[float, np.ndarray]] = ()
    greedy: np.ndarray | None = None
    baselines: np.ndarray | None = None


@dataclass(frozen=True)
class Estimator:
    """The definition of a value of rl_config.advantage_estimator; `title` is the baseline in words, for users.

    `advantages` maps `Earned` to float32 [samples]; None: advantages are per token, normalised over the step's tokens.
    `scales` are the supported scale_rewards, the paper's first. `compares`: groups need several samples. The other
    flags are required inputs: `needs_greedy`, the reward of a greedy completion of each prompt; `needs_baselines`, the
    moving average of the sample's role; `by_function`, the rewards of each function; `needs_critic`, a critic's values.
    """

    title: str
    advantages: Callable[[Earned, AlgorithmConfig], np.ndarray] | None
    scales: tuple[str, ...] = ("none",)
    compares: bool = True
    needs_greedy: bool = False
    needs_baselines: bool = False
    by_function: bool = False
    needs_critic: bool = False


def _grpo(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    floor = config.advantage_std_floor
    return advantages.group_advantages(
        earned.rewards, config.num_generations, config.reward_scale, floor
    )


def _rloo(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    return advantages.leave_one_out(earned.rewards, config.num_generations)


def _gdpo(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    if not earned.components:
        raise ValueError("gdpo needs each function's rewards")
    return advantages.decoupled_advantages(
        earned.components, config.num_generations, config.advantage_std_floor
    )


def _maxrl(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    floor = config.advantage_std_floor
    return advantages.maximum_likelihood(earned.rewards, config.num_generations, floor)


def _opo(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    return advantages.optimal_baseline(earned.rewards, earned.lengths, config.num_generations)


def _pass_at_k(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    floor = config.advantage_std_floor
    return advantages.best_of_group(
        earned.rewards, config.num_generations, config.reward_scale, floor
    )


def _gpg(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    return advantages.rescaled_advantages(earned.rewards, config.num_generations)


def _remax(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    if earned.greedy is None:
        raise ValueError("remax needs the rewards of greedy completions")
    return advantages.against_greedy(earned.rewards, earned.greedy, config.num_generations)


def _rae(earned: Earned, config: AlgorithmConfig) -> np.ndarray:
    if earned.baselines is None:
        raise ValueError("rae needs the baselines of roles")
    return (earned.rewards - earned.baselines).astype(np.float32)


ESTIMATORS = {
    "grpo": Estimator("mean of the group", _grpo, ("group", "batch", "none")),
    "rloo": Estimator("mean of the other samples of the group", _rloo),
    "reinforce_plus_plus": Estimator(
        "mean over the tokens of the step", None, ("batch",), compares=False
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "mean of the group, then mean over the tokens of the step", None, ("batch",)
    ),
    "gdpo": Estimator(
        "mean of the group, for each reward function by itself",
        _gdpo,
        ("batch",),
        by_function=True,
    ),
    "maxrl": Estimator("mean of the group, by which the result is also divided", _maxrl),
    "opo": Estimator("mean of the group weighted by length", _opo),
    "pass_at_k": Estimator(
        "second-best reward of the group, for the best sample only", _pass_at_k, ("group", "none")
    ),
    "gpg": Estimator("mean of the group", _gpg),
    "remax": Estimator(
        "reward of an extra greedy completion of the prompt, which is not trained on",
        _remax,
        compares=False,
        needs_greedy=True,
    ),
    "gae": Estimator(
        "value of the text so far, by a critic (critic_config), normalised over the tokens of the step",
        None,
        ("batch",),
        compares=False,
        needs_critic=True,
    ),
    "rae": Estimator(
        "the moving average of the rewards of the sample's role, over the run",
        _rae,
        compares=False,
        needs_baselines=True,
    ),
}
if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(ESTIMATORS)]
REJECTIONS = (
    "rejection_geometric_low",
    "rejection_geometric_high",
    "rejection_k3",
    "rejection_veto",
)


def _of_papers() -> str:
    scales: dict[str, list[str]] = {}
    for name, estimator in ESTIMATORS.items():
        scales.setdefault(estimator.scales[0], []).append(name)
    return "; ".join(f"{', '.join(scales[scale])}: {scale}" for scale in ("group", "batch"))


class AlgorithmConfig(LossConfig):
    """The keys of `rl_config` that define the algorithm: loss, advantages, masks and corrections."""

    num_generations: int = Field(8, ge=1)
    """completions per prompt (group size)"""
    seed: int = Field(0, ge=0)
    """seed of the data order and of sampling"""
    advantage_estimator: EstimatorName = Field(
        "grpo",
        description="baseline that is subtracted from the reward. "
        + "; ".join(f"{name}: {own.title}" for name, own in ESTIMATORS.items()),
    )
    role_column: str | None = None
    """data set column with the name of each row's role, such as a game and a player; rae keeps one baseline per role;
    null: one baseline for all rows"""
    role_baseline_ema_gamma: Annotated[float, NULL_IS_DEFAULT] = Field(0.95, ge=0, lt=1)
    """decay of rae's baseline: after each sample it is this times the baseline + (1 - this) times the reward"""
    # Users of other trainers write true for the group's deviation and false for none.
    scale_rewards: Annotated[Literal["group", "batch", "none"] | None, spelled("group", "none")] = (
        Field(
            None,
            description="divide advantages by the standard deviation of the rewards of the group, of the step (batch), "
            f"or not at all (none); null: as in the paper of the estimator ({_of_papers()}; others: none)",
        )
    )
    advantage_std_floor: float = Field(STD_FLOOR, gt=0)
    """added to the standard deviation before dividing by it; verl uses 1e-6, TRL 1e-4"""
    gamma: float = Field(1.0, gt=0, le=1)
    """gae: discount of later rewards"""
    lam: float = Field(0.95, ge=0, le=1)
    """gae: lambda of the policy's advantages; 1: returns minus values; 0: one step's difference of values"""
    lam_critic: float | None = Field(None, ge=0, le=1)
    """gae: lambda of the returns that the critic learns (VAPO uses 1); null: lam"""
    lam_length_alpha: float | None = Field(None, gt=0)
    """gae: lambda of the policy's advantages is 1 - 1 / (this times the sample's tokens), at least 0 (VAPO uses 0.05);
    null: lam"""
    bootstrap_truncated: bool = False
    """gae: count the critic's last value as the value of what would follow a completion that was cut at max_tokens;
    false: nothing follows"""
    cliprange_value: float = Field(0.2, ge=0)
    """gae: the critic's values move at most so far from those before the step's first update; 0: not clipped"""
    critic_warmup: int = Field(0, ge=0)
    """gae: number of steps at the start of a run in which the critic is trained alone"""
    distillation_coef: float = Field(0.0, ge=0)
    """on-policy distillation: add this times (log-prob by the reference model - log-prob by the policy) to each token's
    advantage. ref_config.load names the teacher, of any size, with the policy's tokenizer; rewards may be left out. 0:
    off"""
    mask_truncated_completions: bool = False
    """exclude completions that were truncated at max_tokens from the loss"""
    mask_equal_groups: bool = False
    """exclude groups whose rewards are all equal from the loss and its averages (ScaleRL's zero-variance filter)"""
    no_positive_resampling: float | None = Field(None, gt=0, le=1)
    """stop drawing a prompt once at least this fraction of its samples, such as 0.9, has a reward of at least
    eval_pass_threshold (ScaleRL); once no prompt is left, all are drawn again. The number of steps does not change;
    null: off"""
    dynamic_sampling: bool = False
    """replace groups whose rewards are all equal (zero advantage) with groups of new prompts"""
    dynamic_sampling_rounds: Annotated[int, NULL_IS_DEFAULT] = Field(3, ge=1, le=100)
    """maximum number of rounds of replacement per step"""
    rejection_geometric_low: float | None = Field(None, gt=0, le=1)
    """reject samples whose geometric mean of p_trainer / p_generator is below this, such as 0.99; null: off"""
    rejection_geometric_high: float | None = Field(None, ge=1)
    """reject samples whose geometric mean of p_trainer / p_generator is above this, such as 1.01; null: off"""
    rejection_k3: float | None = Field(None, gt=0)
    """reject samples whose mean k3 divergence of trainer and generator is above this; null: off"""
    rejection_veto: float | None = Field(None, gt=0, lt=1)
    """reject samples with any token whose p_trainer / p_generator is below this, such as 1e-4; null: off"""
    turn_advantages: bool = False
    """compute an advantage for each turn from the environment's rewards of this and later turns; false: one advantage
    per conversation, from the sum of its rewards"""

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.advantage_estimator]

    @property
    def reward_scale(self) -> str:
        return self.scale_rewards or self.estimator.scales[0]

    @property
    def reward_beta(self) -> float:
        """Returns the weight of the KL term in the reward, 0 where it is part of the loss."""
        return self.beta if self.kl_in_reward else 0.0

    @property
    def resampling_rounds(self) -> int:
        """Returns the maximum number of replacement rounds per step; 0 without dynamic sampling."""
        return self.dynamic_sampling_rounds if self.dynamic_sampling else 0

    @property
    def rejects(self) -> bool:
        """Returns whether samples are rejected because of the mismatch between trainer and generator."""
        return any(getattr(self, name) is not None for name in REJECTIONS)

    @property
    def needing_trainers(self) -> list[str]:
        """Returns the active keys that need the trainer's log-probs before the first update."""
        named = [name for name in REJECTIONS if getattr(self, name) is not None]
        if self.kl_in_reward:
            named.append("kl_in_reward")
        if self.distillation_coef > 0:
            named.append("distillation_coef")
        if self.is_corrected:
            named.append("importance_sampling_correction")
        return named

    @property
    def needs_old(self) -> bool:
        """Returns whether the policy's log-probs before the first update are needed, however many updates follow."""
        has_token_terms = self.reward_beta > 0 or self.distillation_coef > 0
        return has_token_terms or self.is_corrected or self.rejects
