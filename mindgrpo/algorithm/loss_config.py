"""Holds the algorithm's settings: LossConfig for the loss, AdvantageConfig for its advantages, masks and weights.

Defaults that rl_config has too stand here alone. Imports nothing, so that the configuration can import it.
"""

from __future__ import annotations

from dataclasses import dataclass

# Added to a standard deviation before dividing by it, as in verl.
STD_FLOOR = 1e-6


@dataclass(frozen=True)
class LossConfig:
    """Everything that the graph of the loss depends on; names are those of rl_config.

    `beta` is the weight of the KL term in the loss: 0 where there is none, or where it is part of the reward.
    `corrected` says that the policy's term is multiplied by weights that correct for the generator's log-probs.
    `max_completion_length` in tokens is what dr_grpo divides by.
    """

    loss_type: str = "grpo"
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

    @property
    def by_sequence(self) -> bool:
        return self.importance_sampling_level == "sequence"


@dataclass(frozen=True)
class AdvantageConfig:
    """How rewards become advantages, masks and weights of tokens; names are those of rl_config.

    `reward_beta` is the weight of the KL term in the reward, 0 where there is none. `by_turn`: turns of a conversation
    have advantages of their own.
    """

    num_generations: int
    advantage_estimator: str = "grpo"
    scale_rewards: str = "group"
    reward_beta: float = 0.0
    kl_estimator: str = "k3"
    correction: str = "none"
    correction_cap: float = 2.0
    mask_truncated: bool = False
    std_floor: float = STD_FLOOR
    by_turn: bool = False

    @property
    def needs_old(self) -> bool:
        """Returns whether the policy's log-probs before the first update are needed, however many updates follow."""
        return self.reward_beta > 0 or self.correction != "none"
