"""Scores completions with several rewards and adds them up with weights.

A reward is called as `reward(completions, answers=..., **columns)` with the columns that its signature
accepts. None means "does not apply". Files, modules and slow built-ins are scored in worker processes,
quick built-ins in place, what is given in code in a thread unless its module and name lead to it.
Refuses to let a failure become a 0: it is counted under the function's name and left out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.rewards.builtin import BUILTINS
from mindgrpo.rewards.call import (
    CONTRACT,
    Columns,
    Samples,
    Signature,
)
from mindgrpo.rewards.lanes import (
    DirectLane,
    Lane,
    ThreadLane,
    run_all,
    wait_for_any,
)
from mindgrpo.rewards.limits import Limits
from mindgrpo.rewards.load import from_callable, name_of, resolve
from mindgrpo.rewards.outcome import BAD_RESULT, REFUSED, Tally
from mindgrpo.rewards.scores import Scores, added_up
from mindgrpo.rewards.spec import (
    WHERE,
    Spec,
    parse,
    reference_to,
)
from mindgrpo.rewards.workers.pool import Pool
from mindgrpo.rewards.workers.process_lane import ProcessLane

Given = str | Callable[..., Any]


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
        self.limits = limits or Limits()
        self.facts = dict(facts or {})
        sources = [source_of(function) for function in functions]
        self.names = [name for name, _ in sources]
        self.weights = check_weights(self.names, weights)
        self._pool = Pool(self.limits.memory)
        self._lanes: dict[str, list[Lane]] = {}
        try:
            for name, source in sources:
                self._lanes[name] = self._lanes_of(source)
        except BaseException:
            self.close()
            raise

    def _lanes_of(self, source: Spec | Callable[..., Any]) -> list[Lane]:
        if not isinstance(source, Spec):
            return [ThreadLane(from_callable(source), self.limits)]
        if not source.source and BUILTINS[source.name].quick:
            return [DirectLane(resolve(source))]
        one_by_one = not source.source
        return [
            ProcessLane(source, self._pool, self.limits, one_by_one)
            for _ in range(self.limits.workers)
        ]

    def dry_run(self, completions: Sequence[str], answers: Sequence[str], columns: Columns) -> None:
        """Two samples through every function; what would fail on every step fails here.

        Waits for functions that are still loading. Raises UserError.
        """
        samples = Samples(list(completions), list(answers), columns, self.facts)
        few = samples.part(range(min(2, len(samples))))
        for name in self.names:
            self._signature(name).check(name, few)
        firsts = {name: lanes[0] for name, lanes in self._lanes.items()}
        for lane in firsts.values():
            lane.begin(few, range(len(few)), patient=True)
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
        tallies = {name: merged(several) for name, several in self._lanes.items()}
        return added_up(tallies, self.weights, len(samples))

    def close(self) -> None:
        """Ends the worker processes and whatever they started."""
        for several in self._lanes.values():
            for lane in several:
                lane.close()
        self._lanes = {}
        self._pool.close()


def source_of(given: Given) -> tuple[str, Spec | Callable[..., Any]]:
    """The name that a function is reported under, and where it is."""
    if isinstance(given, str):
        spec = parse(given)
        return spec.name, spec
    reference = reference_to(given)
    if reference is not None:
        return reference.name, reference
    return name_of(given), given


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


def merged(lanes: Sequence[Lane]) -> Tally:
    tally = Tally()
    for lane in lanes:
        tally.add(lane.tally)
    return tally
