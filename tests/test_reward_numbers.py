"""Which texts are numbers to the built-in rewards, and that a part of one never is.

Does NOT prove that every way to write a number is read: what is written otherwise than the rule says has no reward.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from mindgrpo.rewards.builtin.accuracy import accuracy_reward, qwen_accuracy_reward
from mindgrpo.rewards.builtin.equivalence import math_verify_reward
from mindgrpo.rewards.builtin.lengths import cosine_reward
from mindgrpo.rewards.builtin.numerals import gold_number, last_number

# Each beside what the digits at its end, or its beginning, would be if they were read alone.
NO_NUMBERS = {
    "1.000.000": "0",
    "12,5": "5",
    "10 000": "0",
    "10\u202f000": "0",
    "1 000 000": "0",
    "1 1/2": "1/2",
    r"1\frac{1}{2}": "1/2",
    r"\frac{-1}{2}": "2",
    "1½": "1",
    "5²": "5",
    "0x1F": "1",
    "0xFF": "0",
    "2^10": "10",
    "2^{10}": "10",
    r"\sqrt{16}": "16",
    r"6 \times 7": "7",
    "6 * 7": "7",
    "12-5": "5",
    "12 - 5": "5",
    "3-5": "5",
    "3–5": "5",
    "3.14.15": "15",
    "1,2345": "2345",
    "1234,567": "567",
    "0,500": "500",
    "12{,}5": "5",
    "10:30": "30",
    "24/12/2025": "2025",
    "1/0": "1",
    "1'000": "0",
    "1_000": "0",
    "1e2e3": "3",
    "1e9999": "1",
    "v2": "2",
    "x_12": "12",
    "f(5)": "5",
    "2(5)": "5",
    "5(x + y)": "5",
    "2x": "2",
    "5k": "5",
    "5万": "5",
    "3到5": "5",
    "9" * 300: "9",
}
NUMBERS = {
    "1,234.50.": "1234.5",
    "5%": "5",
    "x=5": "5",
    "(5)": "5",
    "5km": "5",
    "$5/hour": "5",
    "a 5-year plan": "5",
    "**5** apples": "5",
    "**Answer:** 5": "5",
    "12\n- 5 apples": "5",
    "−5": "-5",
    "-$5": "-5",
    "$-5": "-5",
    "1e3": "1000",
    "１，２３４": "1234",
    "١٫٥": "1.5",
    "共5个": "5",
    "5千克": "5",
    r"10,\!080": "10080",
    r"\$1{,}000": "1000",
    r"\(5\)": "5",
    r"5\%": "5",
    r"5\text{ cm}": "5",
    "12\n5": "5",
}
SENTENCES = ["{}", "The answer is {}.", "<answer>{}</answer>", "7 of them; {}"]


def test_what_is_no_number_is_not_read_in_part_nor_is_a_number_before_it(
    subtests: pytest.Subtests,
) -> None:
    for text, part in NO_NUMBERS.items():
        with subtests.test(text=text):
            completion = f"7 of them; {text}"
            assert accuracy_reward([completion] * 2, [part, "7"]) == [0.0, 0.0]
            assert qwen_accuracy_reward([f"\\boxed{{{text}}}"], [part]) == [0.0]
            assert accuracy_reward(["5"], [text]) == [None]


def test_signs_units_and_marks_may_stand_around_a_number(subtests: pytest.Subtests) -> None:
    for text, value in NUMBERS.items():
        with subtests.test(text=text):
            assert accuracy_reward([f"The answer is {text}."], [value]) == [1.0]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_text_is_a_number_or_none_wherever_it_stands(sentence: str) -> None:
    wrong = {text: part for text, part in NO_NUMBERS.items() if read(sentence, text, part) != 0.0}
    wrong |= {text: value for text, value in NUMBERS.items() if read(sentence, text, value) != 1.0}
    assert not wrong


def read(sentence: str, text: str, gold: str) -> float | None:
    return accuracy_reward([sentence.format(text)], [gold])[0]


@pytest.mark.parametrize(
    "text", ["1.000.000", "10 000", "1 1/2", "1½", "0x1F", "12,5", "3.14.15", "5²", "5k"]
)
def test_mathematics_reads_no_part_of_a_number_either(text: str) -> None:
    golds = ["0", "1", "5", "10", "12", "3.14"]
    for completion in (f"\\boxed{{{text}}}", f"<answer>{text}</answer>", f"The answer is {text}."):
        assert math_verify_reward([completion] * len(golds), golds) == [0.0] * len(golds)


@pytest.mark.parametrize(
    ("text", "gold"),
    [("2^{10}", "1024"), ("12-5", "7"), (r"\sqrt{16}", "4"), (r"\log_2 8", "3"), ("2*5", "10")],
)
def test_mathematics_still_computes(text: str, gold: str) -> None:
    assert math_verify_reward([f"\\boxed{{{text}}}"], [gold]) == [1.0]


def test_an_accuracy_by_length_pays_nothing_for_a_part_of_a_number() -> None:
    assert cosine_reward(["12,5"], ["5"], [0], 100) == [-1.0]


DECIMALS = st.decimals(-(10**12), 10**12, allow_nan=False, places=3)
WHOLE_DECIMALS = st.integers(-(10**12), 10**12).map(Decimal)
FORMATS = [
    f"{sign}{currency}{{0:{grouping}f}}{percent}"
    for sign in "-−"
    for currency in ("", "$", "€")
    for grouping in ("", ",")
    for percent in ("", "%")
]
BEFORE = [
    "",
    "The answer is ",
    "x = ",
    "12+30=",
    "(",
    "**",
    "答案是",
    "1. 2. 3.\n",
    "3 of 4: ",
    r"\(",
]
AFTER = ["", ".", " apples", "km", ")", "**.", "个", "\n", ", so it is.", r"\)"]


@given(
    DECIMALS | WHOLE_DECIMALS,
    st.sampled_from(FORMATS),
    st.sampled_from(BEFORE),
    st.sampled_from(AFTER),
)
def test_a_rendered_number_is_read_back_exactly(
    value: Decimal, written: str, before: str, after: str
) -> None:
    numeral = written.format(abs(value))
    numeral = numeral if value < 0 else numeral[1:]
    assert last_number(before + numeral + after) == Fraction(value)
    assert gold_number(numeral) == Fraction(value)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9), st.sampled_from(BEFORE))
def test_a_rendered_fraction_is_read_back_exactly(dividend: int, divisor: int, before: str) -> None:
    assert last_number(f"{before}{dividend}/{divisor}") == Fraction(dividend, divisor)


WHOLE = st.integers(0, 10**9).map(str)
GLUE = [
    " ",
    "\u00a0",
    ":",
    "'",
    "_",
    "*",
    "^",
    "×",
    "÷",
    "–",
    "—",
    "~",
    "x",
    "a",
    "(",
    ")",
    "{",
    "}",
    "½",
    "²",
]
GLUE += [
    "到",
    "年",
    ";",
    "!",
    "?",
    "#",
    "@",
    "%",
    '"',
    "`",
    "\\",
    "-",
    "+",
    "−",
    " - ",
    " + ",
    " * ",
    " / ",
    "..",
    ",,",
]


@given(WHOLE, st.sampled_from(GLUE), WHOLE, st.sampled_from(BEFORE), st.sampled_from(AFTER))
@example("1", "#", "2", "", "")
def test_digits_glued_to_other_digits_are_no_number(
    first: str, glue: str, second: str, before: str, after: str
) -> None:
    assert last_number(before + first + glue + second + after) is None


@given(
    WHOLE,
    st.sampled_from([*"abkxπ^×÷²½万({", "+1/2", "(x", r"\pi", r"\times x", " + x", "*x", "/x"]),
)
def test_digits_glued_to_what_follows_are_no_number(digits: str, glue: str) -> None:
    assert last_number(f"The answer is {digits}{glue}") is None


@given(
    WHOLE,
    st.sampled_from(
        [*"abkx_π^×÷²½√十.", "f(", "x-", "2*", r"\sqrt{", "^{", "}{", r"\times ", "2 + "]
    ),
)
def test_digits_glued_to_what_precedes_are_no_number(digits: str, glue: str) -> None:
    assert last_number(f"The answer is y{glue}{digits}") is None


@given(st.text(alphabet="0123456789.,/-+ $%eEx^{}()\\½²千个a\n", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    value = last_number(text)
    assert value is None or accuracy_reward([text], [str(value)]) == [1.0]
