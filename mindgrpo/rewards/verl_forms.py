"""Makes rewards of functions in verl's forms, whose results are numbers, or dicts with the number as `score`.

compute_score(data_source, solution_str, ground_truth, extra_info=None) scores one sample, and
compute_score(data_sources, solution_strs, ground_truths, extra_infos) returns a list with one result a sample.
Forms: https://verl.readthedocs.io/en/latest/preparation/reward_function.html
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from inspect import Parameter
from typing import Any

SOLUTION, GROUND_TRUTH, EXTRA = "solution_str", "ground_truth", "extra_info"
# Parameters of a function that scores a batch, by what they hold of each sample.
OF_BATCH = {f"{name}s": name for name in ("data_source", SOLUTION, GROUND_TRUTH, EXTRA)}
# The column of verl's data sets that holds the ground truth, which need not be text there.
COLUMN = "reward_model"


class BadResult(Exception):
    """A reward returned something else than the contract says."""


def is_verls(call: Callable[..., Any]) -> bool:
    """Says whether a function has one of verl's forms, by its signature."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # it is written in C
        return False
    return SOLUTION in parameters or f"{SOLUTION}s" in parameters


def as_reward(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a reward that calls the function for each completion, or for all, with the columns that it names.

    `ground_truth` is that of the column `reward_model` where rows have it, in its own type, else the gold answer.
    """
    own = inspect.signature(call).parameters
    is_batched = f"{SOLUTION}s" in own
    named = [p for p in own.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    read = {p.name: OF_BATCH.get(p.name, p.name) if is_batched else p.name for p in named}

    @functools.wraps(call)
    def score(completions: list[str], **columns: list[Any]) -> Any:
        values = columns | {SOLUTION: completions}
        if GROUND_TRUTH in columns and COLUMN in columns:
            pairs = zip(columns[COLUMN], columns[GROUND_TRUTH], strict=True)
            values[GROUND_TRUTH] = [_truth(model, gold) for model, gold in pairs]
        values.setdefault(EXTRA, [None] * len(completions))
        passed = {name: values[column] for name, column in read.items() if column in values}
        if is_batched:
            returned = call(**passed)
            return _awaited_list(returned) if inspect.isawaitable(returned) else numbers(returned)
        results = [
            call(**{name: column[index] for name, column in passed.items()})
            for index in range(len(completions))
        ]
        return (
            _awaited_each(results) if any(map(inspect.isawaitable, results)) else numbers(results)
        )

    asked = [
        p.replace(
            name=read[p.name],
            kind=Parameter.KEYWORD_ONLY,
            default=None if read[p.name] == EXTRA else p.default,
        )
        for p in named
        if read[p.name] != SOLUTION
    ]
    columns = [p.name for p in asked]
    if GROUND_TRUTH in columns and COLUMN not in columns:
        asked.append(Parameter(COLUMN, Parameter.KEYWORD_ONLY, default=None))
    first = Parameter("completions", Parameter.POSITIONAL_OR_KEYWORD)
    score.__signature__ = inspect.Signature([first, *asked])  # type: ignore[attr-defined]
    return score


def _truth(model: Any, gold: Any) -> Any:
    return model.get(GROUND_TRUTH, gold) if isinstance(model, dict) else gold


async def _awaited_list(returned: Awaitable[Any]) -> Any:
    return numbers(await returned)


async def _awaited_each(results: list[Awaitable[Any]]) -> Any:
    import asyncio  # takes as long to import as the rest of this room

    return numbers(await asyncio.gather(*results))


def numbers(results: Any) -> Any:
    """Returns the number of each result; what is no list, as it is. Raises BadResult."""
    return [_number(result) for result in results] if isinstance(results, list | tuple) else results


def _number(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    if "score" not in result:
        raise BadResult(f"a dict without 'score' (its keys are {', '.join(map(str, result))})")
    return result["score"]
