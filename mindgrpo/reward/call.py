"""One call of a reward: which arguments it takes, and whether what it returns keeps the contract.

Passes the completions first, `answers` and columns by name and only if the signature accepts them.
Refuses a parameter that nothing can fill, and a result that is not one number or None a sample.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.reward.load import WHERE, RewardFunction

Columns = Mapping[str, Sequence[Any]]
CONTRACT = "a list with one float or None for each completion"
NUMBER_TYPES = (bool, int, float, np.bool_, np.integer, np.floating)
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class BadResult(Exception):
    """A reward returned something else than the contract says."""


@dataclass(frozen=True)
class Samples:
    completions: list[str]
    answers: list[str]
    columns: Columns

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self.columns.items()}
        lengths["answers"] = len(self.answers)
        assert set(lengths.values()) == {len(self)}, (len(self), lengths)

    def __len__(self) -> int:
        return len(self.completions)

    def part(self, start: int, stop: int) -> Samples:
        columns = {name: list(values[start:stop]) for name, values in self.columns.items()}
        return Samples(self.completions[start:stop], self.answers[start:stop], columns)


def check_signature(function: RewardFunction, columns: Columns) -> None:
    parameters = parameters_of(function.call)
    if parameters is None:
        return
    if not parameters or parameters[0].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise UserError(
            f"reward function {function.name} takes no positional argument; it is called as "
            f"reward(completions, answers, **columns) ({WHERE})"
        )
    offered = ("answers", *columns)
    for parameter in parameters[1:]:
        required = parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC
        unnameable = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        if required and (unnameable or parameter.name not in offered):
            raise UserError(
                f"reward function {function.name} wants {parameter.name!r}, which the data does "
                f"not have (it has {', '.join(offered)}); add the column to the data set or give "
                f"the parameter a default ({WHERE})"
            )


def call_reward(function: RewardFunction, samples: Samples) -> list[float | None]:
    """Raises BadResult, or whatever the user's function raises."""
    parameters = parameters_of(function.call)
    # Copies: a function that changes its lists must not change them for the next one.
    offered = {"answers": list(samples.answers)}
    offered |= {
        name: list(values) for name, values in samples.columns.items() if name != "completions"
    }
    named = {name: offered[name] for name in accepted(parameters, offered)}
    returned = function.call(list(samples.completions), **named)
    if inspect.isawaitable(returned):
        returned = finish(returned)
    return checked(returned, len(samples))


def parameters_of(call: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """None where Python cannot tell, as for some built-in callables."""
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return None


def accepted(parameters: list[inspect.Parameter] | None, offered: Columns) -> list[str]:
    if parameters is None:
        return ["answers"]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        first = parameters[0].name
        return [name for name in offered if name != first]
    return [parameter.name for parameter in parameters[1:] if parameter.name in offered]


def finish(waiting: Awaitable[Any]) -> Any:
    """In a thread of its own, because the caller's may run an event loop already."""

    async def wait() -> Any:
        return await waiting

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def checked(returned: object, num_samples: int) -> list[float | None]:
    if isinstance(returned, np.ndarray):
        returned = list(returned)
    if not isinstance(returned, list | tuple):
        raise BadResult(f"a {type(returned).__name__}")
    if len(returned) != num_samples:
        raise BadResult(f"{len(returned)} values for {num_samples} completions")
    for value in returned:
        if value is not None and not isinstance(value, NUMBER_TYPES):
            raise BadResult(f"a list holding a {type(value).__name__}")
    return [None if value is None else as_float(value) for value in returned]


def as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return math.inf
