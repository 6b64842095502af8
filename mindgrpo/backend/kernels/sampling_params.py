"""Declares how tokens are drawn, in numbers only, so that a configuration is checked without a device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """`temperature` 0 takes the likeliest token; `top_k` 0 or less, `top_p` 1, `min_p` 0 and penalty 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    max_tokens: int = 128
    stop_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def trainer_temperature(self) -> float:
        """The temperature of the log-probs; the likeliest token's are those at 1."""
        return self.temperature or 1.0

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return 1.0 / self.trainer_temperature
