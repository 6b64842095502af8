"""Learning rates and pipeline order as pure functions of counts."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple


def learning_rate(
    update: int, style: str, peak: float, floor: float, warmup: int, decay: int
) -> float:
    """Computes the rate of update `update` (from 0): linear to `peak` over `warmup` updates, then down to `floor`.

    The floor is reached by update `decay`. cosine: floor + (peak - floor) (1 + cos(pi x)) / 2; linear: peak + (floor -
    peak) x; constant: peak; x is the share of the decay that is over.
    """
    if update < warmup:
        return peak * (update + 1) / warmup
    if style == "constant":
        return peak
    x = min(1.0, (update - warmup) / max(1, decay - warmup))
    if style == "linear":
        return peak + (floor - peak) * x
    return floor + (peak - floor) * (1.0 + math.cos(math.pi * x)) / 2.0


class Pass(NamedTuple):
    """A pass of a stage over a micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Exchange(NamedTuple):
    """A hand-over with a neighbour: the micro-batches whose activations or gradients go there and come from there.

    Activations go to the next stage, gradients to the previous one. Either is None where nothing goes that way.
    """

    neighbour: Literal["previous", "next"]
    sends: int | None
    receives: int | None


def one_forward_one_backward(
    stage: int, num_stages: int, num_micro_batches: int
) -> list[Pass | Exchange]:
    """Returns a stage's passes and exchanges under 1F1B (PipeDream-flush, arXiv:2006.09503).

    At most num_stages - stage activations wait on a stage. What a stage sends to a neighbour and what it needs from it
    next is one exchange on both sides (Megatron-LM, arXiv:2104.04473), so that stages whose sends wait for the
    receiver do not deadlock.
    """
    last = num_micro_batches
    warm_up = min(num_stages - 1 - stage, last)
    actions: list[Pass | Exchange | None] = []

    def previous(sends: int | None, receives: int | None) -> Exchange | None:
        nothing = sends is None and receives is None
        return None if stage == 0 or nothing else Exchange("previous", sends, receives)

    def following(sends: int | None, receives: int | None) -> Exchange | None:
        return None if stage == num_stages - 1 else Exchange("next", sends, receives)

    for i in range(warm_up):
        actions += [previous(None, i), Pass("forward", i), following(i, None)]
    if warm_up < last:
        actions.append(previous(None, warm_up))
    for i in range(warm_up, last):
        done = i - warm_up
        needed = i + 1 if i + 1 < last else None
        actions += [Pass("forward", i), following(i, done), Pass("backward", done)]
        actions.append(previous(done, needed))
    for i in range(last - warm_up, last):
        actions += [following(None, i), Pass("backward", i), previous(i, None)]
    return [action for action in actions if action is not None]
