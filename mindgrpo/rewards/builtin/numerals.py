"""The numbers that are written in a text, as exact fractions.

Reads a bounded window at the end of a text, so a megabyte costs no more than a scan for its last
digit. What is no number, or is longer than any answer, is None.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# Longer runs of digits are not an answer, and turning them into a number costs quadratic time.
LONGEST_NUMBER = 256
LONGEST_BOX = 1024
GOLD_MARK = "####"

SIGN_AND_CURRENCY = r"(?<![\w)\]}.])(?P<sign>[-+\u2212])?\$?"
DIGITS = r"(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
EXPONENT = r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9]))?"
NUMBER = re.compile(
    rf"(?:{SIGN_AND_CURRENCY})?(?P<digits>{DIGITS}){EXPONENT}(?:/(?P<divisor>[0-9]+))?"
)
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])\s*([0-9]))")
LATEX_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|\\[,!])(?=[0-9])")
LATEX_DOLLAR = re.compile(r"\\\$")
DECIMAL = re.compile(r"\d")
# What may stand beside a gold number: words, units and the LaTeX that wraps them.
WRAPPING = re.compile(
    r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{[^{}]*\}|\\[%$,!; ]|\^\s*\{?\s*\\circ\s*\}?"
)
MATHEMATICS = re.compile(r"[\\^_{}()\[\]=<>+*/|~]")


def gold_number(gold: object) -> Fraction | None:
    """The number that a gold answer is; None where it is anything else, as an interval or 2x."""
    text = str(gold)[-2 * LONGEST_BOX :].rpartition(GOLD_MARK)[2]
    boxed = box_content(text)
    window = _plain(text if boxed is None else boxed)
    numbers = list(NUMBER.finditer(window))
    if len(numbers) != 1 or len(numbers[0].group()) > LONGEST_NUMBER:
        return None
    before, after = window[: numbers[0].start()], window[numbers[0].end() :]
    # One letter right behind is a factor (2x), more are a unit (5cm).
    if re.match(r"[^\W\d_](?![^\W\d_])", after) or re.search(r"[^\W_]$", before):
        return None
    if MATHEMATICS.search(WRAPPING.sub(" ", before + " " + after)):
        return None
    return _value(numbers[0])


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, thousands separators, fractions and exponents read."""
    backwards = DECIMAL.search(text[::-1])
    if backwards is None:
        return None
    last = len(text) - 1 - backwards.start()
    start = max(0, last - 2 * LONGEST_NUMBER)
    # One character more closes the braces of a LaTeX fraction.
    numbers = list(NUMBER.finditer(_plain(text[start : last + 2])))
    if not numbers or len(numbers[-1].group()) > LONGEST_NUMBER:
        return None
    return _value(numbers[-1])


def answer_content(text: str) -> str | None:
    """What the last pair of answer tags holds."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def box_content(text: str) -> str | None:
    """What the last \\boxed{} or \\fbox{} that is closed near by holds."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    inside = text[start : start + LONGEST_BOX]
    depth = 1
    for index, character in enumerate(inside):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return inside[:index]
    return None


def _plain(window: str) -> str:
    """ASCII digits for those of any script, and LaTeX's spellings of a number undone."""
    if not window.isascii():
        window = DECIMAL.sub(lambda digit: str(unicodedata.decimal(digit.group())), window)
        window = window.replace("\uff0c", ",").replace("\uff0e", ".").replace("\uff0d", "-")
    window = LATEX_GROUPING.sub("", LATEX_DOLLAR.sub("$", window))
    return LATEX_FRACTION.sub(lambda f: f"{f[1] or f[3]}/{f[2] or f[4]}", window)


def _value(number: re.Match[str]) -> Fraction | None:
    value = Fraction(number["digits"].replace(",", ""))
    value *= Fraction(10) ** int(number["exponent"] or 0)
    divisor = int(number["divisor"] or 1)
    if divisor == 0:
        return None
    return value / divisor * (1 if number["sign"] in (None, "+") else -1)
