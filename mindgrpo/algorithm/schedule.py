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

        It rises linearly to lr over the warm-up, then goes down to min_lr, which is reached by update decay_steps.
        cosine: min_lr + (lr - min_lr) (1 + cos(pi x)) / 2; linear: lr + (min_lr - lr) x; constant: lr; x is the share
        of the decay that is over.
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
    """A pass of a stage over a micro-batch, through the layers of one of its chunks."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int = 0


class Exchange(NamedTuple):
    """A hand-over with another stage: the own pass whose result goes there, and the own pass that takes what comes.

    Either is None where nothing goes that way. The other stage has the matching one.
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

    Chunk c of stage s is part c num_stages + s of the model. One chunk a stage makes it 1F1B (PipeDream-flush,
    arXiv:2006.09503). From num_stages micro-batches up, stages idle for (num_stages - 1) / (num_chunks
    num_micro_batches) of the time that they compute.

    The passes of all stages are put on one clock, each a tick long, and what a pass makes is handed over at the end of
    its tick. All stages have exchanges in this one order, so that they do not deadlock if each waits for the other
    side; what two stages hand to each other at the same time is one exchange.
    """
    left = [
        deque(_passes(stage, num_stages, num_chunks, num_micro_batches, has_backward))
        for stage in range(num_stages)
    ]
    num_parts = num_stages * num_chunks
    actions: list[list[Pass | Exchange]] = [[] for _ in left]
    # By stage, the passes whose input another pass has made.
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
    """Returns how many passes of a stage at most have gone forward and not yet back.

    Without `num_micro_batches`, of any number of them.
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
    """Cuts micro-batches into groups, which go through a stage's chunks one after the other.

    Each has at least `num_stages`, if there are as many: it then comes back from the last stage when the first has
    just sent it on. So none is left over, to be padded.
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
