"""Writes a step's key data with msprobe's SingleSave, for comparing two runs element by element.

msprobe is optional: if it is not installed, or fails later, a run reports that in one line and continues without it.
Written for mindstudio-probe 26.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm.sample import TrainBatch


def load_saver() -> Any:
    """Returns msprobe's SingleSave. Raises ImportError, also for another package of that name."""
    from msprobe.core import SingleSave

    return SingleSave


def key_data(
    batch: TrainBatch, rewards: Mapping[str, np.ndarray], policy_logps: Mapping[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns a step's arrays by name; per-token arrays are concatenated, and `completion_lengths` divides them."""

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays) if arrays else np.zeros(0, np.float32)

    rollout = batch.rollout
    data = {
        "prompt_lengths": np.array([len(tokens) for tokens in rollout.prompt_ids], np.int32),
        "prompt_tokens": joined(rollout.prompt_ids),
        "completion_lengths": rollout.completion_lengths.astype(np.int32),
        "completion_tokens": joined(rollout.completion_ids),
        "generator_logps": joined(rollout.generator_logps),
        "policy_logps": joined([policy_logps[i] for i in sorted(policy_logps)]),
        "advantages": batch.advantages,
    }
    if batch.reference_logps is not None:
        data["reference_logps"] = joined(batch.reference_logps)
    if batch.old_logps is not None:
        data["old_logps"] = joined(batch.old_logps)
    return data | {f"reward_{name}": values for name, values in rewards.items()}


class Probe:
    """Saves configurations.json and data/NAME/stepN/rank0/... with their statistics in `folder`."""

    def __init__(self, saver: Any, folder: Path, warn: Callable[[str], None]) -> None:
        self._saver, self._warn = saver, warn
        self._works = True
        self._guarded(lambda: saver(str(folder), fmk="mindspore"))

    def configuration(self, values: Mapping[str, object]) -> None:
        self._guarded(lambda: self._saver.save_config(dict(values)))

    def step(self, data: Mapping[str, np.ndarray]) -> None:
        from mindspore import Tensor

        self._guarded(
            lambda: self._saver.save(
                {name: Tensor(values) for name, values in data.items() if values.size}
            )
        )
        self._guarded(self._saver.step)

    def _guarded(self, call: Callable[[], object]) -> None:
        if not self._works:
            return
        try:
            call()
        except Exception as error:  # a debugging aid must not end the run
            self._works = False
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._warn(f"  warning: msprobe failed and is not used any more in this run ({reason})")
