"""Holds the algorithm's settings: LossConfig for the loss, AdvantageConfig for its advantages, masks and weights.

`LOSS_TYPES` declares every loss. Defaults that rl_config has too stand here alone. Imports nothing, so that the
configuration can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Added to a standard deviation before dividing by it, as in verl.
STD_FLOOR = 1e-6


@dataclass(frozen=True)
class LossType:
    """What a value of rl_config.loss_type stands for.

    `surrogate` is a function of algorithm/surrogates.py and a cell of training/surrogates.py. `aggregation` is its
    paper's, of `losses.token_weights`, and `levels` are the importance_sampling_levels that it is defined with.
    `epsilon` are its paper's epsilon_low and epsilon_high; None: it clips nothing. `keys` are the keys of rl_config
    with null as their default that it reads. `of_samples`: the surrogate of a token depends on its whole sample. `old`
    says whose log-probs are the old ones: those of the trainer before the step's first update, or of the generator.
    """

    surrogate: str
    aggregation: str
    levels: tuple[str, ...] = ("token",)
    epsilon: tuple[float, float] | None = (0.2, 0.2)
    keys: tuple[str, ...] = ()
    of_samples: bool = False
    old: str = "trainer"


BY_TOKEN_OR_SEQUENCE, CLIP_BOUNDS = ("token", "sequence"), ("delta", "dual_clip")
LOSS_TYPES = {
    "grpo": LossType("clip", "sample_mean", BY_TOKEN_OR_SEQUENCE, keys=CLIP_BOUNDS),
    "bnpo": LossType("clip", "token_mean", BY_TOKEN_OR_SEQUENCE, keys=CLIP_BOUNDS),
    "dr_grpo": LossType("clip", "constant", BY_TOKEN_OR_SEQUENCE, keys=CLIP_BOUNDS),
    "dapo": LossType("clip", "token_mean", BY_TOKEN_OR_SEQUENCE, keys=CLIP_BOUNDS),
    "cispo": LossType("cispo", "token_mean"),
    "sapo": LossType(
        "sapo",
        "sample_mean",
        epsilon=None,
        keys=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "dppo_tv": LossType(
        "dppo_tv", "constant", epsilon=(0.15, 0.15), keys=("dppo_ratio_cap",), old="generator"
    ),
    "dppo_kl": LossType(
        "dppo_kl", "constant", epsilon=(0.05, 0.05), keys=("dppo_ratio_cap",), old="generator"
    ),
    "gmpo": LossType("gmpo", "sample_mean", epsilon=(0.4, 0.4), of_samples=True),
    "luspo": LossType("clip", "sample_sum", ("sequence",), (2e-3, 2.5e-3), CLIP_BOUNDS),
    "vespo": LossType(
        "vespo",
        "token_mean",
        epsilon=None,
        keys=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        of_samples=True,
        old="generator",
    ),
    "gpg": LossType("gpg", "token_mean", epsilon=None),
    "clip_cov": LossType(
        "clip",
        "token_mean",
        epsilon=(1.0, 1.0),
        keys=(*CLIP_BOUNDS, "clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
    ),
    "kl_cov": LossType("ratio", "token_mean", epsilon=None, keys=("kl_cov_ratio", "kl_cov_coef")),
}


@dataclass(frozen=True)
class LossConfig:
    """Everything that the graph of the loss depends on; names are those of rl_config.

    `beta` is the weight of the KL term in the loss: 0 where there is none, or where it is part of the reward.
    `loss_aggregation` None is that of the loss type. `corrected` says that the policy's term is multiplied by weights
    that correct for the generator's log-probs. `seed` is that of the tokens that clip_cov draws.
    `max_completion_length` in tokens is what the aggregation `constant` divides by.
    """

    loss_type: str = "grpo"
    loss_aggregation: str | None = None
    importance_sampling_level: str = "token"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    dual_clip: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    corrected: bool = False
    max_completion_length: int = 1
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    dppo_ratio_cap: float = 20.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    clip_cov_ratio: float = 2e-4
    clip_cov_low: float = 1.0
    clip_cov_high: float = 5.0
    kl_cov_ratio: float = 2e-4
    kl_cov_coef: float = 1.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    unbiased_kl: bool = False
    seed: int = 0

    @property
    def surrogate(self) -> str:
        return LOSS_TYPES[self.loss_type].surrogate

    @property
    def clips(self) -> bool:
        return LOSS_TYPES[self.loss_type].epsilon is not None

    @property
    def aggregation(self) -> str:
        return self.loss_aggregation or LOSS_TYPES[self.loss_type].aggregation

    @property
    def selects(self) -> bool:
        """Returns whether tokens are chosen among the update's, by one more pass forward before its gradient."""
        return self.leaves_out or self.penalises

    @property
    def penalises(self) -> bool:
        """Returns whether some tokens' ratios are held to 1."""
        return self.loss_type == "kl_cov"

    @property
    def leaves_out(self) -> bool:
        """Returns whether some tokens have no surrogate."""
        return self.loss_type == "clip_cov" or self.top_entropy_quantile < 1.0

    @property
    def by_sequence(self) -> bool:
        return self.importance_sampling_level == "sequence"

    @property
    def of_samples(self) -> bool:
        """Returns whether a token's term depends on other tokens of its sample."""
        masks = self.off_policy_mask_threshold is not None
        return self.by_sequence or masks or LOSS_TYPES[self.loss_type].of_samples


