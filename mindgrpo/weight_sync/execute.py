"""Runs a plan on one rank: what it keeps is copied, what it lacks is read from its senders or arrives in rounds.

Every element of the target arrives or it is an error.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from mindspore import ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.host_memory import Copies
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.rounds import DEFAULT_BUCKET_BYTES, Piece, device_bucket_bytes, rounds
from mindgrpo.weights.local_weights import HostTensors, WeightArrays, Weights

# What a rank may receive into.
Target = Weights | HostTensors


@dataclass
class _Round:
    """Holds what is sent to each rank and received from each, in the order in which both sides lay it out."""

    sends: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[int, list[Piece]] = field(default_factory=lambda: defaultdict(list))


class DeviceRounds:
    """A sender's bucket of a round goes, to each rank, with what that rank wants of it.

    `extra_bytes` bounds what a rank sends or receives from one other rank in a round.
    """

    def __init__(
        self, plan: Plan, source: Weights, target: Target, backend: Backend, bucket_bytes: int
    ) -> None:
        self._source, self._target, self._backend = source, target, backend
        self._keep = plan.of(backend.rank).keep
        self.extra_bytes = device_bucket_bytes(plan, bucket_bytes)
        self._rounds: list[_Round] = []
        for moved in rounds(plan, self.extra_bytes, rank=backend.rank):
            own = _Round()
            for piece in moved:
                if piece.move.source == backend.rank:
                    own.sends[piece.move.target].append(piece)
                else:
                    own.receives[piece.move.source].append(piece)
            self._rounds.append(own)

    def run(self) -> int:
        for weights in (self._source, self._target):
            weights.pool.require("weight sync")
        kept = [(m.name, m.box, self._source.part(m.name, m.box)) for m in self._keep]
        self._write(kept)
        arrived = sum(map(self._run, self._rounds))
        self._backend.synchronize()
        return sum(move.size for move in self._keep) + arrived

    def _run(self, moved: _Round) -> int:
        sends = {rank: self._packed(own) for rank, own in moved.sends.items()}
        sizes = {rank: (sum(p.box.size for p in own),) for rank, own in moved.receives.items()}
        arrived = self._backend.exchange(sends, sizes, self._source.dtype)
        written = []
        for rank, own in moved.receives.items():
            start = 0
            for piece in own:
                flat = arrived[rank][start : start + piece.box.size]
                written.append((piece.move.name, piece.box, flat))
                start += piece.box.size
        self._write(written)
        return sum(size for (size,) in sizes.values())

    def _packed(self, sent: Sequence[Piece]) -> Any:
        flat = [self._source.part(p.move.name, p.box).reshape(-1) for p in sent]
        return flat[0] if len(flat) == 1 else ops.concat(flat)

    def _write(self, written: Sequence[tuple[str, Box, Any]]) -> None:
        target = self._target
        if isinstance(target, Weights) and not target.on_host_only:
            target.set_parts([(target.region(name, box), values) for name, box, values in written])
            return
        for name, box, values in written:
            self._backend.host_device_bytes += box.size * target.pool.itemsize
            view = target.arrays.hf_views[name][box.within(target.boxes[name]).slices]
            if target.layout.by_name[
                name
            ].transposed:  # the values arrive as their sender stores them
                view = view.swapaxes(-1, -2)
            view[...] = values.asnumpy().reshape(view.shape)


@dataclass(frozen=True)
class Traffic:
    """`bytes_received` of this rank only; `seconds` of the whole call."""

    bytes_received: int
    seconds: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes_received + other.bytes_received, self.seconds + other.seconds)


class ReshardError(RuntimeError):
    """A target that did not get every one of its elements, or not the sender's bits."""


class _Moving(Protocol):
    """Carries a plan out; `extra_bytes` is the memory that it takes beside the weights on both sides."""

    extra_bytes: int

    def run(self) -> int:
        """Moves the weights, all ranks together; returns how many elements of the target were written."""


class Resharder:
    """Repeats one plan between the same two sets of weights, as after every update.

    Ranks that share memory read the senders' weights where they are; on devices they travel in rounds of buckets of
    `bucket_bytes`.
    """

    def __init__(
        self,
        plan: Plan,
        source: Weights,
        target: Target,
        backend: Backend,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if target.pool.dtype != source.dtype or plan.itemsize != source.pool.itemsize:
            raise ValueError(
                f"weights of {source.dtype} do not go to {target.pool.dtype}, {plan.itemsize} bytes each"
            )
        self._target, self._rank = target, backend.rank
        self._received = plan.received_bytes(backend.rank)
        self._moving: _Moving
        if backend.shares_memory:
            self._moving = _InPlace(plan, source, target, backend)
        else:
            self._moving = DeviceRounds(plan, source, target, backend, bucket_bytes)

    @property
    def extra_bytes(self) -> int:
        return self._moving.extra_bytes

    def run(self) -> Traffic:
        """Moves the weights, all ranks together. Raises ReshardError."""
        started = time.perf_counter()
        arrived = self._moving.run()
        wanted = sum(box.size for box in self._target.boxes.values())
        if arrived != wanted:
            raise ReshardError(f"{arrived} of {wanted} elements arrived on rank {self._rank}")
        return Traffic(self._received, time.perf_counter() - started)


class _InPlace:
    """Each rank copies what it lacks out of the memory of those that have it."""

    extra_bytes = 0

    def __init__(self, plan: Plan, source: Weights, target: Target, backend: Backend) -> None:
        self._backend = backend
        moves = plan.of(backend.rank)
        peers = backend.peer_pools(source.pool)
        senders = {move.source for move in moves.receive}
        self._peers = [peers[rank] for rank in sorted(senders)]
        holders = {r: WeightArrays.of_peer(source.layout, r, peers[r]) for r in senders}
        own, here = target.arrays, source.arrays
        self._kept = Copies(
            [(_view(own, m.name, m.box), _view(here, m.name, m.box)) for m in moves.keep]
        )
        self._wanted = Copies(
            [
                (_view(own, m.name, m.box), _view(holders[m.source], m.name, m.box))
                for m in moves.receive
            ]
        )

    def run(self) -> int:
        self._backend.world.barrier()
        self._kept.run()
        self._wanted.run()
        self._backend.world.barrier()
        for peer in self._peers:
            peer.forget()
        return self._kept.num_elements + self._wanted.num_elements


def _view(weights: WeightArrays | HostTensors, name: str, box: Box) -> np.ndarray:
    return weights.hf_views[name][box.within(weights.boxes[name]).slices]
