"""Learning rates and pipeline order as pure functions of counts."""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from itertools import chain, pairwise
from typing import Literal, NamedTuple

from pydantic import Field

from mindgrpo.settings.section import Section


class LRSchedule(Section):
    """The keys of `actor_config.lr_schedule`."""

    lr_decay_style: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate decays from lr to min_lr"""
    lr: float = Field(1e-6, gt=0)
    """maximum learning rate"""
    min_lr: float = Field(0.0, ge=0)
    """final learning rate"""
    warmup_step: int = Field(0, ge=0)
    """number of updates in the linear warm-up, which starts at lr / warmup_step"""
    warmup_ratio: float | None = Field(None, ge=0, le=1)
    """fraction of the run to warm up for, instead of warmup_step; null: use warmup_step"""
    decay_steps: int | None = Field(None, ge=1)
    """number of updates until min_lr is reached; null: the length of the run"""

    def rate(self, update: int, num_updates: int) -> float:
        """Computes the rate of update `update` (from 0) of a run of `num_updates`.

        The rate rises linearly to lr over the warm-up, then decays to min_lr at update decay_steps. cosine:
        min_lr + (lr - min_lr) (1 + cos(pi x)) / 2; linear: lr + (min_lr - lr) x; constant: lr; x is the elapsed
        fraction of the decay.
        """
        warmup = self.warmup_step
        if self.warmup_ratio is not None:
            warmup = round(self.warmup_ratio * num_updates)
        if update < warmup:
            return self.lr * (update + 1) / warmup
        if self.lr_decay_style == "constant":
            return self.lr
        x = min(1.0, (update - warmup) / max(1, (self.decay_steps or num_updates) - warmup))
        if self.lr_decay_style == "linear":
            return self.lr + (self.min_lr - self.lr) * x
        return self.min_lr + (self.lr - self.min_lr) * (1.0 + math.cos(math.pi * x)) / 2.0


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one chunk of a stage's layers."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int = 0


class Exchange(NamedTuple):
    """A point-to-point exchange with stage `peer`: `sends` produced the tensor to send, `receives` is the consumer.

    Either is None if nothing goes that way. The peer has the matching Exchange.
    """

    peer: int
    sends: Pass | None
    receives: Pass | None


Actions = tuple[Pass | Exchange, ...]


@lru_cache(maxsize=64)
def pipeline_schedule(
    num_stages: int, num_chunks: int, num_micro_batches: int, has_backward: bool = True
) -> tuple[Actions, ...]:
    """Returns each stage's passes and exchanges under interleaved 1F1B (Megatron-LM, arXiv:2104.04473).

    Chunk c of stage s is part c * num_stages + s of the model. With one chunk per stage the schedule is 1F1B
    (PipeDream-flush, arXiv:2006.09503). With at least num_stages micro-batches, the bubble is (num_stages - 1) /
    (num_chunks * num_micro_batches) of the compute time.

    The passes of all stages run on a common clock, one tick each, and outputs are exchanged at the end of a tick. All
    stages order their exchanges by this clock, so that blocking exchanges do not deadlock; transfers in both directions
    between two stages in one tick form a single exchange.
    """
    left = [
        deque(_passes(stage, num_stages, num_chunks, num_micro_batches, has_backward))
        for stage in range(num_stages)
    ]
    num_parts = num_stages * num_chunks
    actions: list[list[Pass | Exchange]] = [[] for _ in left]
    # By stage: the passes whose inputs are available.
    ready: list[set[Pass]] = [set() for _ in left]
    for i in range(num_micro_batches):
        ready[0].add(Pass("forward", i))
        ready[-1].add(Pass("backward", i, num_chunks - 1))
    while any(left):
        runs = [stage for stage, passes in enumerate(left) if passes and passes[0] in ready[stage]]
        exchanges: dict[tuple[int, int], dict[int, tuple[Pass, Pass]]] = {}
        for stage in runs:
            own = left[stage].popleft()
            actions[stage].append(own)
            step = 1 if own.kind == "forward" else -1
            part = own.chunk * num_stages + stage + step
            if 0 <= part < num_parts:
                chunk, peer = divmod(part, num_stages)
                pair = min(stage, peer), max(stage, peer)
                exchanges.setdefault(pair, {})[stage] = own, own._replace(chunk=chunk)
        for pair, by_source in sorted(exchanges.items()):
            for stage, peer in (pair, pair[::-1]):
                sent, _ = by_source.get(stage, (None, None))
                _, received = by_source.get(peer, (None, None))
                actions[stage].append(Exchange(peer, sent, received))
                if received is not None:
                    ready[stage].add(received)
    return tuple(map(tuple, actions))


def chunks_in_flight(
    stage: int, num_stages: int, num_chunks: int, num_micro_batches: int | None = None
) -> int:
    """Returns the largest number of a stage's forward passes whose backward pass is still to come.

    `num_micro_batches` None: the maximum over any number of micro-batches.
    """
    if num_chunks == 1:
        most = num_stages - stage
    else:
        longest = 2 * num_stages - 1
        if num_micro_batches is not None:
            longest = len(_groups(num_stages, num_micro_batches)[0])
        most = (num_chunks - 1) * longest + 2 * (num_stages - 1 - stage) + 1
    return most if num_micro_batches is None else min(most, num_chunks * num_micro_batches)


def _groups(num_stages: int, num_micro_batches: int) -> list[range]:
    """Splits micro-batches into groups; a group passes through all chunks of a stage before the next group.

    Groups have at least `num_stages` micro-batches, if there are as many, so that a group's first one is back from the
    last stage when the first stage has finished the group. Sizes are balanced, so that no group needs padding.
    """
    number = max(1, num_micro_batches // num_stages)
    edges = [-(-i * num_micro_batches // number) for i in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _passes(
    stage: int, num_stages: int, num_chunks: int, num_micro_batches: int, has_backward: bool
) -> list[Pass]:
    groups = _groups(num_stages, num_micro_batches)
    order = [(chunk, i) for group in groups for chunk in range(num_chunks) for i in group]
    forward = [Pass("forward", i, chunk) for chunk, i in order]
    if not has_backward:
        return forward
    backward = [Pass("backward", i, num_chunks - 1 - chunk) for chunk, i in order]
    ahead = chunks_in_flight(stage, num_stages, num_chunks, num_micro_batches) - 1
    alternating = chain(*zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *alternating, *backward[len(forward) - ahead :]]
