"""Functions written for other trainers: verl's forms, and TRL's, which may read prompts and completions as messages.

They are called in this process. Does NOT prove when a run passes messages: test_reward_in_a_run.py does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.rewards.score import Scorer

GOOD = "<think>12+30=42</think><answer>42</answer>"


@pytest.fixture
def scorer() -> Iterator[Any]:
    """Makes scorers from functions that stay in this process, and closes them."""
    made = []

    def make(*functions: Any) -> Scorer:
        for function in functions:
            if not isinstance(function, str):
                function.__qualname__ = f"<locals>.{function.__name__}"
        made.append(Scorer(functions))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


VERL_FORMS: dict[str, Any] = {}


def verl_form(function: Any) -> Any:
    VERL_FORMS[function.__name__] = function
    return function


@verl_form
def a_number(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
    return len(data_source) + (solution_str == ground_truth)


@verl_form
def a_dict(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
    return {"score": a_number(data_source, solution_str, ground_truth), "acc": extra_info}


@verl_form
def few_arguments(solution_str: str, ground_truth: str, method: str = "strict") -> Any:
    assert method == "strict"
    return 4 + (solution_str == ground_truth)


@verl_form
async def a_coroutine(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> Any:
    return {"score": a_number(data_source, solution_str, ground_truth)}


@pytest.mark.parametrize("form", VERL_FORMS)
def test_a_function_in_verls_form_scores_like_a_reward(scorer: Any, form: str) -> None:
    columns = {"data_source": ["sums", "gsm8k"]}
    scores = scorer(VERL_FORMS[form]).score(["42", "7"], ["42", "8"], columns)
    assert scores.errors == {form: 0}, scores.messages
    np.testing.assert_array_equal(scores.total, [5, 4 if form == "few_arguments" else 5])


def test_what_a_function_in_verls_form_does_wrong_costs_its_sample(scorer: Any) -> None:
    def raises(solution_str: str, ground_truth: str) -> float:
        return 1 / len(solution_str)

    def other(solution_str: str, ground_truth: str) -> dict[str, float]:
        return {"acc": 1.0}

    scores = scorer(raises, other).score(["", "ab"], ["", ""], {})
    np.testing.assert_array_equal(scores.per_function["raises"], [math.nan, 0.5])
    with pytest.raises(UserError, match="other returned a dict without 'score' .its keys are acc"):
        scorer(other).dry_run(["a", "b"], ["", ""], {})
    with pytest.raises(UserError, match="a_number wants 'data_source', which the data does not"):
        scorer(a_number).dry_run(["a", "b"], ["", ""], {})


async def awaited(returned: Any) -> Any:
    return returned


@each_row(
    "makes", [list, tuple, lambda scores: awaited(list(scores)), lambda scores: np.array([*scores])]
)
def test_a_function_in_verls_batched_form_scores_like_a_reward(scorer: Any, makes: Any) -> None:
    calls = []

    def compute_score(
        data_sources: Any,
        solution_strs: Any,
        ground_truths: Any,
        extra_infos: Any,
        weight: float = 2.0,
    ) -> Any:
        calls.append((data_sources, solution_strs, ground_truths, extra_infos))
        pairs = zip(solution_strs, ground_truths, strict=True)
        return makes(weight * (text == gold) for text, gold in pairs)

    columns = {"data_source": ["sums", "gsm8k"], "reward_model": [{"ground_truth": 7}, None]}
    given = scorer(compute_score)
    given.dry_run(["7", "8"], ["7", "8"], columns)
    scores = given.score(["7", "8"], ["7", "8"], columns)
    np.testing.assert_array_equal(scores.total, [0.0, 2.0])  # 7 is no text there
    assert calls[-1] == (["sums", "gsm8k"], ["7", "8"], [7, "8"], [None, None])


def test_a_batch_in_verls_form_may_hold_dicts_and_costs_the_samples_that_fail(scorer: Any) -> None:
    def compute_score(solution_strs: list[str], ground_truths: list[str]) -> Any:
        return [{"score": 1 / len(text), "acc": True} for text in solution_strs]

    scores = scorer(compute_score).score(["", "ab"], ["", ""], {})
    np.testing.assert_array_equal(scores.per_function["compute_score"], [math.nan, 0.5])

    def other(solution_strs: list[str]) -> Any:
        return [{"acc": 1.0} for _ in solution_strs]

    with pytest.raises(UserError, match="other returned a dict without 'score'"):
        scorer(other).dry_run(["a", "b"], ["", ""], {})


def as_messages(*texts: str) -> dict[str, Any]:
    return {
        "prompts": [[{"role": "user", "content": f"{text}?"}] for text in texts],
        "completions": [[{"role": "assistant", "content": text}] for text in texts],
    }


def test_functions_of_users_read_messages_where_these_are_passed_and_all_others_texts(
    scorer: Any,
) -> None:
    seen: dict[str, Any] = {}

    def as_in_trl(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        seen["as_in_trl"] = [prompts[0][-1]["content"], columns["level"]]
        contents = [completion[0]["content"] for completion in completions]
        completions[0][0]["content"] = prompts[0][0]["content"] = "changed"
        return [float(len(content)) for content in contents]

    def positional(given: Any) -> list[float]:
        return [float(completion[-1]["role"] == "assistant") for completion in given]

    def one_by_one(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == ground_truth)

    texts, columns = [GOOD, "42"], {"prompts": ["p", "q"], "level": [1, 2]}
    given = scorer(as_in_trl, positional, one_by_one, "accuracy_reward")
    messages = as_messages(*texts)
    given.dry_run(texts, ["42", "42"], columns, "", messages)
    scores = given.score(texts, ["42", "42"], columns, messages)
    assert scores.errors == dict.fromkeys(given.names, 0), scores.messages
    by_function = {name: values.tolist() for name, values in scores.per_function.items()}
    assert by_function == {
        "as_in_trl": [len(GOOD), 2.0],
        "positional": [1.0, 1.0],
        "one_by_one": [0.0, 1.0],
        "accuracy_reward": [1.0, 1.0],
    }
    assert seen == {"as_in_trl": [f"{GOOD}?", [1, 2]]}
    assert messages == as_messages(*texts)


def reads_content(completions: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def reads_by_get(completions: Any) -> list[float]:
    return [float(len(completion[0].get("content"))) for completion in completions]


def reads_prompts(prompts: Any, completions: Any) -> list[float]:
    return [float(len(prompt[-1]["content"])) for prompt in prompts]


def searches(completions: Any) -> list[float]:
    return [float(bool(re.search("a", completion))) for completion in completions]


def strips(completions: Any) -> list[float]:
    return [float(len(completion.strip())) for completion in completions]


@each_row(
    "function, messages, said",
    [
        *(
            (function, {}, "are texts here: set reward_config.completions to messages")
            for function in (reads_content, reads_by_get, reads_prompts)
        ),
        *(
            (function, as_messages("a", "b"), "or set reward_config.completions to text")
            for function in (searches, strips)
        ),
    ],
)
def test_a_function_that_reads_the_other_form_is_told_the_key(
    scorer: Any, function: Any, messages: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        scorer(function).dry_run(["a", "b"], ["", ""], {"prompts": ["p", "q"]}, "", messages)
