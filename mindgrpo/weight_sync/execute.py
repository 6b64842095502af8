"""Runs a plan on one rank: what it keeps is copied, what it lacks is read from its senders or arrives in rounds.

Every element of the target arrives or it is an error.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.host_memory import Copies
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.device_rounds import DeviceRounds, Target
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.rounds import DEFAULT_BUCKET_BYTES
from mindgrpo.weight_sync.transfer import Traffic
from mindgrpo.weights.host_tensors import HostTensors
from mindgrpo.weights.local_weights import WeightArrays, Weights


class ReshardError(RuntimeError):
    """A target that did not get every one of its elements, or not the sender's bits."""


class _Moving(Protocol):
    """How a plan is carried out; `extra_bytes` is the memory that it takes beside the weights on both sides."""

    extra_bytes: int

    def run(self) -> int:
        """All ranks together; returns how many elements of the target were written."""


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
        """All ranks together. Raises ReshardError."""
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
