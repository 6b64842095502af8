"""Scores completions with several rewards and adds them up with weights.

A reward is called as `reward(completions, answers=..., **columns)` with the columns that its signature
accepts. None means "does not apply". Files, modules and slow built-ins are scored in worker processes,
quick built-ins in place, what is given in code in a thread unless its module and name lead to it.
Refuses to let a failure become a 0: it is counted under the function's name and left out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.reward.builtin import BUILTINS
from mindgrpo.reward.call import CONTRACT, Columns, Samples, Signature
from mindgrpo.reward.lanes import DirectLane, Lane, ThreadLane, run_all, wait_for_any
from mindgrpo.reward.limits import Limits
from mindgrpo.reward.load import from_callable, resolve
from mindgrpo.reward.outcome import BAD_RESULT, REFUSED, Tally
from mindgrpo.reward.spec import WHERE, Spec, parse, reference_to
from mindgrpo.reward.workers.pool import Pool
from mindgrpo.reward.workers.process_lane import ProcessLane

Given = str | Callable[..., Any]


@dataclass(frozen=True)
class Scores:
    """`per_function` float64 [samples] holds nan where a reward did not apply or failed; `total`
    float32 [samples] leaves those out. `tallies` say what became of each function's samples."""

    per_function: dict[str, np.ndarray]
    total: np.ndarray
    tallies: dict[str, Tally] = field(default_factory=dict)

    @property
    def errors(self) -> dict[str, int]:
        """Failed samples by function."""
        return {name: len(tally.failures) for name, tally in self.tallies.items()}

    @property
    def messages(self) -> dict[str, str]:
        """One line for each function that failed, or that had to be called a second time."""
        lines = {name: tally.in_one_line() for name, tally in self.tallies.items()}
        return {name: line for name, line in lines.items() if line}

    @property
    def failed(self) -> np.ndarray:
        """bool [samples]: some reward failed, so `total` lacks its part."""
        mask = np.zeros(len(self.total), bool)
        for tally in self.tallies.values():
            mask[list(tally.failures)] = True
        return mask

    @property
    def num_unscored(self) -> int:
        """Samples for which no reward gave a number: their total of 0 says nothing."""
        return int(np.isnan(np.stack(list(self.per_function.values()))).all(axis=0).sum())

    def figures(self) -> dict[str, float | int | None]:
        """reward/<function>/mean (None where it scored nothing), its failures by kind, and seconds."""
        figures: dict[str, float | int | None] = {}
        for name, values in self.per_function.items():
            given, tally = values[~np.isnan(values)], self.tallies.get(name, Tally())
            figures[f"reward/{name}/mean"] = float(given.mean()) if given.size else None
            figures |= {f"reward/{name}/{kind}": count for kind, count in tally.counts().items()}
            figures[f"reward/{name}/seconds"] = tally.seconds
        return figures

    def means(self) -> dict[str, float | None]:
        given = {name: values[~np.isnan(values)] for name, values in self.per_function.items()}
        return {name: float(v.mean()) if v.size else None for name, v in given.items()}


