"""Compares the bits of weights that several ranks hold, for job.py, by the check that runs make. Judges nothing."""

from __future__ import annotations

from mindgrpo.backend.contract import Backend
from mindgrpo.training.policy import Policy
from mindgrpo.weight_sync.transfer import WeightCheck, WeightsDiffer


class Comparison:
    """`differences` has a sentence for each step after which some were not the same."""

    def __init__(self, backend: Backend) -> None:
        self._check = WeightCheck(backend, 1, frozenset())
        self.differences: list[str] = []

    def make(self, step: int, policy: Policy) -> None:
        """All ranks together."""
        trained = policy.weights if policy.adapters is None else policy.adapters.weights
        self._check.begin_step(step)
        try:
            self._check.keep([trained], policy.version)
        except WeightsDiffer as error:
            self.differences.append(f"step {step}: {error}")
