"""The rewards that users call by name, where they are, and how each may be called.

All are total: no completion and no gold answer makes one raise. Those that look at a bounded piece of
a text are `quick` and need no process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Builtin:
    """`quick` ones take milliseconds whatever the text; the others are scored in worker processes."""

    module: str
    function: str
    quick: bool = True

    def load(self) -> Callable[..., Any]:
        # Late, because most runs use two of them and each worker one.
        return getattr(import_module(f"mindgrpo.rewards.builtin.{self.module}"), self.function)


BUILTINS: dict[str, Builtin] = {
    builtin.function: builtin
    for builtin in (
        Builtin("accuracy", "accuracy_reward"),
        Builtin("accuracy", "qwen_accuracy_reward"),
        Builtin("equivalence", "math_verify_reward", quick=False),
        Builtin("formats", "format_reward"),
        Builtin("formats", "soft_format_reward"),
        Builtin("formats", "tag_count_reward"),
        Builtin("formats", "think_format_reward"),
        Builtin("kk", "kk_reward"),
        Builtin("lengths", "repetition_penalty_reward"),
        Builtin("lengths", "cosine_reward"),
        Builtin("lengths", "soft_overlong_punishment"),
        Builtin("program", "code_reward", quick=False),
    )
}

# The same under the names that other programs gave them.
ALSO_CALLED = {
    "numeric_accuracy_reward": "accuracy_reward",
    "boxed_accuracy_reward": "qwen_accuracy_reward",
    "accuracy_reward_2": "math_verify_reward",
    "math_verify": "math_verify_reward",
    "strict_format_reward": "format_reward",
    "cosine_scaled_reward": "cosine_reward",
    "repetition_penalty": "repetition_penalty_reward",
    "soft_overlong_punishment_reward": "soft_overlong_punishment",
}
BUILTINS |= {name: BUILTINS[ours] for name, ours in ALSO_CALLED.items()}
