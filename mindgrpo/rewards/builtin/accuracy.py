"""Rewards for the right answer as a number, boxed or not.

No completion and no gold answer makes one raise. None means that the reward does not apply, as where
the gold answer is not a number. Refuses to call a wrong answer right because its last digits agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from mindgrpo.rewards.builtin.numerals import (
    answer_content,
    box_content,
    gold_number,
    last_number,
)

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
