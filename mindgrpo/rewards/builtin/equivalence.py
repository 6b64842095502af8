"""A reward for answers that are mathematically the gold one, however they are written.

Parsing and comparing are math-verify's and sympy's, which can take for ever; so this one runs in a worker
process under a deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from latex2sympy2_extended.logic import And
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Interval, MatrixBase, N, Rational, Set, Tuple, UnevaluatedExpr
from sympy.core.relational import Relational

from mindgrpo.rewards.builtin.accuracy import first_of
from mindgrpo.rewards.builtin.numerals import (
    ANOTHER_NUMBER,
    GOLD_MARK,
    MATHEMATICS,
    answer_content,
    box_content,
    gold_number,
    has_several_boxes,
    in_ascii,
    is_misread,
)

# What is looked at of a text that marks no answer, in characters: its conclusion.
TAIL = 1000
LONGEST_EXPRESSION = 2000
LONGEST_DIGITS = 300
DIGITS = re.compile(r"\d+")
DIGITS_COMPUTED = 30
# Of these, math-verify reads a part: lists with dots for more, and residues.
READ_IN_PART = re.compile(
    r"\\[a-z]?dots|[,;]\s*(?:\.\.|…)|[⋯≡]|\\equiv|\\[bp]mod|(?i:(?<![\\a-z])mod\b)"
)
# And of these it makes a product: 10 000, 1 1/2, 0x1F.
READ_AS_PRODUCT = re.compile(r"\b0x|\A[^\\]*\d\s+\d")
DELIMITER = re.compile(r"\$\$|(?<!\\)(?:\$|\\[()\[\]])")
SEPARATOR = re.compile(r"\s*(?:[,;]|,?\s*(?:and|or))\s*")
ASSIGNMENT = re.compile(r"\b[A-Za-z]\s*=\s*\Z")
IS_MORE = re.compile(rf"\d|{MATHEMATICS.pattern}")
PERCENT = re.compile(r"\s*(?:\\?%|[Pp]er\s?cent)")
# What may differ in two texts that say the same.
FILLING = re.compile(r"[\s$]+|\\[,;!:]")
# Words, which math-verify reads as a product of their letters: listen would be silent.
WORDS = re.compile(r"[A-Za-z\s.,'-]*\b(?!and\b)[A-Za-z]{3}[A-Za-z\s.,'-]*")
MARKUP = re.compile(r"\\(?:text\w*|math\w+|mbox)\b\s*|[{}$]")

# It warns at every call that nobody but the caller watches the time, which is so.
for name in ("parser", "grader", "utils"):
    logging.getLogger(f"math_verify.{name}").setLevel(logging.CRITICAL)


def math_verify_reward(
    completions: Sequence[str], answers: Sequence[str], float_rounding: int = 6
) -> list[float | None]:
    r"""Returns 1.0 where <answer>, else \boxed{}, else the text's end, is mathematically the gold answer, else 0.0.

    None where the gold answer as a whole cannot be read as mathematics, unless the answer is written like it. A decimal
    equals another number where both agree in `float_rounding` decimals and in as many digits.
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
    if word := words_of(gold):
        return float(word in (words_of(marked), words_of(whole)))
    number = gold_number(gold)
    if number is not None and number in (gold_number(marked), gold_number(whole)):
        return 1.0
    if number is not None and is_misread(marked or whole):
        return 0.0
    wanted = whole_expression(gold)
    if not wanted:
        return 1.0 if gold and FILLING.sub("", gold) == FILLING.sub("", marked) else None
    answered = expressions(
        as_mathematics(marked) if marked else without_endless_digits(whole[-TAIL:])
    )
    is_part = READ_IN_PART.search(marked) is not None
    return float(not is_part and is_verified(wanted, answered, float_rounding))


def words_of(text: str) -> str:
    """Returns the words that a text is, without spaces, markup and the full stop; "" where it is something else."""
    boxed = box_content(text)
    bare = MARKUP.sub("", text if boxed is None else boxed).strip()
    return FILLING.sub("", bare.rstrip(".")) if WORDS.fullmatch(bare) else ""


