"""Users' functions: what they are given, what they may return, and what their failures cost.

Those given in code are called in this process; what a worker process survives is in test_reward_pool.py.
Does NOT prove that a module which does something at import does it once only.
"""

from __future__ import annotations

import asyncio
import decimal
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.rewards.executors import Limits
from mindgrpo.rewards.score import Scorer
from mindgrpo.rewards.signal_use import watch_signals

GOOD = "<think>12+30=42</think><answer>42</answer>"


@pytest.fixture
def scorer() -> Iterator[Any]:
    """Makes scorers from functions that no other process can find, and closes them."""
    made = []

    def make(*functions: Any, weights: list[float] | None = None, **limits: Any) -> Scorer:
        given = [
            function if isinstance(function, str) else hidden(function) for function in functions
        ]
        made.append(Scorer(given, weights, Limits(**limits), {"max_completion_length": 9}))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def hidden(function: Any) -> Any:
    """In a closure's place, where it stays in this process."""
    function.__qualname__ = f"<locals>.{function.__name__}"
    return function


def test_totals_are_weighted_and_leave_out_what_does_not_apply(scorer: Any) -> None:
    def sometimes(completions: list[str], **_: object) -> list[float | None]:
        return [None if text == "b" else 3.0 for text in completions]

    def length(completions: list[str]) -> np.ndarray:
        return np.array([len(text) for text in completions])

    scores = scorer(sometimes, length, weights=[2.0, 0.5]).score(["a", "b"], ["", ""], {})
    assert scores.total.dtype == np.float32
    np.testing.assert_array_equal(scores.total, [6.5, 0.5])
    np.testing.assert_array_equal(scores.per_function["sometimes"], [3.0, math.nan])
    assert scores.errors == {"sometimes": 0, "length": 0}


def test_only_accepted_columns_are_passed(scorer: Any) -> None:
    seen: dict[str, object] = {}

    def one(completions: list[str], level: list[int], missing: int = 7) -> list[float]:
        seen["one"] = (level, missing)
        return [0.0] * len(completions)

    def every(completions: list[str], **columns: object) -> list[float]:
        seen["every"] = sorted(columns)
        return [0.0] * len(completions)

    scorer(one, every).score(["a", "b"], ["1", "2"], {"level": [3, 4], "topic": ["x", "y"]})
    assert seen == {"one": ([3, 4], 7), "every": ["answers", "level", "topic"]}


