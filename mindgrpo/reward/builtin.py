"""The rewards users call by name. Total: no completion and no gold answer makes one raise.

Each looks at a bounded piece of the text, so a megabyte costs no more than a scan for its end.
None means that a reward does not apply, as accuracy where the gold answer is not a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction

# Longer runs of digits are not an answer, and turning them into a number costs quadratic time.
LONGEST_NUMBER = 256
LONGEST_BOX = 1024
SIGN_AND_CURRENCY = r"(?<![\w)\]}.])(?P<sign>[-+\u2212])?\$?"
DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
EXPONENT = r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9]))?"
NUMBER = re.compile(
    rf"(?:{SIGN_AND_CURRENCY})?(?P<digits>{DIGITS}){EXPONENT}(?:/(?P<divisor>[0-9]+))?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
LATEX_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9])")
LAST_DIGIT = re.compile(r"[0-9]")


def accuracy_reward(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """1.0 where the number in <answer>, else \\boxed{}, else the last one, is the gold number."""
    return [
        matches(first_of(text, (answer_content, box_content)), gold)
        for text, gold in zip(completions, answers, strict=True)
    ]


def qwen_accuracy_reward(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """The same for models that box: \\boxed{} comes before <answer>."""
    return [
        matches(first_of(text, (box_content, answer_content)), gold)
        for text, gold in zip(completions, answers, strict=True)
    ]


def format_reward(completions: Sequence[str], answers: Sequence[str]) -> list[float | None]:
    """1.0 for <think>something</think> <answer>something</answer> and nothing else."""
    return [float(has_format(text)) for text in completions]


BUILTINS = {
    function.__name__: function
    for function in (accuracy_reward, qwen_accuracy_reward, format_reward)
}


def has_format(text: object) -> bool:
    if not isinstance(text, str):
        return False
    stripped = text.strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    if any(stripped.count(tag) != 1 for tag in tags):
        return False
    if not (stripped.startswith("<think>") and stripped.endswith("</answer>")):
        return False
    thought, _, rest = stripped[len("<think>") :].partition("</think>")
    between, tag, answer = rest.partition("<answer>")
    filled = thought.strip() and answer[: -len("</answer>")].strip()
    return bool(tag and filled and not between.strip())


def matches(piece: str | None, gold: object) -> float | None:
    wanted = last_number(str(gold))
    if wanted is None:
        return None
    return float(piece is not None and last_number(piece) == wanted)


def first_of(text: object, readers: Sequence[Callable[[str], str | None]]) -> str | None:
    if not isinstance(text, str):
        return None
    found = (reader(text) for reader in readers)
    return next((piece for piece in found if piece is not None), text)


def answer_content(text: str) -> str | None:
    """What the last pair of tags holds; a pair that holds no number is a wrong answer."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def box_content(text: str) -> str | None:
    """What the last \\boxed{} that is closed near by holds."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = text[start + len("\\boxed{") :][:LONGEST_BOX]
    depth = 1
    for place, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:place]
    return None


def last_number(text: str) -> Fraction | None:
    backwards = LAST_DIGIT.search(text[::-1])
    if backwards is None:
        return None
    last = len(text) - 1 - backwards.start()
    start = max(0, last - 2 * LONGEST_NUMBER)
    # One character more closes the braces of a LaTeX fraction.
    window = text[start : last + 2]
    window = LATEX_FRACTION.sub(r"\1/\2", LATEX_GROUPING.sub("", window))
    numbers = list(NUMBER.finditer(window))
    if not numbers or len(numbers[-1].group()) > LONGEST_NUMBER:
        return None
    return value_of(numbers[-1])


def value_of(found: re.Match[str]) -> Fraction | None:
    value = Fraction(found["digits"].replace(",", ""))
    if found["exponent"]:
        value *= Fraction(10) ** int(found["exponent"])
    if found["divisor"]:
        divisor = int(found["divisor"])
        if divisor == 0:
            return None
        value /= divisor
    return value if found["sign"] in (None, "+") else -value
