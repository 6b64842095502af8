"""The scores of a step's samples: numbers by function, their weighted total, and what went wrong.

A failure is nan in its function's values and counted in its report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mindgrpo.rewards.call import IN_WORDS, KINDS, TOO_LONG, RewardResult, Score
from mindgrpo.workers.protocol import RAISED, REFUSED, CallFailure

Metric = float | int | None


@dataclass(frozen=True)
class Report:
    """One function: `counts` by metric, `line` for the console ("" if all went well), what it printed.

    `failed` are the indices of the samples that it failed on.
    """

    counts: Mapping[str, int]
    line: str = ""
    printed: str = ""
    seconds: float = 0.0
    failed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, result: RewardResult) -> Report:
        """Counts failures by kind, with `errors` their sum, `none` where the function did not apply, and Scores' own.

        The line has each kind with its number and one example; else why a second try was needed.
        """
        own = Counter[str]()
        for value in result.values.values():
            own.update(value.counts if isinstance(value, Score) else {})
        by_kind = Counter(failure.kind for failure in result.failures.values())
        counts = {**own, "errors": len(result.failures), **{kind: by_kind[kind] for kind in KINDS}}
        counts |= {TOO_LONG: by_kind[TOO_LONG]} if by_kind[TOO_LONG] else {}
        counts[RAISED] += by_kind[REFUSED]
        counts |= {"restarts": result.restarts, "printed_bytes": result.printed_bytes}
        counts["together_failures"] = int(result.together_failure is not None)
        counts["none"] = sum(value is None for value in result.values.values())
        examples = {failure.kind: failure for failure in reversed(result.failures.values())}
        line = "; ".join(
            f"{count} {IN_WORDS[kind]}: {examples[kind].message}" for kind, count in by_kind.items()
        )
        together = result.together_failure
        if line:
            line += first_cause(together, result.failures.values())
        elif together is not None:
            line = f"one call for all samples: {together.message}; scored one by one instead"
        return cls(counts, line, result.printed, result.seconds, frozenset(result.failures))

    def plus(self, other: Report) -> Report:
        """Returns the report of both calls; which samples failed is known of a single call only."""
        names = {**self.counts, **other.counts}
        return Report(
            {name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in names},
            "; ".join(dict.fromkeys(line for line in (self.line, other.line) if line)),
            self.printed + other.printed,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Scores:
    """`per_function` float64 [samples] holds nan where a reward did not apply or failed.

    `total` float32 [samples] is the weighted sum of what there is; `failed` bool [samples] says where
    a reward's part is missing from it because the reward failed. `weights` are the functions'.
    """

    per_function: dict[str, np.ndarray]
    total: np.ndarray
    failed: np.ndarray
    reports: dict[str, Report] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    @property
    def components(self) -> list[tuple[float, np.ndarray]]:
        """Returns each function's weight and values."""
        return [(self.weights[name], values) for name, values in self.per_function.items()]

    @property
    def errors(self) -> dict[str, int]:
        """Failed samples by function."""
        return {name: report.counts.get("errors", 0) for name, report in self.reports.items()}

    @property
    def messages(self) -> dict[str, str]:
        """One line for each function that failed on a sample, or had to be called a second time."""
        return {name: report.line for name, report in self.reports.items() if report.line}

    @property
    def known_totals(self) -> np.ndarray:
        """float64: the totals of the samples that a reward scored and none failed on."""
        unscored = [np.isnan(values) for values in self.per_function.values()]
        nothing = np.all(unscored, axis=0) if unscored else np.zeros(len(self.total), bool)
        return self.total[~self.failed & ~nothing].astype(np.float64)

    def means(self) -> dict[str, float | None]:
        """Returns each function's mean over the samples that it scored; None where there are none."""
        scored = {name: values[~np.isnan(values)] for name, values in self.per_function.items()}
        return {name: mean_of(values) for name, values in scored.items()}

    def metrics(self) -> dict[str, Metric]:
        """Returns metrics: reward/<function>/mean, .../errors and its parts by kind, .../seconds."""
        metrics: dict[str, Metric] = {}
        for name, mean in self.means().items():
            metrics[f"reward/{name}/mean"] = mean
            report = self.reports.get(name, Report({"errors": 0}))
            metrics |= {f"reward/{name}/{kind}": count for kind, count in report.counts.items()}
            metrics[f"reward/{name}/seconds"] = report.seconds
        return metrics

    def filled(self, groups: Sequence[int]) -> Scores:
        """Gives each failed sample the mean total of its group's others.

        The group's mean is as without it.
        `groups` is each sample's. Where all of a group have failed, their totals are the mean of all others,
        0 where there is none.
        """
        if not self.failed.any():
            return self
        total, numbers = self.total.astype(np.float64), np.asarray(groups)
        of_all = mean_of(self.known_totals) or 0.0
        for group in np.unique(numbers[self.failed]):
            known = total[(numbers == group) & ~self.failed]
            total[(numbers == group) & self.failed] = known.mean() if known.size else of_all
        return replace(self, total=total.astype(np.float32))

    def with_function(self, name: str, result: RewardResult, weight: float) -> Scores:
        """Adds the values, or failures, of another function."""
        added = added_up({name: result}, [weight], len(self.total))
        total = self.total.astype(np.float64) + added.total
        return Scores(
            self.per_function | added.per_function,
            total.astype(np.float32),
            self.failed | added.failed,
            {**self.reports, **added.reports},
            {**self.weights, **added.weights},
        )

    def with_replaced(self, indices: Sequence[int], fresh: Scores) -> Scores:
        """Replaces samples at `indices` by those of `fresh`, in order; failures of replaced samples stay counted."""
        total, failed, chosen = self.total.copy(), self.failed.copy(), list(indices)
        total[chosen], failed[chosen] = fresh.total, fresh.failed
        per_function = {name: values.copy() for name, values in self.per_function.items()}
        for name, values in fresh.per_function.items():
            per_function[name][chosen] = values
        reports = {name: report.plus(fresh.reports[name]) for name, report in self.reports.items()}
        return Scores(per_function, total, failed, reports, self.weights)


