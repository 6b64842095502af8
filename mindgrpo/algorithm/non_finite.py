"""Finds the first non-finite number of a step and names its source. Pure; nothing is repaired."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.sample import Arrays, Rollout, TrainBatch


@dataclass(frozen=True)
class NonFinite:
    """A non-finite `value` in the quantity `name`, of `sample` and `token` (from 0) if it belongs to any."""

    name: str
    value: float
    sample: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        where = "" if self.sample is None else f" of sample {self.sample}"
        where += "" if self.token is None else f", token {self.token}"
        return f"{self.name}{where}: {self.value}"


class NonFiniteUpdate(RuntimeError):
    """Raised on every rank, instead of an update, if `rank` has a non-finite number."""

    def __init__(self, number: NonFinite, rank: int) -> None:
        super().__init__(f"{number}; the update was not made")
        self.number, self.rank = number, rank


def in_arrays(named: Iterable[tuple[str, np.ndarray | float]]) -> NonFinite | None:
    """Returns the first non-finite number in named arrays of any shape, None if there is none."""
    for name, values in named:
        array = np.asarray(values)
        bad = ~np.isfinite(array)
        if bad.any():
            return NonFinite(name, float(array[bad].ravel()[0]))
    return None


def in_rollout(
    rollout: Rollout,
    rewards: np.ndarray,
    reference: Arrays | None,
    old: Arrays | None,
    values: Arrays | None = None,
) -> NonFinite | None:
    """Returns the first non-finite number in the inputs of advantages; `rewards` are float [samples]."""
    return _first(
        _by_token("the generator's log-probs", rollout.generator_logps),
        _by_sample("rewards", rewards),
        _by_token("the reference's log-probs", reference),
        _by_token("the policy's log-probs before its update", old),
        _by_token("the critic's values", values),
    )


def in_logps(logps: Mapping[int, np.ndarray]) -> NonFinite | None:
    """Returns the first non-finite number in the policy's log-probs by sample, float [completion length] each."""
    order = sorted(logps)
    number = _first(_by_token("the policy's log-probs", [logps[i] for i in order]))
    if number is None or number.sample is None:
        return None
    return replace(number, sample=order[number.sample])


def in_batch(batch: TrainBatch) -> NonFinite | None:
    """Returns the first non-finite number in the batch's advantages and importance weights."""
    return _first(
        _by_sample("advantages", batch.advantages),
        _by_token("advantages", batch.token_advantages),
        _by_token("weights of the correction for the generator", batch.rollout_is_weights),
    )


def _first(*searches: Iterator[NonFinite]) -> NonFinite | None:
    return next((number for search in searches for number in search), None)


def _by_sample(name: str, values: np.ndarray) -> Iterator[NonFinite]:
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        yield NonFinite(name, float(values[i]), i)


def _by_token(name: str, values: Arrays | None) -> Iterator[NonFinite]:
    if not values or np.isfinite(np.concatenate(values)).all():
        return
    for sample, tokens in enumerate(values):
        for token in np.flatnonzero(~np.isfinite(tokens)).tolist():
            yield NonFinite(name, float(tokens[token]), sample, token)
