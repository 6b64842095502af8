"""Rewards for the right answer: as a number, boxed, and up to LaTeX equivalence.

No completion and no gold answer makes one raise. None means that the reward does not apply, as where
the gold answer is not a number. Refuses to call a wrong answer right because its last digits agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from mindgrpo.reward.numerals import (
    GOLD_MARK,
    answer_content,
    box_content,
    gold_number,
    last_number,
)

# What is looked at of a text that marks no answer, in characters: its conclusion.
TAIL = 1000
LONGEST_EXPRESSION = 2000
LONGEST_DIGITS = 300

DIGITS = re.compile(r"\d+")

Reader = Callable[[str], "str | None"]


def accuracy_reward(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """1.0 where the number in <answer>, else \\boxed{}, else the last one, is the gold number."""
    return [
        is_number(text, gold_number(gold), (answer_content, box_content))
        for text, gold in zip(completions, answers, strict=True)
    ]


def qwen_accuracy_reward(
    completions: Sequence[str], answers: Sequence[str], require_box: bool = False
) -> list[float | None]:
    """The same for models that box: \\boxed{} comes before <answer>; with require_box only it counts."""
    readers: tuple[Reader, ...] = (box_content, answer_content)
    if require_box:
        readers = (lambda text: box_content(text) or "",)
    return [
        is_number(text, gold_number(gold), readers)
        for text, gold in zip(completions, answers, strict=True)
    ]


def math_verify_reward(
    completions: Sequence[str], answers: Sequence[str], float_rounding: int = 6
) -> list[float | None]:
    """1.0 where <answer>, else \\boxed{}, else the text's end, is mathematically the gold answer.

    None where the gold answer cannot be read as mathematics. `float_rounding` is in decimals.
    """
    return [
        is_equivalent(text, str(gold), float_rounding)
        for text, gold in zip(completions, answers, strict=True)
    ]


def is_equivalent(text: object, answer: str, float_rounding: int) -> float | None:
    gold = answer.rpartition(GOLD_MARK)[2].strip()
    given, said = conclusion(text), text.strip() if isinstance(text, str) else ""
    # What needs no algebra: most right answers are written like the gold one.
    if gold and gold in (given.strip(), said):
        return 1.0
    wanted = gold_number(gold)
    if wanted is not None and wanted in (gold_number(given), gold_number(said)):
        return 1.0
    gold_expressions = expressions(as_mathematics(gold))
    if not gold_expressions:
        return None
    marked = as_mathematics(given) if given else without_endless_digits(said[-TAIL:])
    given_expressions = expressions(marked)
    return float(
        bool(given_expressions)
        and is_verified(gold_expressions, given_expressions, float_rounding)
    )


def expressions(text: str) -> list[Any]:
    from math_verify import parse

    if not text:
        return []
    try:
        # Its own deadline, by signals, would turn what takes too long into a wrong answer.
        return parse(text, parsing_timeout=None, fallback_mode="no_fallback")
    except Exception:  # whatever a parser of LaTeX stumbles over is not mathematics
        return []


def is_verified(gold: list[Any], given: list[Any], float_rounding: int) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, given, float_rounding=float_rounding, timeout_seconds=None))
    except Exception:  # sympy has no answer for these two
        return False


def conclusion(text: object) -> str:
    """What a completion marks as its answer; empty where it marks none."""
    if not isinstance(text, str):
        return ""
    marked = first_of(text, (answer_content, box_content)) or ""
    inner = box_content(marked)
    return marked[-LONGEST_EXPRESSION:] if inner is None else inner


def as_mathematics(expression: str) -> str:
    """Put where the parser looks first; what already says that it is mathematics stays as it is."""
    bare = expression.strip()
    if not bare or len(bare) > LONGEST_EXPRESSION:
        return ""
    if "$" in bare.replace("\\$", "") or any(mark in bare for mark in ("\\(", "\\[", "\\boxed")):
        return without_endless_digits(bare)
    return without_endless_digits(f"\\boxed{{{bare}}}")


def without_endless_digits(expression: str) -> str:
    """Nothing, where it has more digits in a row than any answer: computing with them has no end."""
    longest = max((len(run) for run in DIGITS.findall(expression)), default=0)
    return "" if longest > LONGEST_DIGITS else expression


def is_number(text: object, wanted: Fraction | None, readers: Sequence[Reader]) -> float | None:
    if wanted is None:
        return None
    if not isinstance(text, str):
        return 0.0
    piece = first_of(text, readers)
    return float(last_number(text if piece is None else piece) == wanted)


def first_of(text: str, readers: Sequence[Reader]) -> str | None:
    found = (reader(text) for reader in readers)
    return next((piece for piece in found if piece is not None), None)
