"""Declares the losses: the surrogate that each maximises, in NumPy, its paper's aggregation and bounds, and its keys.

training/surrogates.py has the surrogates as differentiable cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from mindgrpo.algorithm.exponentials import exp, log
from mindgrpo.settings.section import NULL_IS_DEFAULT, Section

# Added to the probability of all other tokens, which is rounded to 0 where a token's is 1.
PROBABILITY_FLOOR = 1e-8
LARGEST_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Tokens:
    """An update's own tokens of the policy, concatenated over samples: float [tokens] each, `lengths` int [samples]."""

    logps: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    rollout_is_weights: np.ndarray
    lengths: np.ndarray
    penalties: np.ndarray | float = 0.0


def importance_ratio(
    logps: np.ndarray, old: np.ndarray, lengths: np.ndarray, level: str
) -> np.ndarray:
    """Computes the importance ratio rho of each token, float [tokens]: exp(logp_t - old_t) at level "token".

    At level "sequence", all tokens of a sample have exp(mean over the sample of logp_t - old_t) (GSPO,
    arXiv:2507.18071, equation 7).
    """
    difference = logps - old
    return exp(sample_means(difference, lengths) if level == "sequence" else difference)


def sample_means(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the mean of `values` over each token's sample, float [tokens]."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    sums = np.bincount(owners, values, minlength=len(lengths))
    return np.asarray((sums / np.maximum(lengths, 1))[owners])


def clipped_surrogate(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes min(rho A, clip(rho, 1 - low, 1 + high) A) (arXiv:2402.03300, equation 3).

    Separate low and high: DAPO, arXiv:2503.14476, equation 10. `delta`: rho in the first term is min(rho, delta)
    (INTELLECT-2, arXiv:2505.07291, two-sided clipping). `dual_clip` c: at least c A where A < 0 (arXiv:1912.09729,
    equation 5).
    """
    advantages = tokens.advantages
    ratio = importance_ratio(
        tokens.logps, tokens.old, tokens.lengths, config.importance_sampling_level
    )
    bounded = ratio if config.delta is None else np.minimum(ratio, config.delta)
    low, high = config.clip_bounds
    clipped = np.clip(ratio, 1.0 - low, 1.0 + high)
    value = np.minimum(bounded * advantages, clipped * advantages)
    if config.dual_clip is not None:
        value = np.where(advantages < 0, np.maximum(value, config.dual_clip * advantages), value)
    return np.asarray(value)


def cispo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(clip(rho, 1 - low, 1 + high)) A log p (MiniMax-M1, arXiv:2506.13585, equations 4 and 5)."""
    ratio = importance_ratio(held, tokens.old, tokens.lengths, "token")
    low, high = config.clip_bounds
    weight = np.clip(ratio, 1.0 - low, 1.0 + high)
    return np.asarray(weight * tokens.advantages * tokens.logps)


def sapo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes 4 / tau sigmoid(tau (rho - 1)) A, tau by the sign of A (SAPO, arXiv:2511.20347)."""
    ratio = importance_ratio(tokens.logps, tokens.old, tokens.lengths, "token")
    signs = tokens.advantages > 0
    tau = np.where(signs, config.sapo_temperature_pos, config.sapo_temperature_neg)
    return np.asarray(4.0 / tau / (1.0 + exp(-tau * (ratio - 1.0))) * tokens.advantages)


def dppo_keeps(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Returns bool [tokens]: tokens inside of DPPO's trust region, or moving back into it (arXiv:2602.04879).

    With pi = exp(log p) and mu = exp(old log p), dppo_tv keeps a token with A > 0 if pi - mu <= high, any other if
    pi - mu >= -low (total variation). dppo_kl keeps it if mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)) is at
    most high (A > 0) or low, or if pi has moved against the sign of A (binary KL).
    """
    pi, mu = exp(held), exp(tokens.old)
    rises, (low, high) = tokens.advantages > 0, config.clip_bounds
    if config.loss_type == "dppo_tv":
        moved = np.where(rises, pi - mu - high, mu - pi - low)
        return np.asarray(moved <= 0)
    rest = log((1.0 - mu + PROBABILITY_FLOOR) / (1.0 - pi + PROBABILITY_FLOOR))
    divergence = mu * (tokens.old - held) + (1.0 - mu) * rest
    bound = np.where(rises, high, low)
    return np.asarray((divergence <= bound) | np.where(rises, pi <= mu, pi >= mu))


def dppo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(min(rho, cap)) A log p for tokens that `dppo_keeps`, else 0 (DPPO, arXiv:2602.04879)."""
    ratio = importance_ratio(held, tokens.old, tokens.lengths, "token")
    weight = np.minimum(ratio, config.dppo_ratio_cap) * dppo_keeps(tokens, config, held)
    return np.asarray(weight * tokens.advantages * tokens.logps)


def gmpo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes exp(mean over the sample of the clipped log rho) A for all of its tokens (GMPO, arXiv:2507.20673).

    log rho is clipped to at most `high` where A > 0, and to at least -`low` where A < 0.
    """
    log_ratio, sign = tokens.logps - tokens.old, np.sign(tokens.advantages)
    low, high = config.clip_bounds
    clipped = np.clip(log_ratio, -low, high)
    kept = sign * np.minimum(sign * log_ratio, sign * clipped)
    return np.asarray(exp(sample_means(kept, tokens.lengths)) * tokens.advantages)


def vespo(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes sg(phi(W)) A log p, phi(W) = W^k exp(lambda (1 - W)), k and lambda by the sign of A.

    W is the product of rho over the sample (VESPO, arXiv:2602.10693). log W is limited to LARGEST_LOG_RATIO, far beyond
    which phi vanishes.
    """
    log_ratio = sample_means(held - tokens.old, tokens.lengths)
    lengths = np.repeat(tokens.lengths, tokens.lengths)
    log_w = np.minimum(log_ratio * lengths, LARGEST_LOG_RATIO)
    rises = tokens.advantages >= 0
    k = np.where(rises, config.vespo_k_pos, config.vespo_k_neg)
    strength = np.where(rises, config.vespo_lambda_pos, config.vespo_lambda_neg)
    phi = exp(k * log_w + strength * (1.0 - exp(log_w)))
    return np.asarray(phi * tokens.advantages * tokens.logps)


def plain_ratio(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes rho A, without clipping (KL-Cov, arXiv:2505.22617, equation 13)."""
    return np.asarray(exp(tokens.logps - tokens.old) * tokens.advantages)


def gpg(tokens: Tokens, config: LossConfig, held: np.ndarray) -> np.ndarray:
    """Computes A log p, the plain policy gradient (GPG, arXiv:2504.02546)."""
    return np.asarray(tokens.advantages * tokens.logps)


# (tokens, settings, log-probs where the surrogate stops gradients) -> float [tokens].
Surrogate = Callable[[Tokens, "LossConfig", np.ndarray], np.ndarray]


@dataclass(frozen=True)
class LossType:
    """The definition of a value of rl_config.loss_type; `title` describes it to users.

    `aggregation` is the paper's (see `losses.token_weights`), and `levels` are the supported
    importance_sampling_levels. `epsilon` are the paper's epsilon_low and epsilon_high; None: no clipping. `keys` are
    the keys of rl_config that only some losses read. `of_samples`: a token's surrogate depends on its whole sample.
    `old`: whether the old log-probs are the trainer's before the step's first update, or the generator's.
    """

    surrogate: Surrogate
    aggregation: str
    title: str
    levels: tuple[str, ...] = ("token",)
    epsilon: tuple[float, float] | None = (0.2, 0.2)
    keys: tuple[str, ...] = ()
    of_samples: bool = False
    old: str = "trainer"


CLIPPED, ANY_LEVEL = "the clipped ratio", ("token", "sequence")
CLIP_BOUNDS = ("delta", "dual_clip")
LOSS_TYPES = {
    "grpo": LossType(clipped_surrogate, "sample_mean", CLIPPED, ANY_LEVEL, keys=CLIP_BOUNDS),
    "bnpo": LossType(clipped_surrogate, "token_mean", CLIPPED, ANY_LEVEL, keys=CLIP_BOUNDS),
    "dr_grpo": LossType(clipped_surrogate, "constant", CLIPPED, ANY_LEVEL, keys=CLIP_BOUNDS),
    "dapo": LossType(clipped_surrogate, "token_mean", CLIPPED, ANY_LEVEL, keys=CLIP_BOUNDS),
    "cispo": LossType(cispo, "token_mean", "the clipped ratio as a constant weight (no gradient)"),
    "sapo": LossType(
        sapo,
        "sample_mean",
        "a soft gate of the ratio",
        epsilon=None,
        keys=("sapo_temperature_pos", "sapo_temperature_neg"),
    ),
    "dppo_tv": LossType(
        dppo,
        "constant",
        "tokens whose probability has moved too far are left out",
        epsilon=(0.15, 0.15),
        keys=("dppo_ratio_cap",),
        old="generator",
    ),
    "dppo_kl": LossType(
        dppo,
        "constant",
        "tokens whose probability has moved too far are left out",
        epsilon=(0.05, 0.05),
        keys=("dppo_ratio_cap",),
        old="generator",
    ),
    "gmpo": LossType(
        gmpo,
        "sample_mean",
        "the geometric mean of the sample's clipped ratios",
        epsilon=(0.4, 0.4),
        of_samples=True,
    ),
    "luspo": LossType(
        clipped_surrogate,
        "sample_sum",
        "the clipped ratio of the sample",
        ("sequence",),
        (2e-3, 2.5e-3),
        CLIP_BOUNDS,
    ),
    "vespo": LossType(
        vespo,
        "token_mean",
        "a weight by the product of the sample's ratios",
        epsilon=None,
        keys=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        of_samples=True,
        old="generator",
    ),
    "gpg": LossType(gpg, "token_mean", "no ratio", epsilon=None),
    "clip_cov": LossType(
        clipped_surrogate,
        "token_mean",
        "the clipped ratio without some tokens of high covariance of log-prob and advantage",
        epsilon=(1.0, 1.0),
        keys=(*CLIP_BOUNDS, "clip_cov_ratio", "clip_cov_low", "clip_cov_high"),
    ),
    "kl_cov": LossType(
        plain_ratio,
        "token_mean",
        "the ratio, with a penalty on such tokens",
        epsilon=None,
        keys=("kl_cov_ratio", "kl_cov_coef"),
    ),
}
if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSS_TYPES)]


def _titles() -> str:
    titles = []
    for title, losses in groupby(LOSS_TYPES.items(), lambda item: item[1].title):
        names = (f"{name} ({loss.aggregation})" for name, loss in losses)
        titles.append(f"{', '.join(names)}: {title}")
    return "; ".join(titles)


def _of_papers(end: int) -> str:
    """Lists the losses' epsilon_low (`end` 0) or epsilon_high (1), those that differ from GRPO's by name."""
    own = {name: loss.epsilon[end] for name, loss in LOSS_TYPES.items() if loss.epsilon}
    others = (f"{name} {value:g}" for name, value in own.items() if value != own["grpo"])
    return f"{own['grpo']:g}; {', '.join(others)}"


class LossConfig(Section):
    """The keys of `rl_config` that the loss reads."""

    loss_type: LossName = Field(
        "grpo",
        description="what the update maximises, and how it is averaged unless loss_aggregation says so. "
        + _titles(),
    )
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
    epsilon_low: float | None = Field(
        None,
        gt=0,
        le=1,
        description="lower clip bound of the ratio: 1 - epsilon_low; dppo_tv: maximum decrease of a token's "
        "probability; dppo_kl: maximum binary KL divergence of a token whose probability has fallen; gmpo: lower clip "
        f"bound of the log ratio: -epsilon_low; null: as in the paper of loss_type ({_of_papers(0)})",
    )
    epsilon_high: float | None = Field(
        None,
        gt=0,
        description="upper clip bound of the ratio: 1 + epsilon_high, also for cispo; dppo_tv, dppo_kl: like "
        "epsilon_low, for probabilities that have risen; gmpo: upper clip bound of the log ratio; null: as in the "
        f"paper of loss_type ({_of_papers(1)})",
    )
    delta: float | None = Field(None, gt=1)
    """two-sided clipping: upper bound of the ratio in the unclipped term; null: off"""
    dual_clip: float | None = Field(None, gt=1)
    """dual clipping: lower bound of the surrogate for negative advantages, as a multiple of the advantage; null: off"""
    sapo_temperature_pos: Annotated[float, NULL_IS_DEFAULT] = Field(1.0, gt=0)
    """temperature of sapo's gate for positive advantages"""
    sapo_temperature_neg: Annotated[float, NULL_IS_DEFAULT] = Field(1.05, gt=0)
    """temperature of sapo's gate for other advantages"""
    dppo_ratio_cap: Annotated[float, NULL_IS_DEFAULT] = Field(20.0, ge=1)
    """maximum of the ratio in dppo_tv and dppo_kl"""
    vespo_k_pos: Annotated[float, NULL_IS_DEFAULT] = Field(2.0, ge=0)
    """exponent of vespo's weight for advantages >= 0"""
    vespo_lambda_pos: Annotated[float, NULL_IS_DEFAULT] = Field(3.0, gt=0)
    """decay of vespo's weight for advantages >= 0"""
    vespo_k_neg: Annotated[float, NULL_IS_DEFAULT] = Field(3.0, ge=0)
    """exponent of vespo's weight for negative advantages"""
    vespo_lambda_neg: Annotated[float, NULL_IS_DEFAULT] = Field(2.0, gt=0)
    """decay of vespo's weight for negative advantages"""
    clip_cov_ratio: Annotated[float, NULL_IS_DEFAULT] = Field(2e-4, gt=0, le=1)
    """fraction of tokens that clip_cov excludes from the surrogate"""
    clip_cov_low: Annotated[float, NULL_IS_DEFAULT] = Field(1.0, gt=0)
    """clip_cov excludes tokens whose covariance is above this (and below clip_cov_high)"""
    clip_cov_high: Annotated[float, NULL_IS_DEFAULT] = Field(5.0, gt=0)
    """clip_cov excludes tokens whose covariance is below this (and above clip_cov_low)"""
    kl_cov_ratio: Annotated[float, NULL_IS_DEFAULT] = Field(2e-4, gt=0, le=1)
    """fraction of tokens, those of highest covariance, that kl_cov penalises for moving away from the old policy"""
    kl_cov_coef: Annotated[float, NULL_IS_DEFAULT] = Field(1.0, gt=0)
    """coefficient of kl_cov's penalty |log ratio|"""
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    """fraction of an update's tokens, those of highest entropy, that have a surrogate; 1: all; below 1, as with
    clip_cov and kl_cov, every update takes an extra forward pass"""

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
    entropy_coef: float = Field(0.0, ge=0)
    """coefficient of the entropy bonus; 0: no bonus"""
    importance_sampling_correction: Literal[
        "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
    ] = "none"
    """correct for differences between generator and trainer: multiply the surrogate by p_trainer / p_generator of the
    token or of the sequence; above importance_sampling_cap, or below importance_sampling_floor, the weight is clamped
    to it (truncate) or set to 0 (mask). Requires old log-probs"""
    importance_sampling_cap: Annotated[float, NULL_IS_DEFAULT] = Field(2.0, ge=1)
    """maximum weight in importance_sampling_correction"""
    importance_sampling_floor: float | None = Field(None, gt=0, le=1)
    """minimum weight in importance_sampling_correction (IcePop: 0.5 with token_mask and a cap of 5); null: none"""
    off_policy_mask_threshold: float | None = Field(None, ge=0)
    """off-policy sequence masking (DeepSeek-V3.2): drop the surrogate of samples with a negative advantage whose mean
    of old log-prob - log-prob is above this; usually with old_logps generator; null: off"""
    old_logps: Literal["trainer", "generator"] | None = Field(
        None,
        description="whose log-probs the ratio compares with. trainer: the policy's before the first update; "
        "generator: those that the tokens were sampled with, so that the ratio also corrects the generator's mismatch "
        "and no pass is needed; null: as in the paper of loss_type "
        f"({', '.join(name for name, loss in LOSS_TYPES.items() if loss.old == 'generator')}: generator, others: "
        "trainer)",
    )
    enable_oldpolicy: bool = True
    """use the policy's log-probs before the first update if a rollout has more than one: computed, or with
    context.batch_invariant the generator's; false: the ratio is always 1"""

    @property
    def clips(self) -> bool:
        return LOSS_TYPES[self.loss_type].epsilon is not None

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """Returns how far below and above 1 a ratio is clipped; (0, inf) of a loss that clips nothing."""
        papers = LOSS_TYPES[self.loss_type].epsilon
        if papers is None:
            return 1.0, np.inf
        low, high = self.epsilon_low, self.epsilon_high
        return papers[0] if low is None else low, papers[1] if high is None else high

    @property
    def aggregation(self) -> str:
        return self.loss_aggregation or LOSS_TYPES[self.loss_type].aggregation

    @property
    def loss_beta(self) -> float:
        """Returns the weight of the KL term in the loss, 0 where it is part of the reward."""
        return 0.0 if self.kl_in_reward else self.beta

    @property
    def is_corrected(self) -> bool:
        """Returns whether the policy's term is multiplied by weights that correct for the generator's log-probs."""
        return self.importance_sampling_correction != "none"

    @property
    def old_source(self) -> str:
        """Returns whose the old log-probs are: the trainer's or the generator's."""
        return self.old_logps or LOSS_TYPES[self.loss_type].old

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
        return masks or self.has_sample_ratio

    @property
    def has_sample_ratio(self) -> bool:
        """Returns whether a ratio, or what is made of it, is one number a sample."""
        return self.by_sequence or LOSS_TYPES[self.loss_type].of_samples
