"""Executes a reshard plan on one rank: copies the parts it already holds, and fetches the others from their senders.

Senders' shared memory is read directly; between devices, parts are exchanged in rounds. It is an error if any element
of the target does not arrive.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, Protocol

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import bits_of
from mindgrpo.backend.host_memory import Copies
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.plan import Move, Plan
from mindgrpo.weight_sync.rounds import Transfer, in_rounds, pair_capacity, transfers
from mindgrpo.weights.local_weights import HostTensors, Region, WeightArrays, Weights

# Destinations of a transfer: a rank's weights, or a bucket in host memory.
Target = Weights | HostTensors
# The transfers of a round by peer rank, in the order in which both sides send and receive them.
_Round = dict[int, list[Transfer]]


class DeviceRounds:
    """Exchanges weights between devices in rounds: contiguous parts in place, all others through temporary copies.

    `extra_bytes` is the size of the largest round's temporary copies.
    """

    def __init__(self, plan: Plan, source: Weights, target: Target, backend: Backend) -> None:
        self._source, self._target, self._backend = source, target, backend
        self._writes_device = isinstance(target, Weights) and not target.on_host_only
        moves, own = plan.of(backend.rank), source.places_on(backend.rank)
        here = target.places_on(backend.rank)
        self._kept = transfers(moves.keep, own, here)
        capacity = pair_capacity(plan, backend.bucket_bytes)
        sends = [
            (peer, in_rounds(transfers(sent, own, target.places_on(peer)), capacity))
            for peer, sent in _by(lambda move: move.target, moves.send)
        ]
        receives = [
            (peer, in_rounds(transfers(wanted, source.places_on(peer), here), capacity))
            for peer, wanted in _by(lambda move: move.source, moves.receive)
        ]
        self._rounds = list(zip_longest(_turned(sends), _turned(receives), fillvalue=_Round()))
        self.extra_bytes = plan.itemsize * max(map(self._copied, self._rounds), default=0)

    def _copied(self, moved: tuple[_Round, _Round]) -> int:
        """Returns the number of elements that a round sends from, or receives into, temporary copies."""
        sends, receives = (list(chain(*one.values())) for one in moved)
        sent = sum(part.size for part in sends if not part.source.is_contiguous)
        return sent + sum(part.size for part in receives if not self._arrives_in_place(part))

    def _arrives_in_place(self, part: Transfer) -> bool:
        return self._writes_device and part.target.is_contiguous

    def run(self) -> int:
        for weights in (self._source, self._target):
            weights.pool.require("weight sync")
        self._write((part.target, self._source.bits(part.source)) for part in self._kept)
        for sends, receives in self._rounds:
            self._exchange(sends, receives)
        self._backend.synchronize()
        arrived = chain(*(chain(*receives.values()) for _, receives in self._rounds))
        return sum(part.size for part in chain(self._kept, arrived))

    def _exchange(self, sends: _Round, receives: _Round) -> None:
        sent = {peer: [self._in_one_piece(p.source) for p in own] for peer, own in sends.items()}
        arrived = {peer: [self._room(part) for part in moving] for peer, moving in receives.items()}
        self._backend.exchange(sent, arrived)
        copied = [
            (part.target, values)
            for peer, moving in receives.items()
            for part, values in zip(moving, arrived[peer], strict=True)
            if not self._arrives_in_place(part)
        ]
        self._write(copied)

    def _in_one_piece(self, region: Region) -> Any:
        view = self._source.view(region)
        return view if region.is_contiguous else view.contiguous()

    def _room(self, part: Transfer) -> Any:
        """Returns the device tensor to receive the part into: a view of the target, or a temporary one."""
        if isinstance(self._target, Weights) and self._arrives_in_place(part):
            return self._target.view(part.target)
        return self._backend.zeros(part.target.shape, self._source.dtype)

    def _write(self, written: Iterable[tuple[Region, Any]]) -> None:
        target = self._target
        if isinstance(target, Weights) and not target.on_host_only:
            target.set_parts(written)
            return
        for region, values in written:
            array = values.asnumpy()
            self._backend.host_device_bytes += array.nbytes
            tensor = target.arrays.tensors[region.key]
            bits_of(tensor)[region.slices] = bits_of(array)


def _by(rank_of: Callable[[Move], int], moves: Iterable[Move]) -> Iterable[tuple[int, list[Move]]]:
    """Groups moves by peer rank."""
    by_rank: defaultdict[int, list[Move]] = defaultdict(list)
    for move in moves:
        by_rank[rank_of(move)].append(move)
    return by_rank.items()


def _turned(by_peer: Sequence[tuple[int, list[list[Transfer]]]]) -> list[_Round]:
    """Transposes a list of rounds for each peer into a list of rounds, each {peer: transfers}."""
    num_rounds = max((len(rounds) for _, rounds in by_peer), default=0)
    return [
        {peer: rounds[number] for peer, rounds in by_peer if number < len(rounds)}
        for number in range(num_rounds)
    ]


@dataclass(frozen=True)
class Traffic:
    """`bytes_received` by this rank, and `seconds` that the call took."""

    bytes_received: int
    seconds: float

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.bytes_received + other.bytes_received, self.seconds + other.seconds)


class ReshardError(RuntimeError):
    """Raised where a target has not received all of its elements."""


class _Moving(Protocol):
    """Executes a plan; `extra_bytes` is the temporary memory beside the source's and the target's weights."""

    extra_bytes: int

    def run(self) -> int:
        """Transfers the weights, collectively; returns the number of elements written into this rank's target."""


class Resharder:
    """Runs one plan between the same two sets of weights repeatedly, as after every update.

    Ranks that share host memory read the senders' weights in place; devices exchange them in rounds of at most
    `backend.bucket_bytes`.
    """

    def __init__(
        self,
        plan: Plan,
        source: Weights,
        target: Target,
        backend: Backend,
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
            self._moving = DeviceRounds(plan, source, target, backend)

    @property
    def extra_bytes(self) -> int:
        return self._moving.extra_bytes

    def run(self) -> Traffic:
        """Transfers the weights, collectively. Raises ReshardError."""
        started = time.perf_counter()
        arrived = self._moving.run()
        wanted = sum(box.size for box in self._target.boxes.values())
        if arrived != wanted:
            raise ReshardError(f"{arrived} of {wanted} elements arrived on rank {self._rank}")
        return Traffic(self._received, time.perf_counter() - started)


class _InPlace:
    """Each rank copies the parts it lacks out of its senders' shared memory."""

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
