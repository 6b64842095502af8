"""Rewards for the right answer as a number, boxed or not.

No completion and no gold answer makes one raise. None means that the reward does not apply, as where
the gold answer is not a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from mindgrpo.rewards.builtin.numerals import answer_content, box_content, gold_number, last_number

Reader = Callable[[str], "str | None"]


def accuracy_reward(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    r"""Returns 1.0 where the number in <answer>, else \boxed{}, else the last one, is the gold number, else 0.0."""
    return accuracies(completions, answers, (answer_content, box_content))


def qwen_accuracy_reward(
    completions: Sequence[str], answers: Sequence[str], require_box: bool = False
) -> list[float | None]:
    r"""Does the same for models that box: \boxed{} comes before <answer>; with require_box nothing else counts."""
    readers: tuple[Reader, ...] = (box_content, answer_content)
    if require_box:
        readers = (lambda text: box_content(text) or "",)
    return accuracies(completions, answers, readers)


def accuracies(
    completions: Sequence[str], answers: Sequence[str], readers: Sequence[Reader]
) -> list[float | None]:
    return [
        accuracy(text, gold_number(gold), readers)
        for text, gold in zip(completions, answers, strict=True)
    ]


def accuracy(text: object, gold: Fraction | None, readers: Sequence[Reader]) -> float | None:
    if gold is None:
        return None
    if not isinstance(text, str):
        return 0.0
    marked = first_of(text, readers)
    return float(last_number(text if marked is None else marked) == gold)


def first_of(text: str, readers: Sequence[Reader]) -> str | None:
    contents = (reader(text) for reader in readers)
    return next((content for content in contents if content is not None), None)
