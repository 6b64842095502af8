"""A reward for GSM8K's form."""

from __future__ import annotations

import re

LAST_LINE = re.compile(r"^#### -?\d+$")


def form_reward(completions: list[str]) -> list[float]:
    """0.2 where the last line is `#### ` and a whole number."""
    lines = [completion.strip().rpartition("\n")[2] for completion in completions]
    return [0.2 if LAST_LINE.match(line) else 0.0 for line in lines]
