"""Makes rewards of functions in verl's form, which score one sample: compute_score(data_source, solution_str,
ground_truth, extra_info=None) returns a number, or a dict with the number as `score`.

Form: https://verl.readthedocs.io/en/latest/preparation/reward_function.html
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from inspect import Parameter
from typing import Any

SOLUTION, GROUND_TRUTH, EXTRA = "solution_str", "ground_truth", "extra_info"
# The column of verl's data sets that holds the ground truth, which need not be text there.
COLUMN = "reward_model"


class BadResult(Exception):
    """A reward returned something else than the contract says."""


def scores_one_sample(call: Callable[..., Any]) -> bool:
    """Says whether a function has verl's form, by its signature."""
    try:
        return SOLUTION in inspect.signature(call).parameters
    except (TypeError, ValueError):  # it is written in C
        return False


def one_by_one(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a reward that calls the function for each completion, with the columns that it names.

    `ground_truth` is that of the column `reward_model` where rows have it, in its own type, else the gold answer.
    """
    own = inspect.signature(call).parameters
    named = [p for p in own.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    @functools.wraps(call)
    def score(completions: list[str], **columns: list[Any]) -> Any:
        models = columns.pop(COLUMN, None)
        results = []
        for index, completion in enumerate(completions):
            arguments = {name: values[index] for name, values in columns.items()}
            if models is not None and isinstance(models[index], dict):
                arguments |= {k: v for k, v in models[index].items() if k == GROUND_TRUTH}
            if EXTRA in own:
                arguments.setdefault(EXTRA, None)
            results.append(call(**{SOLUTION: completion}, **arguments))
        if any(map(inspect.isawaitable, results)):
            return awaited(results)
        return [number_of(result) for result in results]

    kinds = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in named if p.name != SOLUTION]
    columns = [p.replace(default=None) if p.name == EXTRA else p for p in kinds]
    if GROUND_TRUTH in own and COLUMN not in own:
        columns.append(Parameter(COLUMN, Parameter.KEYWORD_ONLY, default=None))
    first = Parameter("completions", Parameter.POSITIONAL_OR_KEYWORD)
    score.__signature__ = inspect.Signature([first, *columns])  # type: ignore[attr-defined]
    return score


async def awaited(results: list[Awaitable[Any]]) -> list[Any]:
    import asyncio  # takes as long to import as the rest of this room

    return [number_of(result) for result in await asyncio.gather(*results)]


def number_of(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    if "score" not in result:
        raise BadResult(f"a dict without 'score' (its keys are {', '.join(map(str, result))})")
    return result["score"]
