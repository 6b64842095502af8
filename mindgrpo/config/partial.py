"""The keys of `rl_config` for rollouts that end before every completion does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from mindgrpo.config.section import Section

if TYPE_CHECKING:
    from mindgrpo.config.rl import RLConfig
    from mindgrpo.config.roles import SamplingConfig

DEFAULT_STALENESS = 2
DEFAULT_CHUNK = 64


class PartialRolloutKeys(Section):
    partial_rollout: bool = False
    """end a rollout when the groups of a step are whole; unfinished completions go on in the next step, under its
    weights and first in line; needs importance_sampling_correction"""
    over_sampling_batch_size: int | None = Field(None, ge=1)
    """prompts under way with partial_rollout, from the prompts of a step to twice as many; null: one and a half times
    as many"""
    max_staleness: int | None = Field(
        None,
        ge=1,
        description="number of steps that a completion of partial_rollout may go on after the one that began it; a "
        f"step waits for those that are this old; null: {DEFAULT_STALENESS}",
    )
    partial_rollout_chunk: int | None = Field(
        None,
        ge=1,
        description="tokens that every unfinished completion gets before the rollout looks whether enough groups are "
        f"whole; null: {DEFAULT_CHUNK}",
    )
    rollout_token_budget: int | None = Field(None, ge=1)
    """tokens after which a partial rollout ends with the groups that are whole, one at least; null: no budget"""

    @property
    def staleness_limit(self) -> int:
        return self.max_staleness or DEFAULT_STALENESS

    @property
    def rollout_chunk(self) -> int:
        return self.partial_rollout_chunk or DEFAULT_CHUNK


PARTIAL_KEYS = (
    "over_sampling_batch_size",
    "max_staleness",
    "partial_rollout_chunk",
    "rollout_token_budget",
)


def partial_contradictions(rl: RLConfig, sampling: SamplingConfig) -> Iterator[str]:
    if not rl.partial_rollout:
        for key in PARTIAL_KEYS:
            if getattr(rl, key) is not None:
                yield (
                    f"rl_config.{key} is {getattr(rl, key)}, but rl_config.partial_rollout is false, so it has no "
                    f"effect; set partial_rollout to true or leave {key} out"
                )
        return
    if rl.importance_sampling_correction == "none":
        yield (
            "rl_config.partial_rollout trains on tokens of older weights, but "
            "rl_config.importance_sampling_correction is none, so they would count as the policy's own; set the "
            "correction to token_truncate"
        )
    for key, other in (
        ("dynamic_sampling", rl.dynamic_sampling),
        ("environment", rl.environment is not None),
    ):
        if other:
            yield (
                f"rl_config.partial_rollout does not go together with rl_config.{key}; turn one of them off"
            )
    if sampling.min_tokens:
        yield (
            f"rl_config.partial_rollout draws completions in chunks, and generate_config.sampling_config.min_tokens "
            f"{sampling.min_tokens} would count in each; set min_tokens to 0"
        )
