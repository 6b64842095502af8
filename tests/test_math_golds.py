r"""Gold answers as mathematics and as numbers: read whole or not at all, and compared in all their digits.

Does NOT prove that every way to write a gold answer is read, nor that one that is read means what its author meant.
"""

from __future__ import annotations

from tables import each_row

from mindgrpo.rewards.builtin.accuracy import accuracy_reward, qwen_accuracy_reward
from mindgrpo.rewards.builtin.equivalence import math_verify_reward

# Golds, and another way to write each.
SAME = [
    ("42", "42.0"),
    ("1,234", "1234"),
    ("1000000", "10^6"),
    ("0.5", r"\frac{1}{2}"),
    ("1/3", "0.333333"),
    (r"\frac{1}{3}", "0.333333"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    ("5!", "120"),
    ("120", "5!"),
    (r"\binom{5}{2}", "10"),
    (r"6.63\times 10^{-34}", r"6.63 \cdot 10^{-34}"),
    (r"6.63\times 10^{-34}", r"66.3\times 10^{-35}"),
    (r"10^{-20}", r"\frac{1}{10^{20}}"),
    ("0.0000001", r"10^{-7}"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"),
    (r"\log_2 8", "3"),
    (r"2\pi", r"\pi \cdot 2"),
    (r"\pi", "3.141593"),
    ("3+4i", "4i+3"),
    ("50%", "50"),
    (r"50\%", r"\frac{1}{2}"),
    ("5 cm", "5"),
    (r"5\text{ cm}", "5"),
    (r"90^\circ", "90"),
    (r"\$1{,}000", "1000"),
    ("１２３", "123"),
    ("٤٢", "42"),
    ("x=5", "5"),
    ("x = 5", "x=5"),
    ("5", "x = 5"),
    (r"x^2+2x+1", r"(x+1)^2"),
    ("2x", r"x \cdot 2"),
    (r"\frac{x}{2}", "0.5x"),
    ("y = 2x + 1", "y = 1 + 2x"),
    ("x < 5", "5 > x"),
    ("1 < x < 2", "(1,2)"),
    ("(1,2)", "(1, 2)"),
    ("[1,2)", r"\left[1, 2\right)"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"(-\infty,1)\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
    ("1, 2, 3", "3, 2, 1"),
    (r"\{1,2\}", r"\{2,1\}"),
    (r"1 \text{ and } 2", "2, 1"),
    (r"x=1 \text{ or } x=2", "x=2, x=1"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}"),
    ("$5$", "5"),
    (r"The answer is $\frac{1}{2}$.", "0.5"),
    (r"$x = 1$ and $x = 2$", "x=2, x=1"),
    (r"\(\sqrt{8}\)", r"2\sqrt{2}"),
    (r"so \boxed{\frac{3}{4}}", "0.75"),
    (r"2*5", "10"),
    ("2**3", "8"),
    (r"3 \times 4", "12"),
    ("12-5", "7"),
    (r"\text{Paris}", "Paris"),
    (r"\text{(C)}", "(C)"),
    ("silent", r"\text{silent}"),
    (r"\textbf{New York}", "New York."),
    ("x and y", "y, x"),
    ("ab", "ba"),
    ("17 \\bmod 5", "17 \\bmod 5"),
    (r"1, 2, \ldots, n", r"1,2,\ldots,n"),
]
# Golds, and what a part of each is, or what they would be with fewer digits.
OTHER = [
    (r"6.63\times 10^{-34}", r"1.38\times 10^{-23}"),
    (r"6.63\times 10^{-34}", r"6.63\times 10^{-32}"),
    (r"6.63\times 10^{-34}", "0"),
    ("0", r"10^{-9}"),
    ("0.0000001", "0.0000002"),
    ("4e-7", "1e-7"),
    (r"e^{-50}", r"e^{-60}"),
    (r"10^{-34}x", r"2 \cdot 10^{-34}x"),
    (r"x = 10^{-20}", r"x = 2\cdot 10^{-20}"),
    (r"x = 10^{-20}", r"2\cdot 10^{-20}"),
    (r"\{10^{-20}, 1\}", r"\{2\cdot 10^{-20}, 1\}"),
    (r"(0, 10^{-20})", r"(0, 2\cdot 10^{-20})"),
    (r"x < 10^{-20}", r"x < 2 \cdot 10^{-20}"),
    (r"\begin{pmatrix}10^{-20}\\1\end{pmatrix}", r"\begin{pmatrix}2\cdot 10^{-20}\\1\end{pmatrix}"),
    (r"1, 2, \ldots, n", "2"),
    (r"1, 2, \ldots, n", "1, 2, n"),
    (r"1, 2, \dots, 9", "9"),
    ("1, 3, 5, ..., 99", "99"),
    ("1, 3, 5, …, 99", "99"),
    ("1, ..., n", "1"),
    (r"$1$, $3$, ..., $99$", "99"),
    (r"x \equiv 3 \pmod 7", "7"),
    (r"x \equiv 3 \pmod{7}", "3"),
    (r"$x \equiv 3$ (mod $7$)", "7"),
    ("3 mod 7", "3"),
    ("3 mod n", "3"),
    ("5!", "5"),
    ("5 !", "5"),
    (r"5!\text{ ways}", "5"),
    ("5 million", "5"),
    (r"5\text{ million}", "5"),
    ("negative 5", "5"),
    ("sqrt 5", "5"),
    ("5 π", "5"),
    ("5, x", "5"),
    ("x ≥ 5", "5"),
    ("1.000.000", "1"),
    ("10 000", "0"),
    ("1 1/2", "1/2"),
    ("1½", "1"),
    ("5²", "5"),
    ("0x1F", "0"),
    (r"3 $\frac{1}{2}$", r"\frac{1}{2}"),
    (r"first $5$ apples, then $7$ pears", "7"),
    (r"\boxed{1} \text{ or } \boxed{2}", "2"),
    ("silent", "listen"),
    (r"\text{Eve}", r"\mathrm{eeV}"),
    ("no solution", "on solution"),
    ("7" + " and" * 600 + " 5", "5"),
]


@each_row(("gold", "answer"), SAME)
def test_gold_answers_are_what_they_are_however_they_are_written(gold: str, answer: str) -> None:
    assert math_verify_reward([f"\\boxed{{{answer}}}"], [gold]) == [1.0]


@each_row(("gold", "answer"), OTHER)
def test_no_part_of_a_gold_answer_and_no_rounded_one_is_right(gold: str, answer: str) -> None:
    completions = [f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>"]
    assert 1.0 not in math_verify_reward(completions, [gold] * 2)
    assert 1.0 not in accuracy_reward(completions, [gold] * 2)
    assert 1.0 not in qwen_accuracy_reward(completions, [gold] * 2)


@each_row(
    ("answer", "gold"),
    [
        (r"x \equiv 3 \pmod 7", "7"),
        ("1, 3, 5, ..., 99", "99"),
        (r"1, 3, 5, \ldots, 99", "99"),
        ("0.0000002", "0.0000001"),
    ],
)
def test_no_part_of_a_boxed_answer_is_the_gold_one(answer: str, gold: str) -> None:
    assert math_verify_reward([f"\\boxed{{{answer}}}"], [gold]) == [0.0]


def test_decimals_agree_in_as_many_digits_as_asked_for() -> None:
    assert math_verify_reward(["\\boxed{0.33}"] * 2, ["1/3"] * 2, float_rounding=2) == [1.0] * 2
    assert math_verify_reward(["\\boxed{0.33}"], ["1/3"]) == [0.0]
    assert math_verify_reward(["\\boxed{0.000333333}"], ["1/3000"]) == [1.0]
    assert math_verify_reward(["\\boxed{0.000333}"], ["1/3000"]) == [0.0]
