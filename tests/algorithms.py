"""Settings of the algorithm for tests, which name what they are about and leave out the rest."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pydantic import BaseModel

from mindgrpo.algorithm.estimators import AlgorithmConfig


def loss_of(loss_type: str = "grpo", **keys: Any) -> AlgorithmConfig:
    """Without a KL term, unless `keys` have one."""
    return AlgorithmConfig(**({"loss_type": loss_type, "beta": 0.0} | keys))


def advantages_of(
    num_generations: int, advantage_estimator: str = "grpo", scale: str | None = None, **keys: Any
) -> AlgorithmConfig:
    """Without KL in the reward, unless `keys` have it."""
    named: dict[str, Any] = {"num_generations": num_generations, "scale_rewards": scale}
    named |= {"advantage_estimator": advantage_estimator, "beta": 0.0}
    return AlgorithmConfig(**(named | keys))


Given = TypeVar("Given")


def replace(given: Given, **changes: Any) -> Given:
    """As dataclasses.replace, of sections of the configuration too."""
    if isinstance(given, BaseModel):
        return type(given).model_validate(given.model_dump() | changes)
    return dataclasses.replace(given, **changes)  # type: ignore[type-var]
