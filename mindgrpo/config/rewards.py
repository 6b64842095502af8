"""`reward_config`: which functions score completions, and how long and how large scoring may get."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindgrpo.config.section import AFTER_SIZE, Section


class RewardConfig(Section):
    verifier_function: list[str] = []
    """reward functions: built-in names, module:function or file.py:function, each optionally with (argument=value)"""
    verifier_weight: list[float] | None = None
    """one weight per function; null: 1.0 for each"""
    environment_weight: float = 1.0
    """weight of the rewards of rl_config.environment, which are a function named environment"""
    deadline: float = Field(10.0, gt=0)
    """seconds for a single sample; a function that takes longer is terminated and counted as failed"""
    together_deadline: float | None = Field(None, gt=0)
    """seconds for all samples of a step in one call, after which each sample is scored separately; null: deadline, at
    most 2.5"""
    max_failed_steps: int | None = Field(5, ge=1)
    """end the run after so many steps in a row in which no sample could be scored; null: only a run of nothing but such
    steps, which is an error in any case"""
    memory: Annotated[str, AFTER_SIZE] = "2GB"
    """memory limit of a worker process"""
    workers: int = Field(1, ge=1)
    """number of processes among which the samples of a function are divided; each call receives a part of the step"""
