"""Moves weights from device to device, in rounds of bounded size, without the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mindspore import ops

from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.rounds import Piece, device_bucket_bytes, rounds
from mindgrpo.weights.host_tensors import HostTensors
from mindgrpo.weights.local_weights import Weights

# What a rank may receive into.
Target = Weights | HostTensors


@dataclass
class _Round:
    """What goes to each rank and what comes from each, in the order in which both sides lay it out."""

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