def whole_expression(text: str) -> list[Any]:
    """Returns the expression that a text is, in a list; an empty one where a part of the text would not be read.

    math-verify alone reads what it can: the 7 of x = 3 mod 7. Words may stand around mathematics between dollars.
    """
    text = in_ascii(text)
    boxed = box_content(text)
    text = text if boxed is None or has_several_boxes(text) else boxed
    misread = (READ_IN_PART, READ_AS_PRODUCT, ANOTHER_NUMBER)
    if len(text) > LONGEST_EXPRESSION or any(pattern.search(text) for pattern in misread):
        return []
    around, inside = (DELIMITER.split(text)[start::2] for start in (0, 1))
    if inside and len(around) > len(inside):
        around[0] = ASSIGNMENT.sub("", around[0])
        if not all(map(SEPARATOR.fullmatch, around[1:-1])) or any(map(IS_MORE.search, around)):
            return []
        text = ",".join(inside) + ("\\%" if PERCENT.match(around[-1]) else "")
    if not text.strip():
        return []
    written = text if "\\boxed" in text else f"\\boxed{{{text.replace('**', '^')}}}"
    return expressions(
        without_endless_digits(written),
        extraction_config=[LatexExtractionConfig()],
        extraction_mode="first_match",
    )


def expressions(text: str, **how: Any) -> list[Any]:
    if not text:
        return []
    try:
        # Its own deadline, by signals, would turn what takes too long into a wrong answer.
        return parse(text, parsing_timeout=None, fallback_mode="no_fallback", **how)
    except Exception:  # whatever a parser of LaTeX stumbles over is not mathematics
        return []


def is_verified(wanted: list[Any], answered: list[Any], float_rounding: int) -> bool:
    return any(
        is_equal(gold, answer, float_rounding) and agrees(gold, answer, float_rounding)
        for gold, answer in product(wanted, answered)
    )


def is_equal(gold: Any, answer: Any, float_rounding: int) -> bool:
    try:
        return bool(verify(gold, answer, float_rounding=float_rounding, timeout_seconds=None))
    except Exception:  # sympy has no answer for these two
        return False


def agrees(gold: Any, answer: Any, digits: int) -> bool:
    """Returns whether the numbers of two expressions that math-verify takes for equal agree in so many digits.

    It rounds at a fixed decimal and drops what is below 1e-15: there all small numbers are one.
    """
    try:
        wanted, answered = terms(gold), terms(answer)
        symbols = sorted(unknowns(wanted), key=str)
        if len(wanted) != len(answered) or set(symbols) != unknowns(answered):
            return True
        # Equal terms are equal whatever their unknowns are.
        values = {symbol: Rational(137 + 61 * i, 89) for i, symbol in enumerate(symbols)}
        numbers = (sorted(number_of(term, values) for term in each) for each in (wanted, answered))
        return all(is_near(one, other, digits) for one, other in zip(*numbers, strict=True))
    except Exception:  # no numbers
        return True


def terms(expression: Any) -> list[Any]:
    """Lists what a set, tuple, interval or matrix holds, and what an unknown is related to; others are one term."""
    if isinstance(expression, MatrixBase):
        return list(expression.flat())
    if isinstance(expression, Interval):
        return [expression.start, expression.end]
    if isinstance(expression, Relational):
        sides = {expression.lhs: expression.rhs, expression.rhs: expression.lhs}
        return [side for unknown, side in sides.items() if unknown.is_Symbol]
    if isinstance(expression, And | Set | Tuple):
        return [term for one in expression.args for term in terms(one)]
    return [expression]


def unknowns(expressions: Sequence[Any]) -> set[Any]:
    return {symbol for one in expressions for symbol in one.free_symbols}


def number_of(term: Any, values: Mapping[Any, Any]) -> tuple[Any, Any, bool]:
    """Returns a term's real and imaginary parts, and whether it is written with a percent sign."""
    real, imaginary = N(term.doit().subs(values), DIGITS_COMPUTED).as_real_imag()
    return real, imaginary, term.has(UnevaluatedExpr)


def is_near(wanted: tuple[Any, Any, bool], answered: tuple[Any, Any, bool], digits: int) -> bool:
    # 9% and 9 are one.
    factors = (1,) if wanted[2] == answered[2] else (1, 100, Rational(1, 100))
    far = Rational(10) ** (2 - 2 * digits) * (wanted[0] ** 2 + wanted[1] ** 2)
    return any(
        (wanted[0] - factor * answered[0]) ** 2 + (wanted[1] - factor * answered[1]) ** 2 <= far
        for factor in factors
    )


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
