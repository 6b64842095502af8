"""The first number of a step that is not finite, by the name of what it belongs to.

Pure. Refuses to repair: a number that is not finite is told as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindgrpo.algorithm.types import Samples


@dataclass(frozen=True)
class NonFinite:
    """`name` in a user's words; `sample` (and `token`, both from 0) where it is a sample's; `value` nan or +-inf."""

    name: str
    value: float
    sample: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        where = "" if self.sample is None else f" of sample {self.sample}"
        where += "" if self.token is None else f", token {self.token}"
        return f"{self.name}{where}: {self.value}"


class NotFinite(RuntimeError):
    """Nothing was changed for the sake of what `rank` found: the same on every rank."""

    def __init__(self, found: NonFinite, rank: int, done: str) -> None:
        super().__init__(f"{found}; {done}")
        self.found, self.rank = found, rank


def in_arrays(named: Iterable[tuple[str, np.ndarray | float]]) -> NonFinite | None:
    """Of arrays of any shape."""
    for name, values in named:
        array = np.asarray(values)
        bad = ~np.isfinite(array)
        if bad.any():
            return NonFinite(name, float(array[bad].ravel()[0]))
    return None


def in_rollout(samples: Samples, rewards: np.ndarray) -> NonFinite | None:
    """Of what is known of `samples` before their credit; `rewards` float [samples]."""
    return _first(
        _by_token("the generator's log-probs", samples.generator_logps),
        _by_sample("rewards", rewards),
        _by_token("the reference's log-probs", samples.reference_logps),
        _by_token("the policy's log-probs before its update", samples.old_logps),
    )


def in_logps(logps: Mapping[int, np.ndarray]) -> NonFinite | None:
    """Of the policy's log-probs by sample, float [completion length] each."""
    order = sorted(logps)
    found = _first(_by_token("the policy's log-probs", [logps[i] for i in order]))
    return (
        replace(found, sample=order[found.sample]) if found and found.sample is not None else None
    )


def in_credit(samples: Samples) -> NonFinite | None:
    """Of what pushes the tokens of `samples`."""
    return _first(
        _by_sample("advantages", samples.advantages),
        _by_token("advantages", samples.token_advantages),
        _by_token("factors of the correction for the generator", samples.factors),
    )


def _first(*found: Iterator[NonFinite]) -> NonFinite | None:
    return next((each for several in found for each in several), None)


def _by_sample(name: str, values: np.ndarray) -> Iterator[NonFinite]:
    for i in np.flatnonzero(~np.isfinite(values)).tolist():
        yield NonFinite(name, float(values[i]), i)


def _by_token(name: str, values: Sequence[np.ndarray] | None) -> Iterator[NonFinite]:
    if not values or np.isfinite(np.concatenate(values)).all():
        return
    for sample, tokens in enumerate(values):
        for token in np.flatnonzero(~np.isfinite(tokens)).tolist():
            yield NonFinite(name, float(tokens[token]), sample, token)