class Scorer:
    """Starts its worker processes at once, so that they load while other things do; see `dry_run`.

    `facts` are passed to functions that name them, as max_completion_length. Raises UserError.
    """

    def __init__(
        self,
        functions: Sequence[Given],
        weights: Sequence[float] | None = None,
        limits: Limits | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self.facts = dict(facts or {})
        sources = [source_of(function) for function in functions]
        self.names = [name for name, _ in sources]
        self.weights = check_weights(self.names, weights)
        self._pool = Pool(self._limits.memory)
        self._lanes: dict[str, list[Lane]] = {}
        try:
            for name, source in sources:
                self._lanes[name] = self._lanes_of(source)
        except BaseException:
            self.close()
            raise

    def _lanes_of(self, source: Spec | Callable[..., Any]) -> list[Lane]:
        if not isinstance(source, Spec):
            return [ThreadLane(from_callable(source), self._limits)]
        if not source.source and BUILTINS[source.name].quick:
            return [DirectLane(resolve(source))]
        one_by_one = not source.source
        return [
            ProcessLane(source, self._pool, self._limits, one_by_one)
            for _ in range(self._limits.workers)
        ]

    def dry_run(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> None:
        """Two samples through every function; what would fail on every step fails here.

        Waits for functions that are still loading. Raises UserError.
        """
        few = Samples(list(completions), list(answers), columns, self.facts).part(range(2))
        for name in self.names:
            self._signature(name).check(name, few)
        firsts = {name: lanes[0] for name, lanes in self._lanes.items()}
        for lane in firsts.values():
            lane.begin(few, range(len(few)))
        run_all(list(firsts.values()))
        for name, lane in firsts.items():
            refuse_what_cannot_work(name, lane.tally, len(few))

    def _signature(self, name: str) -> Signature:
        lane = self._lanes[name][0]
        while True:
            signature = lane.signature()
            if signature is not None:
                return signature
            wait_for_any([lane])

    def score(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> Scores:
        """Never raises for what a function does, and is back soon after the deadline whatever that is."""
        samples = Samples(list(completions), list(answers), columns, self.facts)
        lanes = [lane for several in self._lanes.values() for lane in several]
        for several in self._lanes.values():
            shares = np.array_split(np.arange(len(samples)), len(several))
            for lane, share in zip(several, shares, strict=True):
                lane.begin(samples, share.tolist())
        run_all(lanes)
        tallies = {name: added_up(several) for name, several in self._lanes.items()}
        per_function = {name: values_of(tally, len(samples)) for name, tally in tallies.items()}
        total = np.zeros(len(samples), dtype=np.float64)
        for name, weight in zip(self.names, self.weights, strict=True):
            total += weight * np.nan_to_num(per_function[name], nan=0.0)
        return Scores(per_function, total.astype(np.float32), tallies)

    def close(self) -> None:
        """Ends the worker processes and whatever they started."""
        for several in self._lanes.values():
            for lane in several:
                lane.close()
        self._pool.close()


def source_of(given: Given) -> tuple[str, Spec | Callable[..., Any]]:
    """The name that a function is reported under, and where it is."""
    if isinstance(given, str):
        spec = parse(given)
        return spec.name, spec
    reference = reference_to(given)
    if reference is not None:
        return reference.name, reference
    return from_callable_name(given), given


def from_callable_name(given: Callable[..., Any]) -> str:
    return str(getattr(given, "__name__", type(given).__name__))


def check_weights(names: Sequence[str], given: Sequence[float] | None) -> list[float]:
    weights = [1.0] * len(names) if given is None else [float(weight) for weight in given]
    if not names:
        raise UserError(f"there is no reward function; name at least one in {WHERE}")
    if len(set(names)) < len(names):
        raise UserError(
            f"two reward functions have the same name among {', '.join(names)}; their scores "
            f"are reported by name, so rename one ({WHERE})"
        )
    if len(weights) != len(names):
        raise UserError(
            f"{len(weights)} weights were given for {len(names)} reward functions "
            f"({', '.join(names)}); give one each in reward_config.verifier_weight"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"the weights {weights} must be finite (reward_config.verifier_weight)")
    return weights


def refuse_what_cannot_work(name: str, tally: Tally, num_samples: int) -> None:
    whole, failures = tally.whole, list(tally.failures.values())
    for failure in [*([whole] if whole else []), *failures]:
        if failure.kind == REFUSED:
            raise UserError(failure.message)
    if whole is not None and whole.kind == BAD_RESULT:
        raise UserError(
            f"reward function {name} {whole.message} where {num_samples} completions were given; it "
            f"must return {CONTRACT} ({WHERE})"
        )
    if len(failures) == num_samples:
        raise UserError(
            f"reward function {name} fails on each of {num_samples} samples: {failures[0].message}; "
            f"it must return {CONTRACT} ({WHERE})"
        )


def added_up(lanes: Sequence[Lane]) -> Tally:
    tally = replace(lanes[0].tally)
    for lane in lanes[1:]:
        tally.add(lane.tally)
    return tally


def values_of(tally: Tally, num_samples: int) -> np.ndarray:
    values = np.full(num_samples, math.nan)
    for place, value in tally.values.items():
        values[place] = math.nan if value is None else value
    return values
