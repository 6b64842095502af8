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

    Per-token lists hold float32 [completion length] each. `advantages` float32 [samples]; where they differ from
    token to token, `token_advantages` has them and `advantages` their means. `factors` weigh the policy's term (None:
    1), `counted` bool [samples] says which samples have a part in the loss (None: all).
    """

    prompts: list[np.ndarray]
    completions: list[np.ndarray]
    finish_reasons: list[str]
    generator_logps: list[np.ndarray]
    groups: list[int]
    advantages: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    reference_logps: list[np.ndarray] | None = None
    old_logps: list[np.ndarray] | None = None
    token_advantages: list[np.ndarray] | None = None
    factors: list[np.ndarray] | None = None
    counted: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.completions)

    def replace_groups(self, groups: Sequence[int], fresh: Samples) -> list[int]:
        """Puts `fresh`'s groups, in order, where `groups` were; the places of the samples that were replaced.

        For samples of which nothing but their generation is known yet.
        """
        size = len(fresh) // len(groups)
        places = [i for i, group in enumerate(self.groups) if group in set(groups)]
        order = [group for group in groups for _ in range(size)]
        if [self.groups[i] for i in places] != order or len(fresh) != len(order):
            raise ValueError(f"{len(fresh)} samples do not replace groups {list(groups)}")
        for new, place in enumerate(places):
            self.prompts[place] = fresh.prompts[new]
            self.completions[place] = fresh.completions[new]
            self.finish_reasons[place] = fresh.finish_reasons[new]
            self.generator_logps[place] = fresh.generator_logps[new]
        return places

    @property
    def completion_lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.completions], np.int64)

    @property
    def total_lengths(self) -> np.ndarray:
        prompts = np.array([len(tokens) for tokens in self.prompts], np.int64)
        return prompts + self.completion_lengths


def collect(
    prompts: Sequence[np.ndarray],
    num_generations: int,
    completions: Sequence[Completion],
    first: int = 0,
) -> Samples:
    """Samples of `prompts`, each repeated, numbered from `first`; raises ValueError unless each arrived once."""
    ordered = sorted(completions, key=lambda completion: completion.sample)
    expected = list(range(first, first + len(prompts) * num_generations))
    if [completion.sample for completion in ordered] != expected:
        raise ValueError(f"{len(ordered)} completions arrived for {len(expected)} samples")
    groups = [(c.sample - first) // num_generations for c in ordered]
    return Samples(
        prompts=[prompts[group] for group in groups],
        completions=[c.tokens for c in ordered],
        finish_reasons=[c.finish_reason for c in ordered],
        generator_logps=[c.logps for c in ordered],
        groups=groups,
    )
