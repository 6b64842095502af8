"""Scores completions with several rewards and adds them up with weights.

A reward is called as `reward(completions, answers=..., **columns)` with the columns that its signature
accepts. None means "does not apply". Files, modules and slow built-ins are called in worker processes, quick
built-ins and callables that no other process can import in threads. A failure never becomes a 0: it is counted
under the function's name and left out of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mindgrpo.errors import UserError, counted
from mindgrpo.rewards.call import CONTRACT, Columns, RewardResult, Samples, Signature
from mindgrpo.rewards.executors import (
    Executor,
    Limits,
    MainProgramExecutor,
    ThreadExecutor,
    WorkerExecutor,
)
from mindgrpo.rewards.load import WHERE, Spec, name_of, parse, reference_to, resolve
from mindgrpo.rewards.scores import Scores, added_up, first_cause
from mindgrpo.workers.protocol import BAD_RESULT, NOT_FINITE, REFUSED

Reward = str | Callable[..., Any]


class Scorer:
    """Starts its worker processes at once, so that they load while other things do; see `dry_run`.

    `facts` are passed to functions that name them, as max_completion_length. No function at all is refused unless it
    `may_be_empty`. Raises UserError.
    """

    def __init__(
        self,
        functions: Sequence[Reward],
        weights: Sequence[float] | None = None,
        limits: Limits | None = None,
        facts: Mapping[str, Any] | None = None,
        may_be_empty: bool = False,
    ) -> None:
        self.limits = limits or Limits()
        self.facts = dict(facts or {})
        sources = [source_of(function) for function in functions]
        self.names = [
            source.name if isinstance(source, Spec) else name_of(source) for source in sources
        ]
        if not self.names and not may_be_empty:
            raise UserError(f"there is no reward function; name at least one in {WHERE}")
        self.weights = check_weights(self.names, weights)
        self._executors: dict[str, list[Executor]] = {}
        try:
            for name, source in zip(self.names, sources, strict=True):
                self._executors[name] = executors_for(source, self.limits)
        except BaseException:
            self.close()
            raise

    def dry_run(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        columns: Columns,
        unanswered: str = "",
        as_messages: Columns | None = None,
    ) -> None:
        """Scores two samples with every function; what would fail on every step fails here.

        Waits for functions that are still loading. `unanswered` is what to do about rows without a gold answer, ""
        where all have one. Raises UserError.
        """
        samples = Samples(list(completions), list(answers), columns, self.facts, as_messages or {})
        few = samples.select(range(min(2, len(samples))))
        firsts = [executors[0] for executors in self._executors.values()]
        signatures = {executor.name: executor.signature() for executor in firsts}
        refuse_what_is_lacking(signatures, few, unanswered)
        for executor in firsts:
            executor.start(few, range(len(few)), patient=True)
        for executor in firsts:
            refuse_what_cannot_work(executor.name, executor.result(), len(few))

    def score(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        columns: Columns,
        as_messages: Columns | None = None,
    ) -> Scores:
        """Scores a step's samples within a few seconds more than the deadline.

        `as_messages` are as in `Samples`. Never raises for what a function does.
        """
        return self.begin(completions, answers, columns, as_messages)()

    def begin(
        self,
        completions: Sequence[str],
        answers: Sequence[str],
        columns: Columns,
        as_messages: Columns | None = None,
    ) -> Callable[[], Scores]:
        """Like `score`, but returns what waits for the scores; it has to be called before the next samples begin."""
        samples = Samples(list(completions), list(answers), columns, self.facts, as_messages or {})
        for executors in self._executors.values():
            shares = np.array_split(np.arange(len(samples)), len(executors))
            for executor, share in zip(executors, shares, strict=True):
                executor.start(samples, share.tolist())

        def wait() -> Scores:
            results = {name: RewardResult() for name in self.names}
            for name, executors in self._executors.items():
                for executor in executors:
                    results[name].add(executor.result())
            return added_up(results, self.weights, len(samples))

        return wait

    def num_done(self) -> int:
        """Counts the step's rewards that are there by now, one per function and sample."""
        return sum(e.num_done for executors in self._executors.values() for e in executors)

    def close(self) -> None:
        """Ends the worker processes and whatever they started."""
        for executors in self._executors.values():
            for executor in executors:
                executor.close()
        self._executors = {}


def source_of(reward: Reward) -> Spec | Callable[..., Any]:
    """Returns where a function is; the function itself where no other process can find it."""
    return parse(reward) if isinstance(reward, str) else reference_to(reward) or reward


def executors_for(source: Spec | Callable[..., Any], limits: Limits) -> list[Executor]:
    if not isinstance(source, Spec):
        return [MainProgramExecutor(resolve(source), limits.deadline)]
    if source.is_quick:
        return [ThreadExecutor(resolve(source), math.inf)]
    return [WorkerExecutor(source, limits) for _ in range(limits.workers)]


def check_weights(names: Sequence[str], weights: Sequence[float] | None) -> list[float]:
    weights = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]
    if len(set(names)) < len(names):
        raise UserError(
            f"two reward functions have the same name among {', '.join(names)}; their scores "
            f"are reported by name, so rename one ({WHERE})"
        )
    if len(weights) != len(names):
        raise UserError(
            f"{counted(len(weights), 'weight was', 'weights were')} given for {counted(len(names), 'reward function')} "
            f"({', '.join(names)}); give one each in reward_config.verifier_weight"
        )
    if not all(math.isfinite(weight) for weight in weights):
        raise UserError(f"the weights {weights} must be finite (reward_config.verifier_weight)")
    return weights


def refuse_what_is_lacking(
    signatures: Mapping[str, Signature], samples: Samples, unanswered: str
) -> None:
    wants: dict[str, list[str]] = {}
    remedies: list[str] = []
    for name, signature in signatures.items():
        if not signature.takes_completions:
            raise UserError(
                f"reward function {name} takes no positional argument; it is called as "
                f"reward(completions, answers, **columns) ({WHERE})"
            )
        asked = signature.answers_asked(samples) if unanswered else []
        remedies += [unanswered] if asked and not remedies else []
        if lacking := [*asked, *signature.lacking(samples)]:
            wants[name] = lacking
    if not wants:
        return
    if any(signatures[name].lacking(samples) for name in wants):
        remedies.append("add the columns to the data set")
    each = " and ".join(
        f"{name} wants {', '.join(map(repr, lacking))}" for name, lacking in wants.items()
    )
    has = [*([] if unanswered else ["answers"]), *samples.columns, *samples.facts]
    raise UserError(
        f"reward function {each}, which the data does not have (it has {', '.join(has)}); "
        f"{', '.join(remedies)}, or give the parameters defaults or values ({WHERE})"
    )


def refuse_what_cannot_work(name: str, result: RewardResult, num_samples: int) -> None:
    together, failures = result.together_failure, list(result.failures.values())
    for failure in (together, *failures):
        if failure is not None and failure.kind == REFUSED:
            raise UserError(failure.message)
    if together is not None and together.kind == BAD_RESULT:
        raise UserError(
            f"reward function {name} {together.message}; it must return {CONTRACT} ({WHERE})"
        )
    if len(failures) == num_samples:
        returned = failures[0].kind in (BAD_RESULT, NOT_FINITE)
        remedy = f"it must return {CONTRACT}" if returned else "correct the function"
        raise UserError(
            f"reward function {name} fails on each of {num_samples} samples: {failures[0].message}"
            f"{first_cause(together, failures)}; {remedy} ({WHERE})"
        )
