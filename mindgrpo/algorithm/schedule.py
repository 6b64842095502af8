"""Learning rates and pipeline order as pure functions of counts."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


def learning_rate(
    update: int, style: str, peak: float, floor: float, warmup: int, decay: int
) -> float:
    """The rate of update `update` (from 0): linear up to `peak` over `warmup`, then down to `floor` by update `decay`.

    cosine: floor + (peak - floor) (1 + cos(pi x)) / 2; linear: peak + (floor - peak) x; constant: peak; x is the
    share of the decay that is over.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if style == "constant":
        return peak
    x = min(1.0, (update - warmup) / max(1, decay - warmup))
    if style == "linear":
        return peak + (floor - peak) * x
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * x)) / 2.0


class Action(NamedTuple):
    kind: Literal["forward", "backward"]
    micro_batch: int


def one_forward_one_backward(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """1F1B (PipeDream-flush, arXiv:2006.09503): at most num_stages - stage activations wait on a stage."""
    warm_up = min(num_stages - 1 - stage, num_micro_batches)
    actions = [Action("forward", i) for i in range(warm_up)]
    for i in range(warm_up, num_micro_batches):
        actions += [Action("forward", i), Action("backward", i - warm_up)]
    tail = range(num_micro_batches - warm_up, num_micro_batches)
    return actions + [Action("backward", i) for i in tail]
