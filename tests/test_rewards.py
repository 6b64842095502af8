"""Built-in rewards, loading of users' functions, and scoring.

Does NOT prove: that a reward which hangs, exits the process or eats memory is survived (scoring is
in this process), nor that two numbers written in ways the built-ins do not read are equal.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from pathlib import Path

import numpy as np
import pytest

from mindgrpo.errors import UserError
from mindgrpo.reward.builtin import (
    BUILTINS,
    accuracy_reward,
    format_reward,
    qwen_accuracy_reward,
)
from mindgrpo.reward.load import resolve
from mindgrpo.reward.score import Scorer

GOOD = "<think>12+30=42</think><answer>42</answer>"


@pytest.mark.parametrize(
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
        ("<answer>47-5</answer>", "5", 1.0),
        ("<answer>1/2</answer>", "0.5", 1.0),
        ("<answer>1/0</answer>", "0", 0.0),
        (r"<answer>\frac{1}{2}</answer>", "1/2", 1.0),
        (r"<answer>\boxed{42}</answer>", "42", 1.0),
        ("<answer>forty</answer> 42", "42", 0.0),
        ("<answer>1e3</answer>", "1000", 1.0),
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
        (GOOD, "#### 42", 1.0),
        (GOOD, "forty-two", None),
        (GOOD, "", None),
    ],
)
def test_accuracy_compares_as_numbers(completion: str, gold: str, expected: float | None) -> None:
    assert accuracy_reward([completion], [gold]) == [expected]


def test_qwen_accuracy_prefers_the_box() -> None:
    text = r"<answer>41</answer> and \boxed{42}"
    assert qwen_accuracy_reward([text, GOOD, "is 42"], ["42"] * 3) == [1.0, 1.0, 1.0]
    assert accuracy_reward([text], ["42"]) == [0.0]


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (GOOD, 1.0),
        ("<think>a\nb</think>\n <answer>4</answer>\n", 1.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("<think>a</think> so <answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer> done", 0.0),
        ("x<think>a</think><answer>4</answer>", 0.0),
        ("<think>a<think>b</think><answer>4</answer>", 0.0),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<answer>4</answer><think>a</think>", 0.0),
        ("<think>a<answer>b</think>4</answer>", 0.0),
        ("<think>12+30=42. The answer is 42", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_each_tag_once_and_filled(completion: str, expected: float) -> None:
    assert format_reward([completion], ["4"]) == [expected]


def adversarial_completions() -> list[str]:
    rng = random.Random(0)
    pieces = ["<answer>", "</answer>", "<think>", "\\boxed{", "}", "{", "1,", "٤٢", "-", "$"]
    pieces += ["1/", "e", ".", "\\frac{1}{", "\ud800", "\x00", "\U0001d7d8", " ", "999", "\n"]
    mixed = ["".join(rng.choices(pieces, k=rng.randint(0, 60))) for _ in range(1000)]
    long = [piece * (10**6 // len(piece)) for piece in pieces]
    return mixed + long + ["<answer>" + "9" * 10**6 + "</answer>", "1e999 ", "1/" + "0" * 300]


def test_no_completion_makes_a_built_in_raise_or_take_long() -> None:
    for text in adversarial_completions():
        for name, function in BUILTINS.items():
            started = time.perf_counter()
            (value,) = function([text], ["42"])
            assert value in (0.0, 1.0), (name, text[:80])
            # The rule is 50 ms; a busy machine gets some slack.
            assert time.perf_counter() - started < 0.2, (name, text[:80])


def test_no_gold_answer_makes_a_built_in_raise() -> None:
    for gold in ["", "x", "1/0", "9" * 10**5, None, 42, 4.5, [1], "\ud800"]:
        for function in BUILTINS.values():
            function([GOOD], [gold])  # type: ignore[list-item]
    assert accuracy_reward([GOOD], [42]) == [1.0]  # type: ignore[list-item]
    assert accuracy_reward([None], ["42"]) == [0.0]  # type: ignore[list-item]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_specs_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "besides.py", "VALUE = 0.5\n")
    write(
        tmp_path / "mine_for_test.py",
        "import besides\n"
        "def half(completions, answers):\n    return [besides.VALUE] * len(completions)\n"
        "class Count:\n"
        "    def __init__(self):\n        self.calls = 0\n"
        "    def __call__(self, completions):\n"
        "        self.calls += 1\n        return [self.calls] * len(completions)\n",
    )
    assert resolve("accuracy_reward").call is accuracy_reward
    for spec in (
        "mine_for_test.py:half",
        "mine_for_test:half",
        f"{tmp_path}/mine_for_test.py:half",
    ):
        function = resolve(spec)
        assert (function.name, function.call(["a"], ["b"])) == ("half", [0.5])
    counter = resolve("mine_for_test.py:Count")
    assert (counter.name, counter.call(["a"]), counter.call(["a"])) == ("Count", [1], [2])
    assert resolve(lambda completions: [0.0]).name == "<lambda>"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("acuracy_reward", "nearest name is 'accuracy_reward'"),
        ("bad.py", "bad.py:function"),
        ("missing.py:f", "does not exist"),
        ("nosuch.module:f", "No module named 'nosuch'"),
        ("bad.py:f", "ZeroDivisionError"),
        ("broken.py:f", "SyntaxError"),
        ("leaves.py:f", "SystemExit"),
        ("fine.py:scor", "nearest name is 'score'"),
        ("fine.py:LIMIT", "is a int"),
        ("fine.py:Needy", "without arguments"),
    ],
)
def test_what_does_not_resolve_is_one_sentence(
    spec: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bad.py", "1 / 0\n")
    write(tmp_path / "broken.py", "def f(:\n")
    write(tmp_path / "leaves.py", "raise SystemExit(3)\n")
    write(
        tmp_path / "fine.py",
        "LIMIT = 3\ndef score(c):\n    return [0.0]\n"
        "class Needy:\n    def __init__(self, model):\n        pass\n",
    )
    with pytest.raises(UserError, match="reward_config.verifier_function") as caught:
        resolve(spec)
    assert said in str(caught.value)
    assert spec in str(caught.value)
    assert "\n" not in str(caught.value)


def scorer(*functions: object, weights: list[float] | None = None) -> Scorer:
    return Scorer([resolve(function) for function in functions], weights)  # type: ignore[arg-type]


def test_totals_are_weighted_and_leave_out_what_does_not_apply() -> None:
    def sometimes(completions: list[str], **_: object) -> list[float | None]:
        return [None if text == "b" else 3.0 for text in completions]

    def length(completions: list[str]) -> np.ndarray:
        return np.array([len(text) for text in completions])

    scores = scorer(sometimes, length, weights=[2.0, 0.5]).score(["a", "b"], ["", ""], {})
    assert scores.total.dtype == np.float32
    np.testing.assert_array_equal(scores.total, [6.5, 0.5])
    np.testing.assert_array_equal(scores.per_function["sometimes"], [3.0, math.nan])
    assert scores.errors == {"sometimes": 0, "length": 0}
    assert scores.num_unscored == 0


def test_only_accepted_columns_are_passed() -> None:
    seen: dict[str, object] = {}

    def one(completions: list[str], level: list[int], missing: int = 7) -> list[float]:
        seen["one"] = (level, missing)
        return [0.0] * len(completions)

    def every(completions: list[str], **columns: object) -> list[float]:
        seen["every"] = sorted(columns)
        return [0.0] * len(completions)

    scorer(one, every).score(["a", "b"], ["1", "2"], {"level": [3, 4], "topic": ["x", "y"]})
    assert seen == {"one": ([3, 4], 7), "every": ["answers", "level", "topic"]}


def test_async_functions_are_awaited_inside_a_running_loop_too() -> None:
    async def slow(completions: list[str], answers: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def caller() -> np.ndarray:
        return scorer(slow).score(["a"], ["b"], {}).total

    np.testing.assert_array_equal(scorer(slow).score(["a"], ["b"], {}).total, [1.0])
    np.testing.assert_array_equal(asyncio.run(caller()), [1.0])


def test_a_failing_sample_costs_only_itself() -> None:
    def fragile(completions: list[str], answers: list[str]) -> list[float]:
        return [1.0 / int(text) for text in completions]

    def not_a_number(completions: list[str]) -> list[float]:
        return [
            math.nan if text == "0" else math.inf if text == "4" else 1.0 for text in completions
        ]

    scores = scorer(fragile, not_a_number).score(["2", "0", "x", "4"], [""] * 4, {})
    np.testing.assert_array_equal(scores.per_function["fragile"], [0.5, math.nan, math.nan, 0.25])
    np.testing.assert_array_equal(
        scores.per_function["not_a_number"], [1.0, math.nan, 1.0, math.nan]
    )
    assert scores.errors == {"fragile": 2, "not_a_number": 2}
    assert "ZeroDivisionError" in scores.messages["fragile"]
    np.testing.assert_array_equal(scores.total, np.float32([1.5, 0.0, 1.0, 0.25]))
    assert scores.num_unscored == 1


def test_a_function_cannot_change_the_lists_of_the_next() -> None:
    def vandal(completions: list[str], answers: list[str]) -> list[float]:
        answers[:] = ["0"] * len(answers)
        return [0.0] * len(completions)

    scores = scorer(vandal, "accuracy_reward").score([GOOD], ["42"], {})
    np.testing.assert_array_equal(scores.total, [1.0])


def too_short(completions: list[str]) -> list[float]:
    return [0.0]


def one_float(completions: list[str]) -> float:
    return 0.0


def texts(completions: list[str]) -> list[str]:
    return ["good"] * len(completions)


def wants_more(completions: list[str], levels: list[int]) -> list[float]:
    return [0.0] * len(completions)


def always_raises(completions: list[str]) -> list[float]:
    raise KeyError("score")


def nothing() -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_short, "returned 1 values for 2 completions"),
        (one_float, "returned a float"),
        (texts, "a list holding a str"),
        (wants_more, "wants 'levels'"),
        (always_raises, "KeyError: 'score'"),
        (nothing, "takes no positional argument"),
    ],
)
def test_the_dry_run_names_function_expected_and_got(function: object, said: str) -> None:
    with pytest.raises(UserError) as caught:
        scorer(function).dry_run(["a", "b", "c"], ["1", "2", "3"], {"level": [1, 2, 3]})
    assert said in str(caught.value)
    assert f"reward function {function.__name__}" in str(caught.value)  # type: ignore[attr-defined]


def test_the_dry_run_lets_good_functions_pass() -> None:
    def picky(completions: list[str]) -> list[float]:
        return [1.0 / (text == "a") for text in completions]

    scorer("accuracy_reward", "format_reward", picky).dry_run(["a", "b"], ["1", "2"], {})


@pytest.mark.parametrize(
    ("functions", "weights", "said"),
    [
        ([], None, "no reward function"),
        (["format_reward"], [1.0, 2.0], "verifier_weight"),
        (["format_reward"], [math.nan], "finite"),
        (["format_reward", "format_reward"], None, "same name"),
    ],
)
def test_impossible_scorers_are_refused(
    functions: list[str], weights: list[float] | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        scorer(*functions, weights=weights)
