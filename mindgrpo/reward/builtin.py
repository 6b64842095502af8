"""The rewards that users call by name, and how each may be called.

All are total: no completion and no gold answer makes one raise. Those that look at a bounded piece of
a text are `quick` and need no process of their own. Refuses names that would mean two things.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindgrpo.reward.accuracy import accuracy_reward, math_verify_reward, qwen_accuracy_reward
from mindgrpo.reward.formats import (
    format_reward,
    soft_format_reward,
    tag_count_reward,
    think_format_reward,
)
from mindgrpo.reward.knights import kk_reward
from mindgrpo.reward.lengths import (
    cosine_reward,
    repetition_penalty_reward,
    soft_overlong_punishment,
)
from mindgrpo.reward.program import code_reward


@dataclass(frozen=True)
class Builtin:
    """`quick` ones take milliseconds whatever the text; the others are scored in worker processes."""

    call: Callable[..., Any]
    quick: bool = True


BUILTINS: dict[str, Builtin] = {
    "accuracy_reward": Builtin(accuracy_reward),
    "qwen_accuracy_reward": Builtin(qwen_accuracy_reward),
    "math_verify_reward": Builtin(math_verify_reward, quick=False),
    "format_reward": Builtin(format_reward),
    "soft_format_reward": Builtin(soft_format_reward),
    "tag_count_reward": Builtin(tag_count_reward),
    "think_format_reward": Builtin(think_format_reward),
    "kk_reward": Builtin(kk_reward),
    "repetition_penalty_reward": Builtin(repetition_penalty_reward),
    "cosine_reward": Builtin(cosine_reward),
    "soft_overlong_punishment": Builtin(soft_overlong_punishment),
    "code_reward": Builtin(code_reward, quick=False),
}

# The same under the names that other programs gave them.
BUILTINS |= {
    name: BUILTINS[ours]
    for name, ours in {
        "numeric_accuracy_reward": "accuracy_reward",
        "boxed_accuracy_reward": "qwen_accuracy_reward",
        "strict_format_reward": "format_reward",
        "math_verify": "math_verify_reward",
        "accuracy_reward_2": "math_verify_reward",
        "cosine_scaled_reward": "cosine_reward",
        "repetition_penalty": "repetition_penalty_reward",
        "soft_overlong_punishment_reward": "soft_overlong_punishment",
    }.items()
}