@dataclass(frozen=True)
class Estimator:
    """What a value of rl_config.advantage_estimator needs of a step.

    `scales` are the scale_rewards that it is defined with, the first one its paper's. `compares`: it compares the
    samples of a group, which has to have several. `needs_greedy`: the reward of a greedy completion of each prompt;
    `needs_baselines`: the moving average of the sample's role; `by_function`: the rewards of each function.
    """

    scales: tuple[str, ...] = ("none",)
    compares: bool = True
    needs_greedy: bool = False
    needs_baselines: bool = False
    by_function: bool = False


ESTIMATORS = {
    "grpo": Estimator(("group", "batch", "none")),
    "rloo": Estimator(),
    "reinforce_plus_plus": Estimator(("batch",), compares=False),
    "reinforce_plus_plus_baseline": Estimator(("batch",)),
    "gdpo": Estimator(("batch",), by_function=True),
    "maxrl": Estimator(),
    "opo": Estimator(),
    "pass_at_k": Estimator(("group", "none")),
    "gpg": Estimator(),
    "remax": Estimator(compares=False, needs_greedy=True),
    "rae": Estimator(compares=False, needs_baselines=True),
}

REJECTIONS = (
    "rejection_geometric_low",
    "rejection_geometric_high",
    "rejection_k3",
    "rejection_veto",
)


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages, masks and weights of tokens; names are those of rl_config.

    `reward_beta` is the weight of the KL term in the reward, 0 where there is none; `distillation_coef` that of the
    reference's log-probs over the policy's in the advantages of tokens. `mask_truncated`, `mask_equal`: truncated
    samples, and groups of equal rewards, have no part in the loss. `by_turn`: turns have advantages of their own.
    """

    num_generations: int
    advantage_estimator: str = "grpo"
    scale_rewards: str = "group"
    reward_beta: float = 0.0
    kl_estimator: str = "k3"
    correction: str = "none"
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    rejection_geometric_low: float | None = None
    rejection_geometric_high: float | None = None
    rejection_k3: float | None = None
    rejection_veto: float | None = None
    mask_truncated: bool = False
    mask_equal: bool = False
    std_floor: float = STD_FLOOR
    by_turn: bool = False
    distillation_coef: float = 0.0
    role_baseline_ema_gamma: float = 0.95

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.advantage_estimator]

    @property
    def needs_old(self) -> bool:
        """Returns whether the policy's log-probs before the first update are needed, however many updates follow."""
        has_token_terms = self.reward_beta > 0 or self.distillation_coef > 0
        return has_token_terms or self.correction != "none" or self.rejects

    @property
    def rejects(self) -> bool:
        """Returns whether samples are left out by how differently trainer and generator rate them."""
        return any(getattr(self, name) is not None for name in REJECTIONS)
