"""What the policy wrote and what it earned, one JSON object a sample. Refuses to shorten a text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.monitor.metrics import finite_or_null


@dataclass(frozen=True)
class Sample:
    prompt: str
    completion: str
    answer: str
    finish_reason: str
    length: int
    rewards: Mapping[str, float | None]  # by function; None where the function did not score it
    advantage: float
    token_ids: Sequence[int] | None = None


class CompletionsWriter:
    """Appends to PATH at steps 1, 1 + interval, 1 + 2 x interval, ..."""

    def __init__(self, path: Path, interval: int = 1) -> None:
        if interval < 1:
            raise ValueError(f"interval {interval} must be at least 1")
        self.path = path
        self.interval = interval

    def wanted(self, step: int) -> bool:
        return (step - 1) % self.interval == 0

    def write(self, step: int, samples: Iterable[Sample]) -> None:
        if not self.wanted(step):
            return
        with self.path.open("a", encoding="utf-8") as lines:
            for sample in samples:
                row = json.dumps(_row(step, sample), ensure_ascii=False, allow_nan=False)
                lines.write(row + "\n")


def _row(step: int, sample: Sample) -> dict[str, Any]:
    rewards, bad_rewards = finite_or_null(sample.rewards)
    advantage, bad_advantage = finite_or_null({"advantage": sample.advantage})
    row: dict[str, Any] = {
        "step": step,
        "prompt": sample.prompt,
        "completion": sample.completion,
        "answer": sample.answer,
        "finish_reason": sample.finish_reason,
        "length": int(sample.length),
        "rewards": rewards,
        **advantage,
    }
    if sample.token_ids is not None:
        row["token_ids"] = [int(token) for token in sample.token_ids]
    nonfinite = [f"rewards/{name}" for name in bad_rewards] + bad_advantage
    if nonfinite:
        row["nonfinite"] = nonfinite
    return row
