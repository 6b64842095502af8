"""What a rollout yields, and what is later known of it, one row a sample; the same on every rank.

Token ids travel with lengths and finish reasons, so no mask is ever read off a token's value. Refuses text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

STOPPED, LENGTH = "stop", "length"


@dataclass(frozen=True)
class Completion:
    """One generated sample: `tokens` int32 [n], `logps` float32 [n] (nats, at the sampling temperature)."""

    sample: int
    tokens: np.ndarray
    logps: np.ndarray
    finish_reason: str


@dataclass
class Samples:
    """A step's samples in order; `groups[i]` is the prompt's number, samples of one group have the same prompt.

    Per-token lists hold float32 [completion length] each; `advantages` float32 [samples].
    """

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    finish_reasons: list[str]
    generator_logps: list[np.ndarray]
    groups: list[int]
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    reference_logps: list[np.ndarray] | None = None
    old_logps: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.completions)

    @property
    def completion_lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.completions], np.int64)

    @property
    def total_lengths(self) -> np.ndarray:
        prompts = np.array([len(tokens) for tokens in self.prompts], np.int64)
        return prompts + self.completion_lengths


def collect(
    prompts: Sequence[np.ndarray], num_generations: int, completions: Sequence[Completion]
) -> Samples:
    """Samples of `prompts`, each repeated; raises ValueError unless every sample arrived exactly once."""
    ordered = sorted(completions, key=lambda completion: completion.sample)
    expected = list(range(len(prompts) * num_generations))
    if [completion.sample for completion in ordered] != expected:
        raise ValueError(f"{len(ordered)} completions arrived for {len(expected)} samples")
    return Samples(
        prompts=[prompts[c.sample // num_generations] for c in ordered],
        completions=[c.tokens for c in ordered],
        finish_reasons=[c.finish_reason for c in ordered],
        generator_logps=[c.logps for c in ordered],
        groups=[c.sample // num_generations for c in ordered],
    )
