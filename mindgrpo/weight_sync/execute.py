"""Runs a plan on one rank: what it keeps is copied, what it lacks is read from its senders or arrives in rounds.

Every element of the target arrives or it is an error.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from mindgrpo.backend.contract import Backend, PeerView
from mindgrpo.backend.copies import Copies
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.plan import Plan, RankPlan
from mindgrpo.weight_sync.rounds import Piece, rounds
from mindgrpo.weights.local_weights import FLOAT_BYTES, Weights, is_transposed

DEFAULT_BUCKET_BYTES = 16 << 20


class ReshardError(RuntimeError):
    """A target that did not get every one of its elements, or not the sender's bits."""


@dataclass(frozen=True)
class Traffic:
    """`bytes_received` of this rank only; `seconds` of the whole call."""

    bytes_received: int
    seconds: float


class Resharder:
    """Repeats one plan between the same two sets of weights, as after every update.

    Reads the senders' weights where they are, if ranks can; else they travel in rounds of buckets of `bucket_bytes`,
    which is then the extra memory a rank needs: `extra_bytes`.
    """

    def __init__(
        self,
        plan: Plan,
        source: Weights,
        target: Weights,
        backend: Backend,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        in_place: bool = True,
    ) -> None:
        self._source, self._target, self._backend = source, target, backend
        moves = plan.of(backend.rank)
        self._received = plan.received_bytes(backend.rank)
        self._kept = Copies(
            [
                (_view(target, move.name, move.box), _view(source, move.name, move.box))
                for move in moves.keep
            ]
        )
        peers = backend.peer_pools(source.pool) if in_place else None
        self._moving: _InPlace | _InRounds
        if peers is not None:
            self._moving = _InPlace(moves, source, target, backend, peers)
        else:
            self._moving = _InRounds(plan, source, target, backend, bucket_bytes)

    @property
    def extra_bytes(self) -> int:
        return self._moving.extra_bytes

    def run(self) -> Traffic:
        """All ranks together. Raises ReshardError."""
        started = time.perf_counter()
        self._source.pool.pull()
        arrived = self._moving.run(self._kept)
        wanted = sum(box.size for box in self._target.boxes.values())
        if arrived != wanted:
            raise ReshardError(
                f"{arrived} of {wanted} elements arrived on rank {self._backend.rank}"
            )
        self._target.pool.push()
        return Traffic(self._received, time.perf_counter() - started)


class _InPlace:
    """Each rank copies what it lacks out of the memory of those that have it."""

    extra_bytes = 0

    def __init__(
        self,
        moves: RankPlan,
        source: Weights,
        target: Weights,
        backend: Backend,
        peers: Mapping[int, PeerView],
    ) -> None:
        self._backend = backend
        senders = {move.source for move in moves.receive}
        self._peers = [peers[rank] for rank in sorted(senders)]
        holders = {rank: Weights.of_peer(source.layout, rank, peers[rank]) for rank in senders}
        self._wanted = Copies(
            [
                (_view(target, m.name, m.box), _view(holders[m.source], m.name, m.box))
                for m in moves.receive
            ]
        )

    def run(self, kept: Copies) -> int:
        self._backend.world.barrier()
        kept.run()
        self._wanted.run()
        self._backend.world.barrier()
        for peer in self._peers:
            peer.forget()
        return kept.num_elements + self._wanted.num_elements


class _InRounds:
    """Senders fill buckets of bounded size, round by round, and receivers empty them."""

    def __init__(
        self, plan: Plan, source: Weights, target: Weights, backend: Backend, bucket_bytes: int
    ) -> None:
        self._source, self._target, self._backend = source, target, backend
        # The largest row of all decides, so that every rank chooses alike.
        size = min(bucket_bytes, max(1 << 16, plan.bytes_moved or 1 << 16))
        self.extra_bytes = max(size, _largest_row(plan) * FLOAT_BYTES)
        self._rounds: list[list[Piece]] = rounds(plan, self.extra_bytes, rank=backend.rank)
        # Made in the first run, when the buckets are known.
        self._fills: list[Copies] = []
        self._drains: list[Copies] = []

    def run(self, kept: Copies) -> int:
        kept.run()
        return kept.num_elements + sum(self._round(i) for i in range(len(self._rounds)))

    def _round(self, index: int) -> int:
        rank, chunks = self._backend.rank, self._rounds[index]

        def fill(bucket: np.ndarray) -> int:
            if index == len(self._fills):
                sent = [piece for piece in chunks if piece.move.source == rank]
                pairs = [(_place(bucket, p), _view(self._source, p.move.name, p.box)) for p in sent]
                self._fills.append(Copies(pairs, read_soon=True))
            self._fills[index].run()
            return max((_stop(piece) for piece in chunks if piece.move.source == rank), default=0)

        def drain(bucket_of: Callable[[int], np.ndarray]) -> None:
            if index == len(self._drains):
                wanted = [piece for piece in chunks if piece.move.target == rank]
                pairs = [
                    (_view(self._target, p.move.name, p.box), _place(bucket_of(p.move.source), p))
                    for p in wanted
                ]
                self._drains.append(Copies(pairs))
            self._drains[index].run()

        self._backend.transfer(self.extra_bytes, fill, drain)
        return self._drains[index].num_elements


def checksums(weights: Weights, boxes: dict[str, Box] | None = None) -> dict[str, int]:
    """crc32 of each held part's bytes, [out, in] order: equal parts have equal sums under any layout."""
    return {
        name: zlib.crc32(np.ascontiguousarray(part).tobytes())
        for name, part in weights.hf_views.items()
        if boxes is None or name in boxes
    }


def _view(weights: Weights, name: str, box: Box) -> np.ndarray:
    return weights.hf_views[name][box.within(weights.boxes[name]).slices]


def _stop(piece: Piece) -> int:
    return (piece.sender_offset + piece.box.size) * FLOAT_BYTES


def _place(bucket: np.ndarray, piece: Piece) -> np.ndarray:
    flat = bucket[piece.sender_offset * FLOAT_BYTES : _stop(piece)].view(np.float32)
    # In the order in which sender and receiver store it, so that both copy whole runs.
    if is_transposed(piece.move.name, len(piece.box.shape)):
        return flat.reshape(piece.box.shape[::-1]).T
    return flat.reshape(piece.box.shape)


def _largest_row(plan: Plan) -> int:
    return max((part.size // part.box.shape[0] for part in plan.segments), default=1)
