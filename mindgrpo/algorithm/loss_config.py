"""What a configuration asks of the algorithm, as plain values: the loss (Objective) and what the loss is fed (Credit).

Refuses nothing: the configuration's checks have refused what does not go together.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindgrpo.algorithm.advantages import STD_FLOOR
from mindgrpo.config import Config


@dataclass(frozen=True)
class Objective:
    """Everything that the graph of the loss depends on; names are those of rl_config.

    `beta` is the weight of the KL term in the loss: 0 where there is none, or where it is part of the reward.
    `corrected` says that the policy's term is weighted by factors for the generator's mismatch.
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

    @classmethod
    def of(cls, config: Config) -> Objective:
        rl = config.rl_config
        return cls(
            loss_type=rl.loss_type,
            importance_sampling_level=rl.importance_sampling_level,
            epsilon_low=rl.epsilon_low,
            epsilon_high=rl.epsilon_high,
            delta=rl.delta,
            dual_clip=rl.dual_clip,
            beta=0.0 if rl.kl_in_reward else rl.beta,
            kl_estimator=rl.kl_estimator,
            entropy_coef=rl.entropy_coef,
            corrected=rl.importance_sampling_correction != "none",
            max_completion_length=config.generate_config.sampling_config.max_tokens,
        )

    @property
    def by_sequence(self) -> bool:
        return self.importance_sampling_level == "sequence"


@dataclass(frozen=True)
class Credit:
    """How rewards become what each token is pushed by; names are those of rl_config.

    `reward_beta` is the weight of the KL term in the reward, 0 where there is none.
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

    @classmethod
    def of(cls, config: Config) -> Credit:
        rl = config.rl_config
        return cls(
            num_generations=rl.num_generations,
            advantage_estimator=rl.advantage_estimator,
            scale_rewards=rl.reward_scale,
            reward_beta=rl.beta if rl.kl_in_reward else 0.0,
            kl_estimator=rl.kl_estimator,
            correction=rl.importance_sampling_correction,
            correction_cap=rl.correction_cap,
            mask_truncated=rl.mask_truncated_completions,
            std_floor=rl.advantage_std_floor,
        )

    @property
    def needs_old(self) -> bool:
        """The policy's log-probs before the step's first update are needed, however many updates follow."""
        return self.reward_beta > 0 or self.correction != "none"
