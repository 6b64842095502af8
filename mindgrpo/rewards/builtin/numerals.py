r"""The numbers that are written in a text, as exact fractions.

A number is decimal digits, plain or with `,` between groups of three; digits with an exponent (1.5e3); or a fraction of
two whole numbers (3/4). A sign and a currency sign may stand before it, `%` and a unit of two letters or more behind.
What is written otherwise (12,5 or 10 000 or 1 1/2 or 2^10 or 3-5) is no number, and no part of it is one.

Reads a bounded window at the end of a text, so a megabyte costs no more than a scan for its last digit. What is longer
than any answer is no number either.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

# Longer runs of digits are not an answer, and turning them into a number costs quadratic time.
LONGEST_NUMBER = 256
LONGEST_BOX = 1024
LONGEST_AFTER = 64
GOLD_MARK = "####"

WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?![0-9])"
SIGN = r"[-+\u2212]?"
NUMBER = re.compile(
    rf"(?P<sign>{SIGN}(?:[A-Z]{{0,3}}[$€£¥₹]{SIGN})?)"
    rf"(?:(?P<dividend>{WHOLE})/(?P<divisor>{WHOLE})"
    rf"|(?P<digits>(?:{WHOLE})?\.[0-9]+|{WHOLE})(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9]))?)"
)

SPACE = r"[^\S\r\n]"
# Of alphabets that put spaces between words. Letters of others, such as Chinese ones, may touch a number.
LETTER = r"A-Za-zµ\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0370-\u058f"
VULGAR_FRACTION = r"\u00bc-\u00be\u2150-\u215e\u2189"
NUMERAL = rf"0-9²³¹\u2070-\u209c{VULGAR_FRACTION}十百千万萬亿億兆"
OPERATOR = r"\-+*×·⋅∙÷/^√±\u2010-\u2013\u2212"
SPLITS = r"\s=<>≈≠≤≥→⇒|&"
BRACKETS = r"(){}\[\]\\_'\"`$"
OPENS = r"(?:\\?[(\[]|\\(?:boxed|fbox|text\w*|math\w+)\{|[{\"'“‘«*_`$])"
# How a text may end that a number follows.
BEGINS = re.compile(
    rf"(?:^|[{SPLITS}]|(?:^|[{SPLITS}{LETTER}{OPERATOR}{BRACKETS}])"
    rf"[^{SPLITS}{LETTER}{OPERATOR}{BRACKETS}{NUMERAL}.%]+){OPENS}*\Z"
)
# How it may not end: the number is an operand, or one with the digits before it.
CONTINUES = re.compile(
    rf"(?:[{NUMERAL}]{SPACE}+|[√±^/×÷]{SPACE}+|\S{SPACE}*[-+·⋅∙\u2212]{SPACE}+|[\w)\]}}]{SPACE}+\*{SPACE}+"
    rf"|[0-9]{SPACE}*[\u2010-\u2014]{SPACE}+|[0-9)]{SPACE}*[xX]{SPACE}+"
    r"|\\(?:times|cdot|div|pm|mp|sqrt|ast|over)\s+)\Z"
)
# How the text behind a number may not begin.
GOES_ON = re.compile(
    rf"(?:\\?%)?[)\]}}\"'”’»`$]*(?:(?!千[克米瓦卡])[{NUMERAL}]|[{LETTER}](?![{LETTER}])|[xX]|{SPACE}+[xX]\b"
    rf"|_+\w|\*+[\w(\\]|{SPACE}+\*{SPACE}+\S|[({{\[]|{SPACE}*[+×·⋅∙÷^√±]|{SPACE}*/(?!{SPACE}*[{LETTER}]{{2}})"
    rf"|[-\u2010-\u2013\u2212](?![{LETTER}]{{2}})[\w(\\]"
    rf"|{SPACE}*\\(?![])%$,;:!\\ ]|text|math|mbox|quad|qquad|right|end|approx|implies))"
)
# Of digits that are no number: what is written in one with them, and whether mathematics goes on there.
TOKEN_ENDS = re.compile(rf"(?:[\w.,'/]|(?<=[0-9]){SPACE}+(?=[{NUMERAL}]|\Z))+\Z")
IS_OPERAND = re.compile(rf"(?:[{OPERATOR}({{\\]|\\[a-z]+){SPACE}*\Z")
IS_OPERATED_ON = re.compile(rf"[)}}\]]*{SPACE}*[{OPERATOR}({{\\]")
APART = re.compile(rf"[0-9]{SPACE}+[{NUMERAL}]")

LATEX_FRACTION = re.compile(
    r"(?<![0-9])\\[dt]?frac\s*(?:\{([0-9]+)\}\s*\{([0-9]+)\}|([0-9])\s*([0-9]))(?![0-9])"
)
LATEX_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|,\\!|\\[,!;: ])(?=[0-9])")
LATEX_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?")
LATEX_DOLLAR = re.compile(r"\\\$")
DECIMAL = re.compile(r"\d")
LAST = re.compile(rf"[\d{VULGAR_FRACTION}]")
# Full-width signs, and the separators of Arabic digits, in ASCII.
IN_ASCII = {0x66B: ord("."), 0x66C: ord(","), **{n: n - 0xFEE0 for n in range(0xFF01, 0xFF5F)}}
# What may stand beside a gold number: words, units and the LaTeX that wraps them.
WRAPPING = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{[^{}]*\}|\\[%$,!; ]")
# What may not: operators, unknowns, and words that make another number of it.
MATHEMATICS = re.compile(
    r"[\\^_{}()\[\]=<>+*/|~≤≥≠±√×÷·⋅∙∞∪∩∈∉≡→⇒∑∏∫π⋯]|[,;]\s*(?:\.\.|…)|\b[A-Za-z]!"
    r"|(?<![A-Za-z])(?:[iknxyz]|pi|sqrt|log|ln|sin|cos|tan)(?![A-Za-z])"
)
ANOTHER_NUMBER = re.compile(
    r"(?i)(?<!\\)\b(?:(?:hundred|thousand|[mb]illion|trillion|lakh|crore|dozen)s?|half|squared|cubed|factorial"
    r"|mod(?:ulo)?|plus|minus|negative)\b|[百万萬亿億兆]|千(?![克米瓦卡])"
)


def gold_number(gold: object) -> Fraction | None:
    """Returns the number that a gold answer is; None where it is anything else, such as an interval, 2x or 5!."""
    text = str(gold).rpartition(GOLD_MARK)[2]
    boxed = box_content(text)
    window = text if boxed is None else boxed
    if len(window) > 2 * LONGEST_BOX or has_several_boxes(text):
        return None
    numbers = list(NUMBER.finditer(_plain(window)))
    if len(numbers) != 1:
        return None
    before, after = _around(numbers[0])
    around = f"{before} {after}"
    has_more = MATHEMATICS.search(WRAPPING.sub(" ", around)) or ANOTHER_NUMBER.search(around)
    return None if has_more or after.lstrip().startswith("!") else _value(numbers[0])


def last_number(text: str) -> Fraction | None:
    """Returns the last number in `text`; None where its last digits are no number, whatever precedes them."""
    written = _last(text)
    return None if written is None else _value(written)


def is_misread(text: str) -> bool:
    """Returns whether the last digits are neither a number nor mathematics: 1.000.000, 10 000, 1 1/2, 0x1F, 5k.

    Parsers of mathematics read a part of such text.
    """
    written = _last(text)
    if written is None or _value(written) is not None:
        return False
    before, after = _around(written)
    token = TOKEN_ENDS.search(before)
    begun = "" if token is None else token.group()
    is_operand = IS_OPERAND.search(before.removesuffix(begun)) or (begun and written["sign"])
    if is_operand or IS_OPERATED_ON.match(after):
        return False
    return bool(APART.search(begun + written.group())) or "/" not in begun + written.group()


def answer_content(text: str) -> str | None:
    """Returns the content of the last pair of answer tags; None without one."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else text[start + len("<answer>") : end]


