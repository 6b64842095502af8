"""Whether a run fits its devices, and what would make it fit: every change is planned before it is proposed. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindgrpo.config import Loaded, config_with
from mindgrpo.errors import UserError
from mindgrpo.grpo.device_plan import PhaseNeed, most_needed, phase_needs
from mindgrpo.grpo.fit_changes import Change, changes_for
from mindgrpo.grpo.run_plan import RunPlan, plan_run
from mindgrpo.grpo.settings import device_budget
from mindgrpo.monitor.host_memory import format_bytes

KEY = "context.max_device_memory"
PROPOSED = 3
# Changes that are made together, where no single one is enough.
MOST_TOGETHER = 3


@dataclass(frozen=True)
class Remedy:
    """Changes that together make the run fit, with what the plan then says."""

    changes: tuple[Change, ...]
    need: PhaseNeed

    def lines(self) -> list[str]:
        words = " ".join(f"--{key} {value}" for key, value in _values(self.changes).items())
        costs = "; ".join(change.cost for change in self.changes)
        return [words, f"    then {_said(self.need)}; {costs}"]


@dataclass(frozen=True)
class Verdict:
    """`budget` None: the configuration sets no limit, and so nothing is said."""

    need: PhaseNeed
    budget: int | None
    remedies: tuple[Remedy, ...] = ()

    @property
    def fits(self) -> bool | None:
        return None if self.budget is None else self.need.total <= self.budget

    def lines(self) -> list[str]:
        if self.budget is None:
            return [
                f"not known, for {KEY} sets no limit: at most {_said(self.need)}; give --{KEY} 58GB or what the "
                "device has"
            ]
        allowed = f"{KEY} allows {format_bytes(self.budget)}"
        if self.fits:
            return [f"fits: at most {_said(self.need)}, and {allowed}"]
        lines = [f"does not fit: {_said(self.need)}, but {allowed}"]
        if not self.remedies:
            return [
                *lines,
                f"no {MOST_TOGETHER} changes that plan tries make it fit: use more devices",
            ]
        lines.append("the cheapest changes that make it fit:")
        for number, remedy in enumerate(self.remedies, start=1):
            head, *rest = remedy.lines()
            lines += [f"{number}. {head}", *rest]
        return lines


def verdict(loaded: Loaded, plan: RunPlan) -> Verdict:
    need, budget = most_needed(plan), device_budget(plan.config)
    if budget is None or need.total <= budget:
        return Verdict(need, budget)
    remedies = itertools.islice(_remedies(loaded, plan, budget), PROPOSED)
    return Verdict(need, budget, tuple(remedies))


def _said(need: PhaseNeed) -> str:
    return f"{format_bytes(need.total)} a rank, in phase {need.phase}"


def _remedies(loaded: Loaded, plan: RunPlan, budget: int) -> Iterator[Remedy]:
    """The cheapest first; none that holds a smaller remedy."""
    changes = _helpful(loaded, plan, budget)
    numbers = range(1, MOST_TOGETHER + 1)
    together = [chosen for number in numbers for chosen in itertools.combinations(changes, number)]
    enough: list[frozenset[Change]] = []
    for chosen in sorted(together, key=_price):
        if any(known <= set(chosen) for known in enough) or not _agree(chosen):
            continue
        needs = _needs_with(loaded, plan, chosen)
        most = max(needs, key=lambda need: need.total) if needs else None
        if most is not None and most.total <= budget:
            enough.append(frozenset(chosen))
            yield Remedy(chosen, most)


def _helpful(loaded: Loaded, plan: RunPlan, budget: int) -> list[Change]:
    """Those that take something from a phase that does not fit."""
    over = {need.phase: need.total for need in phase_needs(plan) if need.total > budget}
    changes = []
    for change in changes_for(plan):
        needs = _needs_with(loaded, plan, (change,))
        if any(need.total < over.get(need.phase, 0) for need in needs):
            changes.append(change)
    return changes


def _price(chosen: Sequence[Change]) -> int:
    return sum(change.price for change in chosen)


def _agree(chosen: Sequence[Change]) -> bool:
    """Whether no two set one key, or are of one kind."""
    keys = [key for change in chosen for key, _ in change.values]
    kinds = [change.kind for change in chosen]
    return len(set(keys)) == len(keys) and len(set(kinds)) == len(kinds)


def _values(chosen: Sequence[Change]) -> dict[str, str]:
    pairs = ((key, value) for change in chosen for key, value in change.values)
    return {key: "null" if value is None else str(value).lower() for key, value in pairs}


def _needs_with(loaded: Loaded, plan: RunPlan, chosen: Sequence[Change]) -> list[PhaseNeed]:
    """None where the configuration, the model or the batch does not allow the changes."""
    try:
        changed = config_with(
            loaded, {key: value for c in chosen for key, value in c.values}
        ).config
        new = plan_run(changed, plan.model, None)
    except UserError:
        return []
    before, after = ((p.batch.samples_per_step, p.batch.updates_per_step) for p in (plan, new))
    return phase_needs(new) if before == after else []
