"""`reward_config`: which functions score completions, and how long and how large scoring may get."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mindgrpo.config.section import AFTER_SIZE, Section


class RewardConfig(Section):
    verifier_function: list[str] = []
    """built-in names, module:function or file.py:function, each with (argument=value) or not"""
    verifier_weight: list[float] | None = None
    """one weight a function; null: 1.0 each"""
    deadline: float = Field(10.0, gt=0)
    """seconds for one sample alone; what takes longer is ended and counted"""
    together_deadline: float | None = Field(None, gt=0)
    """seconds for a step's samples in one call, after which each is scored apart; null: deadline, at most 2.5"""
    memory: Annotated[str, AFTER_SIZE] = "2GB"
    """most memory of a worker process"""
    workers: int = Field(1, ge=1)
    """processes that a function's samples are dealt to; each sees its part of a step"""
