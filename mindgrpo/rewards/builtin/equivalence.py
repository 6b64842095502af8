"""A reward for answers that are mathematically the gold one, however they are written.

Parsing and comparing are math-verify's and sympy's, which can take for ever; so this one runs in a worker
process under a deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from mindgrpo.rewards.builtin.accuracy import first_of
from mindgrpo.rewards.builtin.numerals import (
    GOLD_MARK,
    answer_content,
    box_content,
    gold_number,
    is_misread,
)

# What is looked at of a text that marks no answer, in characters: its conclusion.
TAIL = 1000
LONGEST_EXPRESSION = 2000
LONGEST_DIGITS = 300
DIGITS = re.compile(r"\d+")

# It warns at every call that nobody but the caller watches the time, which is so.
for name in ("parser", "grader", "utils"):
    logging.getLogger(f"math_verify.{name}").setLevel(logging.CRITICAL)


def math_verify_reward(
    completions: Sequence[str], answers: Sequence[str], float_rounding: int = 6
) -> list[float | None]:
    r"""Returns 1.0 where <answer>, else \boxed{}, else the text's end, is mathematically the gold answer, else 0.0.

    None where the gold answer cannot be read as mathematics. `float_rounding` is in decimals.
    """
    return [
        is_equivalent(text, str(gold), float_rounding)
        for text, gold in zip(completions, answers, strict=True)
    ]


def is_equivalent(text: object, answer: str, float_rounding: int) -> float | None:
    gold = answer.rpartition(GOLD_MARK)[2].strip()
    marked, whole = conclusion(text), text.strip() if isinstance(text, str) else ""
    # What needs no algebra: most right answers are written like the gold one.
    if gold and gold in (marked.strip(), whole):
        return 1.0
    number = gold_number(gold)
    if number is not None and number in (gold_number(marked), gold_number(whole)):
        return 1.0
    if number is not None and is_misread(marked or whole):
        return 0.0
    wanted = expressions(as_mathematics(gold))
    if not wanted:
        return None
    answered = expressions(
        as_mathematics(marked) if marked else without_endless_digits(whole[-TAIL:])
    )
    return float(is_verified(wanted, answered, float_rounding))


def expressions(text: str) -> list[Any]:
    if not text:
        return []
    try:
        # Its own deadline, by signals, would turn what takes too long into a wrong answer.
        return parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    except Exception:  # whatever a parser of LaTeX stumbles over is not mathematics
        return []


def is_verified(wanted: list[Any], answered: list[Any], float_rounding: int) -> bool:
    if not answered:
        return False
    try:
        return bool(verify(wanted, answered, float_rounding=float_rounding, timeout_seconds=None))
    except Exception:  # sympy has no answer for these two
        return False


def conclusion(text: object) -> str:
    """Returns what a completion marks as its answer; empty where it marks none."""
    if not isinstance(text, str):
        return ""
    marked = first_of(text, (answer_content, box_content)) or ""
    inner = box_content(marked)
    return marked[-LONGEST_EXPRESSION:] if inner is None else inner


def as_mathematics(expression: str) -> str:
    """Boxes the expression, for the parser, unless it is marked as mathematics; empty if it is too long."""
    bare = expression.strip()
    if not bare or len(bare) > LONGEST_EXPRESSION:
        return ""
    if "$" in bare.replace("\\$", "") or any(mark in bare for mark in ("\\(", "\\[", "\\boxed")):
        return without_endless_digits(bare)
    return without_endless_digits(f"\\boxed{{{bare}}}")


def without_endless_digits(expression: str) -> str:
    """Returns the expression; empty where it has more digits in a row than any answer: computing would not end."""
    longest = max((len(run) for run in DIGITS.findall(expression)), default=0)
    return "" if longest > LONGEST_DIGITS else expression
