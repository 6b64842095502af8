"""Runs a plan on one rank: what it keeps is copied, what it lacks arrives in rounds of bounded buckets.

Every element of the target arrives or it is an error. Refuses to choose who sends what: plan.py does.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mindgrpo.backend import Backend
from mindgrpo.layout.split import Box
from mindgrpo.model.weights import FLOAT_BYTES, Weights
from mindgrpo.reshard.plan import Plan, RankPlan
from mindgrpo.reshard.rounds import Piece, rounds

DEFAULT_BUCKET_BYTES = 16 << 20


class ReshardError(RuntimeError):
    """A target that did not get every one of its elements, or not the sender's bits."""


@dataclass(frozen=True)
class Traffic:
    """`bytes_received` of this rank only; `seconds` of the whole call."""

    bytes_received: int
    seconds: float


class Resharder:
    """Repeats one plan between the same two sets of weights, as after every update."""

    def __init__(
        self,
        plan: Plan,
        source: Weights,
        target: Weights,
        backend: Backend,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self._source, self._target, self._backend = source, target, backend
        # The largest row of all decides, so that every rank chooses alike.
        self._bucket_bytes = min(bucket_bytes, max(1 << 16, plan.bytes_moved or 1 << 16))
        self._bucket_bytes = max(self._bucket_bytes, _largest_row(plan) * FLOAT_BYTES)
        self._moves: RankPlan = plan.of(backend.rank)
        self._rounds: list[list[Piece]] = rounds(plan, self._bucket_bytes, rank=backend.rank)
        self._received = plan.received_bytes(backend.rank)

    def run(self) -> Traffic:
        started = time.perf_counter()
        self._source.pool.pull()
        arrived = 0
        for move in self._moves.keep:
            _view(self._target, move.name, move.box)[...] = _view(self._source, move.name, move.box)
            arrived += move.box.size
        for pieces in self._rounds:
            arrived += self._round(pieces)
        wanted = sum(box.size for box in self._target.boxes.values())
        if arrived != wanted:
            raise ReshardError(
                f"{arrived} of {wanted} elements arrived on rank {self._backend.rank}"
            )
        self._target.pool.push()
        return Traffic(self._received, time.perf_counter() - started)

    def _round(self, pieces: list[Piece]) -> int:
        rank = self._backend.rank
        incoming = [piece for piece in pieces if piece.move.target == rank]

        def fill(bucket: np.ndarray) -> None:
            for piece in pieces:
                if piece.move.source == rank:
                    source = _view(self._source, piece.move.name, piece.box)
                    _place(bucket, piece)[...] = source

        def drain(bucket_of: Callable[[int], np.ndarray]) -> None:
            for piece in incoming:
                target = _view(self._target, piece.move.name, piece.box)
                target[...] = _place(bucket_of(piece.move.source), piece)

        self._backend.transfer(self._bucket_bytes, fill, drain)
        return sum(piece.box.size for piece in incoming)


def checksums(weights: Weights, boxes: dict[str, Box] | None = None) -> dict[str, int]:
    """crc32 of each held part's bytes, [out, in] order: equal parts have equal sums under any layout."""
    return {
        name: zlib.crc32(np.ascontiguousarray(part).tobytes())
        for name, part in weights.parts.items()
        if boxes is None or name in boxes
    }


def _view(weights: Weights, name: str, box: Box) -> np.ndarray:
    return weights.parts[name][box.within(weights.boxes[name]).slices]


def _place(bucket: np.ndarray, piece: Piece) -> np.ndarray:
    start = piece.sender_offset * FLOAT_BYTES
    stop = start + piece.box.size * FLOAT_BYTES
    return bucket[start:stop].view(np.float32).reshape(piece.box.shape)


def _largest_row(plan: Plan) -> int:
    return max((part.size // part.box.shape[0] for part in plan.parts), default=1)