def box_content(text: str) -> str | None:
    r"""Returns the content of the last \boxed{} or \fbox{}; None where it is not closed within LONGEST_BOX."""
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


def has_several_boxes(text: str) -> bool:
    """Returns whether the last two boxes hold different things."""
    last = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"), 0)
    return box_content(text[:last]) not in (None, box_content(text))


def in_ascii(text: str) -> str:
    """Replaces digits of any script, and full-width signs, by ASCII ones."""
    if text.isascii():
        return text
    text = text.translate(IN_ASCII)
    return DECIMAL.sub(lambda digit: str(unicodedata.decimal(digit.group())), text)


def _plain(window: str) -> str:
    """Does the same, and replaces LaTeX's spellings of a number by plain ones."""
    window = in_ascii(window)
    window = LATEX_GROUPING.sub(",", LATEX_DOLLAR.sub("$", window))
    window = LATEX_DEGREE.sub("°", window)
    return LATEX_FRACTION.sub(lambda f: f"{f[1] or f[3]}/{f[2] or f[4]}", window)


def _last(text: str) -> re.Match[str] | None:
    """Returns the last digits of `text` as NUMBER reads them, in a window around them."""
    backwards = LAST.search(text[::-1])
    if backwards is None:
        return None
    end = len(text) - backwards.start()
    window = text[max(0, end - 2 * LONGEST_NUMBER) : end + LONGEST_AFTER]
    return [None, *NUMBER.finditer(_plain(window))][-1]


def _around(number: re.Match[str]) -> tuple[str, str]:
    return number.string[: number.start()], number.string[number.end() :]


def _value(number: re.Match[str]) -> Fraction | None:
    """Returns the number's value; None where the text around it makes it a part of something else."""
    before, after = _around(number)
    if len(number.group()) > LONGEST_NUMBER or not BEGINS.search(before):
        return None
    if CONTINUES.search(before) or GOES_ON.match(after) or LAST.search(after):
        return None
    if number["divisor"] is not None:
        dividend, divisor = (int(number[name].replace(",", "")) for name in ("dividend", "divisor"))
        if divisor == 0:
            return None
        value = Fraction(dividend, divisor)
    else:
        value = Fraction(number["digits"].replace(",", ""))
        value *= Fraction(10) ** int(number["exponent"] or 0)
    return -value if re.search(r"[-\u2212]", number["sign"]) else value