def joined(placed: Sequence[tuple[Sequence[int], Scores]], num_samples: int) -> Scores:
    """Joins the scores of some samples each, by the samples' indices, of functions with the same names."""
    total, failed = np.zeros(num_samples, np.float32), np.zeros(num_samples, bool)
    per_function: dict[str, np.ndarray] = {}
    reports: dict[str, Report] = {}
    weights: dict[str, float] = {}
    for indices, scores in placed:
        own = list(indices)
        total[own], failed[own], weights = scores.total, scores.failed, scores.weights
        for name, values in scores.per_function.items():
            per_function.setdefault(name, np.full(num_samples, math.nan))[own] = values
        for name, report in scores.reports.items():
            own_report = replace(report, failed=frozenset(own[i] for i in report.failed))
            before = reports.get(name)
            reports[name] = (
                own_report
                if before is None
                else replace(before.plus(own_report), failed=before.failed | own_report.failed)
            )
    return Scores(per_function, total, failed, reports, weights)


def first_cause(together: CallFailure | None, failures: Iterable[CallFailure]) -> str:
    """Says why the call with all samples failed, unless that is said of a sample."""
    if together is None or together.message in {failure.message for failure in failures}:
        return ""
    return f" (before, in one call for all samples: {together.message})"


def mean_of(values: np.ndarray) -> float | None:
    """Returns the mean; None where there is no value."""
    return float(values.mean()) if values.size else None


def added_up(
    results: Mapping[str, RewardResult], weights: Sequence[float], num_samples: int
) -> Scores:
    """Weighs the results and adds them up; `weights` are in the order of `results`."""
    total, failed = np.zeros(num_samples), np.zeros(num_samples, bool)
    per_function = {}
    for (name, result), weight in zip(results.items(), weights, strict=True):
        values = np.full(num_samples, math.nan)
        for index, value in result.values.items():
            values[index] = math.nan if value is None else value
        per_function[name] = values
        failed[list(result.failures)] = True
        total += weight * np.nan_to_num(values, nan=0.0)
    reports = {name: Report.of(result) for name, result in results.items()}
    by_name = dict(zip(results, weights, strict=True))
    return Scores(per_function, total.astype(np.float32), failed, reports, by_name)
