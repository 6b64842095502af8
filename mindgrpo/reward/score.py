"""Scores completions with several rewards and adds them up with weights.

A reward is called as `reward(completions, answers=..., **columns)` with the columns that its
signature accepts. None means "does not apply". An exception, a wrong length or type and a number
that is not finite are errors: the samples are scored one at a time to find the bad ones, which are
counted under the reward's name and left out of the sum. Refuses to let any of them become a 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.reward.call import (
    CONTRACT,
    BadResult,
    Columns,
    Samples,
    call_reward,
    check_signature,
)
from mindgrpo.reward.load import WHERE, RewardFunction, describe

LARGEST = float(np.finfo(np.float32).max)  # totals are float32


@dataclass(frozen=True)
class Scores:
    """`per_function` holds nan where a reward did not apply or failed; `total` leaves those out."""

    per_function: dict[str, np.ndarray]
    errors: dict[str, int]
    total: np.ndarray
    messages: dict[str, str] = field(default_factory=dict)

    @property
    def num_unscored(self) -> int:
        """Samples for which no reward gave a number: their total of 0 says nothing."""
        return int(np.isnan(np.stack(list(self.per_function.values()))).all(axis=0).sum())

    def with_replaced(self, places: Sequence[int], fresh: Scores) -> Scores:
        """`fresh`'s samples at `places`, in order; failures of the samples that were there stay counted."""
        total = self.total.copy()
        total[list(places)] = fresh.total
        per_function = {name: values.copy() for name, values in self.per_function.items()}
        for name, values in fresh.per_function.items():
            per_function[name][list(places)] = values
        errors = {name: count + fresh.errors[name] for name, count in self.errors.items()}
        return Scores(per_function, errors, total, {**fresh.messages, **self.messages})


class Scorer:
    def __init__(
        self, functions: Sequence[RewardFunction], weights: Sequence[float] | None = None
    ) -> None:
        names = [function.name for function in functions]
        self.functions = list(functions)
        self.weights = [1.0] * len(names) if weights is None else [float(w) for w in weights]
        if not names:
            raise UserError(f"there is no reward function; name at least one in {WHERE}")
        if len(set(names)) < len(names):
            raise UserError(
                f"two reward functions have the same name among {', '.join(names)}; their scores "
                f"are reported by name, so rename one ({WHERE})"
            )
        if len(self.weights) != len(names):
            raise UserError(
                f"{len(self.weights)} weights were given for {len(names)} reward functions "
                f"({', '.join(names)}); give one each in reward_config.verifier_weight"
            )
        if not all(math.isfinite(weight) for weight in self.weights):
            raise UserError(
                f"the weights {self.weights} must be finite (reward_config.verifier_weight)"
            )

    def dry_run(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> None:
        """Two samples through every function; what would fail on every step fails here."""
        few = Samples(list(completions), list(answers), columns).part(0, 2)
        for function in self.functions:
            check_signature(function, columns)
            try:
                call_reward(function, few)
            except BadResult as error:
                raise UserError(
                    f"reward function {function.name} returned {error} where "
                    f"{len(few)} completions were given; it must return {CONTRACT} ({WHERE})"
                ) from error
            except (Exception, SystemExit) as error:  # the user's own code
                if all(score_one(function, few, place)[1] for place in range(len(few))):
                    raise UserError(
                        f"reward function {function.name} fails on each of {len(few)} samples: "
                        f"{describe(error)}; it must return {CONTRACT} ({WHERE})"
                    ) from error

    def score(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> Scores:
        samples = Samples(list(completions), list(answers), columns)
        total = np.zeros(len(samples), dtype=np.float64)
        per_function, errors, messages = {}, {}, {}
        for function, weight in zip(self.functions, self.weights, strict=True):
            values, failures = score_function(function, samples)
            per_function[function.name] = values
            errors[function.name] = len(failures)
            if failures:
                messages[function.name] = failures[0]
            total += weight * np.nan_to_num(values, nan=0.0)
        return Scores(per_function, errors, total.astype(np.float32), messages)


def score_function(function: RewardFunction, samples: Samples) -> tuple[np.ndarray, list[str]]:
    """The values, and a message for each sample that has none because the function failed."""
    try:
        values = call_reward(function, samples)
        suspects = [place for place, value in enumerate(values) if not_finite(value)]
    except (Exception, SystemExit):  # the user's own code; found out sample by sample
        values = [None] * len(samples)
        suspects = list(range(len(samples)))
    failures = []
    for place in suspects:
        values[place], message = score_one(function, samples, place)
        if message:
            failures.append(message)
    numbers = [math.nan if value is None else value for value in values]
    return np.array(numbers, dtype=np.float64), failures


def score_one(function: RewardFunction, samples: Samples, place: int) -> tuple[float | None, str]:
    try:
        value = call_reward(function, samples.part(place, place + 1))[0]
    except BadResult as error:
        return None, f"returned {error}"
    except (Exception, SystemExit) as error:  # the user's own code
        return None, describe(error)
    if not_finite(value):
        return None, f"returned {value}"
    return value, ""


def not_finite(value: float | None) -> bool:
    return value is not None and not abs(value) <= LARGEST