def test_functions_written_for_other_programs_get_what_they_name(scorer: Any) -> None:
    seen: dict[str, object] = {}

    def prompts_first(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        seen["prompts_first"] = (prompts, completions, sorted(columns))
        return [0.0] * len(completions)

    def all_by_name(prompts: list[str], **columns: Any) -> list[float]:
        seen["all_by_name"] = (prompts, columns["completions"])
        return [0.0] * len(prompts)

    def other_words(completions: list[str], solution: list[str], answer: list[str]) -> list[float]:
        seen["other_words"] = (solution, answer)
        return [0.0] * len(completions)

    columns = {
        "prompts": ["p", "q"],
        "answer": ["of the data", "too"],
        "completion_ids": [[1], [2]],
    }
    several = scorer(prompts_first, all_by_name, other_words)
    several.dry_run(["a", "b"], ["1", "2"], columns)
    assert several.score(["a", "b"], ["1", "2"], columns).errors == dict.fromkeys(several.names, 0)
    assert seen == {
        "prompts_first": (["p", "q"], ["a", "b"], ["answer", "answers"]),
        "all_by_name": (["p", "q"], ["a", "b"]),
        "other_words": (["1", "2"], ["of the data", "too"]),
    }


def test_facts_and_token_ids_go_to_those_that_name_them(scorer: Any) -> None:
    seen: dict[str, object] = {}

    def asks(
        completions: list[str], max_completion_length: int, completion_ids: Any
    ) -> list[float]:
        seen["asks"] = (max_completion_length, completion_ids)
        return [0.0]

    def takes_all(completions: list[str], **columns: Any) -> list[float]:
        seen["takes_all"] = sorted(columns)
        return [0.0]

    scorer(asks, takes_all).score(["a"], ["1"], {"completion_ids": [[1, 2]], "level": [3]})
    assert seen == {"asks": (9, [[1, 2]]), "takes_all": ["answers", "level"]}


class Rising:
    """A reward with a memory."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, completions: list[str]) -> list[int]:
        self.calls += 1
        return [self.calls] * len(completions)


def test_an_object_given_in_code_keeps_what_it_knows(scorer: Any) -> None:
    rising = Rising()
    rising.__dict__["__name__"] = "rising"
    given = Scorer([rising], None, Limits())
    assert [given.score(["a"], [""], {}).total.item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert rising.calls == 3
    given.close()


def test_async_functions_are_awaited_inside_a_running_loop_too(scorer: Any) -> None:
    async def slow(completions: list[str], answers: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def caller() -> np.ndarray:
        return scorer(slow).score(["a"], ["b"], {}).total

    np.testing.assert_array_equal(scorer(slow).score(["a"], ["b"], {}).total, [1.0])
    np.testing.assert_array_equal(asyncio.run(caller()), [1.0])


def test_a_failing_sample_costs_only_itself(scorer: Any) -> None:
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


def test_arrays_and_scalars_of_other_libraries_are_numbers(scorer: Any) -> None:
    class Tensor:
        def __init__(self, values: Any) -> None:
            self.tolist = self.item = lambda: values

    def tensor(completions: list[str]) -> Tensor:
        return Tensor([1.5, 2])

    def scalars(completions: list[str]) -> list[Any]:
        return [np.float32(0.5), Tensor(True)]

    scores = scorer(tensor, scalars).score(["a", "b"], ["", ""], {})
    np.testing.assert_array_equal(scores.total, [2.0, 3.0])


def test_a_callable_that_does_not_come_back_is_given_up_and_asked_again_later(scorer: Any) -> None:
    released = threading.Event()

    def slow(completions: list[str]) -> list[float]:
        released.wait()
        return [1.0] * len(completions)

    given = scorer(slow, "format_reward", deadline=2.0)
    first = given.score(["a"], [""], {})
    second = given.score([GOOD], [""], {})
    assert first.metrics()["reward/slow/timeouts"] == second.metrics()["reward/slow/timeouts"] == 1
    assert "cannot be ended" in first.messages["slow"]
    assert "still busy" in second.messages["slow"]
    assert second.per_function["format_reward"].tolist() == [1.0]
    released.set()
    while "slow" in (third := given.score(["a"], [""], {})).messages:
        assert "still busy" in third.messages["slow"]
    assert third.per_function["slow"].tolist() == [1.0]


def test_a_failed_sample_has_its_groups_mean_as_total(scorer: Any) -> None:
    def fragile(completions: list[str]) -> list[float]:
        return [float(text) for text in completions]

    texts = ["1", "x", "3", "4", "x", "x"]
    scores = scorer(fragile, "format_reward").score(texts, [""] * 6, {})
    assert scores.failed.tolist() == [False, True, False, False, True, True]
    filled = scores.filled([0, 0, 0, 1, 1, 2])
    assert filled.total[:5].tolist() == [1.0, 2.0, 3.0, 4.0, 4.0]
    # Of its group nothing is known.
    assert filled.total[5] == pytest.approx((1 + 3 + 4) / 3)
    assert filled.known_totals.tolist() == [1.0, 3.0, 4.0]
    fresh = scorer("format_reward", fragile).score(["8"], [""], {})
    replaced = scores.with_replaced([4], fresh)
    assert (replaced.total[4], replaced.failed[4], replaced.errors["fragile"]) == (8.0, False, 3)


def test_a_function_cannot_change_the_lists_of_the_next(scorer: Any) -> None:
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
def test_the_dry_run_names_function_expected_and_got(
    scorer: Any, function: object, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        scorer(function).dry_run(["a", "b", "c"], ["1", "2", "3"], {"level": [1, 2, 3]})
    assert said in str(caught.value)
    assert f"reward function {function.__name__}" in str(caught.value)  # type: ignore[attr-defined]


def test_the_dry_run_lets_good_functions_pass(scorer: Any) -> None:
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
    scorer: Any, functions: list[str], weights: list[float] | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        scorer(*functions, weights=weights)


def sets_a_handler(text: str) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)


def sets_an_alarm(text: str) -> None:
    signal.alarm(5)


def sets_a_timer(text: str) -> None:
    signal.setitimer(signal.ITIMER_REAL, 5.0)


@each_row("uses", [sets_a_handler, sets_an_alarm, sets_a_timer])
def test_a_function_of_the_main_program_that_uses_signals_is_refused_even_if_it_hides_it(
    scorer: Any, uses: Any
) -> None:
    def verified(completions: list[str]) -> list[float]:
        scores = []
        for text in completions:
            try:
                if text != "no answer":
                    uses(text)
                scores.append(1.0)
            except Exception:
                scores.append(0.0)
        return scores

    given = scorer(verified)
    with pytest.raises(
        UserError, match=rf"verified calls signal\.\w+ at {__file__}:\d+.*put it into a"
    ):
        given.dry_run(["a", "b"], ["", ""], {})
    # Where the trial did not show it, it costs the samples that meet it, and is no reward of 0.
    scores = given.score(["no answer", "a"], ["", ""], {})
    np.testing.assert_array_equal(scores.per_function["verified"], [1.0, math.nan])
    assert "put it into a module" in scores.messages["verified"]
    # Elsewhere signals do what they did.
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.signal(signal.SIGUSR1, before) == signal.SIG_IGN


def test_a_main_program_that_imports_signals_by_name_is_refused_too(
    scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "set_alarm", signal.alarm, raising=False)
    watch_signals.cache_clear()

    def hides(completions: list[str]) -> list[float]:
        with suppress(ValueError):
            main.set_alarm(5)  # type: ignore[attr-defined]
        return [0.0] * len(completions)

    with pytest.raises(UserError, match="hides calls signal.alarm"):
        scorer(hides).dry_run(["a", "b"], ["", ""], {})


def test_a_function_of_the_main_program_finds_an_event_loop_and_its_programs_precision(
    scorer: Any,
) -> None:
    def conditions(completions: list[str]) -> list[float]:
        asyncio.get_event_loop().run_until_complete(asyncio.sleep(0))
        return [float(decimal.getcontext().prec)] * len(completions)

    with decimal.localcontext() as context:
        context.prec = 77
        given = scorer(conditions)
    assert given.score(["a"], [""], {}).total.tolist() == [77.0]


def test_where_every_function_returned_none_no_reward_is_known(scorer: Any) -> None:
    def none(completions: list[str]) -> list[None]:
        return [None] * len(completions)

    def half(completions: list[str]) -> list[float | None]:
        return [None, 3.0]

    assert scorer(none).score(["a", "b"], ["", ""], {}).known_totals.tolist() == []
    assert scorer(none, half).score(["a", "b"], ["", ""], {}).known_totals.tolist() == [3.0]


def test_the_first_cause_is_told_with_the_last(scorer: Any) -> None:
    def exhausts(completions: list[str]) -> list[float]:
        raise RuntimeError("can't start new thread" if len(completions) > 1 else "timed out")

    scores = scorer(exhausts).score(["a", "b"], ["", ""], {})
    assert "2 raised: RuntimeError: timed out" in scores.messages["exhausts"]
    assert "one call for all samples: RuntimeError: can't start new" in scores.messages["exhausts"]
    with pytest.raises(UserError, match="timed out.*can't start new thread.*correct the function"):
        scorer(exhausts).dry_run(["a", "b"], ["", ""], {})
