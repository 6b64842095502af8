"""Built-in rewards: what they give, and that no text makes one raise or take long.

Does NOT prove that two numbers written in ways the built-ins do not read are equal, nor anything about
math-verify's own judgement beyond the examples here.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import ALSO_CALLED, BUILTINS
from mindgrpo.rewards.builtin.accuracy import accuracy_reward, qwen_accuracy_reward
from mindgrpo.rewards.builtin.formats import (
    format_reward,
    soft_format_reward,
    tag_count_reward,
    think_format_reward,
)
from mindgrpo.rewards.builtin.kk import kk_reward
from mindgrpo.rewards.builtin.lengths import (
    cosine_reward,
    repetition_penalty_reward,
    soft_overlong_punishment,
)

GOOD = "<think>12+30=42</think><answer>42</answer>"
QUICK = {name: found.load() for name, found in BUILTINS.items() if found.quick}


@each_row(
    ("completion", "gold", "expected"),
    [
        (GOOD, "42", 1.0),
        (GOOD, "41", 0.0),
        ("<answer>41</answer> no: <answer>42</answer>", "42", 1.0),
        ("<answer>$1,234.50.</answer>", "1234.5", 1.0),
        ("<answer>42.0 apples.</answer>", "42", 1.0),
        ("<answer>-5</answer>", "-5", 1.0),
        ("<answer>-$5</answer>", "-5", 1.0),
        ("<answer>5</answer>", "-5", 0.0),
        ("<answer>12+30=42</answer>", "42", 1.0),
        ("<answer>47-5</answer>", "5", 0.0),
        ("<answer>1/2</answer>", "0.5", 1.0),
        ("<answer>1/0</answer>", "0", 0.0),
        (r"<answer>\frac{1}{2}</answer>", "1/2", 1.0),
        (r"<answer>\frac12</answer>", "0.5", 1.0),
        (r"<answer>-\dfrac{3}{4}</answer>", "-0.75", 1.0),
        (r"<answer>\boxed{42}</answer>", "42", 1.0),
        (r"<answer>\$1{,}000</answer>", "1,000", 1.0),
        ("<answer>forty</answer> 42", "42", 0.0),
        ("<answer>1e3</answer>", "1000", 1.0),
        ("<answer>٤٢</answer>", "42", 1.0),
        ("<answer>\uff11,\uff12\uff13\uff14</answer>", "1234", 1.0),
        ("<answer>5²</answer>", "5", 0.0),
        ("</answer>42<answer>", "42", 1.0),
        (r"So \boxed{\text{about } \boxed{42}} of 7", "42", 1.0),
        (r"\boxed{42 never closed, then 7", "7", 1.0),
        ("12+30=42, 42-5=37. The answer is 37", "37", 1.0),
        ("The answer is 1,000,000.", "1000000", 1.0),
        (r"1{,}000 in all", "1,000", 1.0),
        ("0.1 + 0.2 = 0.3", "0.3", 1.0),
        ("0.30000000000000004", "0.3", 0.0),
        ("", "42", 0.0),
        ("no number", "42", 0.0),
    ],
)
def test_accuracy_compares_as_numbers(completion: str, gold: str, expected: float) -> None:
    assert accuracy_reward([completion], [gold]) == [expected]


@pytest.mark.parametrize(
    "gold",
    ["42", "#### 42", "Half of 84 is 42.\n#### 42", "$42", r"\$42", "42 apples", "42cm", r"42\%"]
    + [r"\boxed{42}", r"42\text{ cm}", r"42^\circ", "42.", "answer: 42"],
)
def test_a_gold_answer_may_have_words_around_its_number(gold: str) -> None:
    assert accuracy_reward([GOOD, "43"], [gold] * 2) == [1.0, 0.0]


@each_row(
    "gold",
    [
        "forty-two",
        "",
        "(3, 42)",
        r"2\sqrt{42}",
        "x=42",
        "42x",
        r"42\pi",
        "1/0",
        "3 and 42",
        "[1,42)",
    ]
    + [r"\frac{42}{x}", "x_42", "2^42", None, [42], "9" * 10**5],
)
def test_accuracy_does_not_apply_where_the_gold_answer_is_no_number(gold: Any) -> None:
    """A completion that ends in the same digits as an interval is not right."""
    assert accuracy_reward([GOOD], [gold]) == [None]


def test_qwen_accuracy_prefers_the_box() -> None:
    text = r"<answer>41</answer> and \boxed{42}"
    assert qwen_accuracy_reward([text, GOOD, "is 42"], ["42"] * 3) == [1.0, 1.0, 1.0]
    assert qwen_accuracy_reward([text, GOOD], ["42"] * 2, require_box=True) == [1.0, 0.0]
    assert accuracy_reward([text], ["42"]) == [0.0]


@pytest.mark.parametrize(
    ("completion", "strict", "soft", "think"),
    [
        (GOOD, 1.0, 1.0, 1.0),
        ("<think>a\nb</think>\n <answer>4</answer>\n", 1.0, 1.0, 1.0),
        ("<think> </think><answer>4</answer>", 0.0, 0.0, 1.0),
        ("<think>a</think><answer> </answer>", 0.0, 0.0, 1.0),
        ("<think>a</think> so <answer>4</answer>", 0.0, 1.0, 1.0),
        ("<think>a</think><answer>4</answer> done", 0.0, 1.0, 1.0),
        ("x<think>a</think><answer>4</answer>", 0.0, 1.0, 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0, 1.0, 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0, 1.0, 1.0),
        ("<answer>4</answer><think>a</think>", 0.0, 0.0, 0.0),
        ("<think>a<answer>b</think>4</answer>", 0.0, 0.0, 1.0),
        ("<think>12+30=42. The answer is 42", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_formats(completion: str, strict: float, soft: float, think: float) -> None:
    assert format_reward([completion]) == [strict]
    assert soft_format_reward([completion]) == [soft]
    assert think_format_reward([completion]) == [think]


def test_each_tag_that_stands_once_counts_a_quarter() -> None:
    texts = [GOOD, "<think>a", "<think><think>", "<answer></answer>"]
    assert tag_count_reward(texts) == [1.0, 0.25, 0.0, 0.5]


def test_a_think_tag_at_the_end_of_the_prompt_counts() -> None:
    rest, prompts = GOOD.removeprefix("<think>"), ["<|assistant|>\n<think>\n"]
    for reward in (format_reward, soft_format_reward, think_format_reward, tag_count_reward):
        assert reward([rest], prompts) == [1.0]
        assert reward([GOOD], ["<|assistant|>\n"]) == [1.0]
    assert format_reward([GOOD], prompts) == [0.0]


KNIGHTS = "(1) Zoey is a knight\n(2) Ted is a knave"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (KNIGHTS, 3.0),
        ("Ted is a Knave and zoey is a KNIGHT.", 3.0),
        ("(1) Zoey is a knave (2) Ted is a knave", -0.5),
        ("Zoey and Ted are knights", -0.5),
        ("Zoey is a knight", -1.0),
        ("Zoey is a knight. Ted is a knave. Zoey is a knave", -1.0),
        ("Zoey is not a knave. Ted is a knave", -1.0),
        ("nobody knows", -1.0),
    ],
)
def test_knights_and_knaves(answer: str, expected: float) -> None:
    text = f"<think>hm</think><answer>{answer}</answer>"
    assert kk_reward([text], [KNIGHTS]) == [expected]
    assert kk_reward([text.replace("</think>", "")], [KNIGHTS]) == [-3.0]


def test_knights_and_knaves_takes_gold_answers_in_json_and_leaves_out_others() -> None:
    text = f"<think>hm</think><answer>{KNIGHTS}</answer>"
    gold = '{"solution_text_format": "(1) Zoey is a knight\\n(2) Ted is a knave"}'
    assert kk_reward([text] * 3, [gold, "42", "{"]) == [3.0, None, None]


def test_soft_overlong_punishment_is_equation_13_of_dapo() -> None:
    lengths = [0, 80, 81, 90, 100, 101]
    given = soft_overlong_punishment([""] * 6, lengths, 100, 20)
    assert given == pytest.approx([0.0, 0.0, -0.05, -0.5, -1.0, -1.0])
    assert soft_overlong_punishment([""], [90], 100) == pytest.approx([-0.5])
    assert soft_overlong_punishment([""], None, 100) == [None]
    with pytest.raises(UserError, match="soft_punish_cache is 200"):
        soft_overlong_punishment([""], [1], 100, 200)


def test_cosine_pays_short_right_answers_and_long_wrong_ones() -> None:
    lengths = [0, 50, 100, 200]
    assert cosine_reward(["42"] * 4, ["42"] * 4, lengths, 100) == pytest.approx([1, 0.75, 0.5, 0.5])
    wrong = cosine_reward(["41"] * 4, ["42"] * 4, lengths, 100)
    assert wrong == pytest.approx([-1, -0.75, -0.5, -0.5])
    assert cosine_reward(["42", "x"], ["x", "x"], [1, 1], 100) == [None, None]
    assert cosine_reward(["42"], ["42"]) == [None]


def test_repetition_is_punished_in_any_script() -> None:
    texts = ["a b c d e", "a b c a b c a b c", "那么那么那么那么", "一二三四五六七八", "", "a b"]
    values = repetition_penalty_reward(texts)
    assert values[0] == values[3] == values[4] == values[5] == 0.0
    assert values[1] == pytest.approx(-4 / 7)
    assert values[2] == pytest.approx(-4 / 6)
    assert repetition_penalty_reward(["a a a a"], ngram_size=1, max_penalty=-2.0) == [-1.5]


def adversarial_completions() -> list[str]:
    rng = random.Random(0)
    pieces = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "{", "1,", "٤٢", "-"]
    pieces += ["$", "1/", "e", ".", "\\frac{1}{", "\ud800", "\x00", "\U0001d7d8", " ", "999", "\n"]
    pieces += ["Zoey is a knight ", "not ", "那", "```", "\\text{", "%", "^", "(", "1{,}", "\uff0c"]
    mixed = ["".join(rng.choices(pieces, k=rng.randint(0, 60))) for _ in range(1000)]
    long = [piece * (10**6 // len(piece)) for piece in pieces]
    return mixed + long + ["<answer>" + "9" * 10**6 + "</answer>", "1e999 ", "1/" + "0" * 300]


# What is quadratic in a million characters takes minutes.
@pytest.mark.timeout(180)
def test_no_completion_makes_a_quick_built_in_raise_or_run_on() -> None:
    columns: dict[str, Any] = {"completion_lengths": [7], "max_completion_length": 9}
    for text in adversarial_completions():
        for name, function in QUICK.items():
            code = getattr(function, "__code__", None)
            named = {key: columns[key] for key in columns if key in code.co_varnames}
            answers = {"answers": ["42"]} if "answers" in code.co_varnames else {}
            (value,) = function([text], **answers, **named)
            assert value is None or -3.0 <= value <= 3.0, (name, text[:80])


def test_no_gold_answer_makes_a_quick_built_in_raise() -> None:
    for gold in ["", "x", "1/0", "9" * 10**5, None, 42, 4.5, [1], "\ud800", "{" * 10**5]:
        for function in QUICK.values():
            if "answers" in function.__code__.co_varnames:
                function([GOOD, None], [gold, gold])
            else:
                function([GOOD, None])
    assert accuracy_reward([GOOD], [42]) == [1.0]  # type: ignore[list-item]
    assert accuracy_reward([None], ["42"]) == [0.0]  # type: ignore[list-item]


def test_other_names_lead_to_the_same_functions() -> None:
    assert all(BUILTINS[name] is BUILTINS[ours] for name, ours in ALSO_CALLED.items())
    assert BUILTINS["boxed_accuracy_reward"].load() is qwen_accuracy_reward


@each_row(
    ("completion", "gold", "expected"),
    [
        ("72", "72", 1.0),
        ("The answer is $3$", "3", 1.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"<answer>$x^2+1$</answer>", "1+x^2", 1.0),
        (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", 1.0),
        (r"\boxed{2\sqrt{5}}", r"2\sqrt{3}", 0.0),
        (r"\boxed{[1,2)}", "[1,2)", 1.0),
        (r"\boxed{(5,2)}", "(3,2)", 0.0),
        ("73", "72", 0.0),
        ("Paris", "Paris", 1.0),
        ("", "3", 0.0),
        ("anything", "", None),
        ("\x00\ud800{{{", "3", 0.0),
        ("9" * 10**6, "3", 0.0),
        (r"\boxed{" * 10**5, "3", 0.0),
        (None, "3", 0.0),
    ],
)
def test_math_verify_compares_mathematics(
    completion: Any, gold: str, expected: float | None
) -> None:
    assert BUILTINS["math_verify_reward"].load()([completion], [gold]) == [expected]
