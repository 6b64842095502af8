"""Plans the reshard of parameters from one layout to another: which rank sends which part to which rank.

A rank is never sent an element that it already holds, receives every other element exactly once, and replicas share
the sending. The plan depends on its two layouts alone, so that every rank computes the same one. It touches no device
and no weights, and refuses layouts of different parameters.

`busiest_link` estimates a plan's duration on given links: a lower bound without latency and packing. A link connects a
host to the other hosts and carries its bandwidth in each direction at once; traffic inside a host has a bandwidth of
its own or counts as free.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, Ranks, Rule

GIGA = 10**9


@dataclass(frozen=True)
class Segment:
    """A box of a parameter that neither the source's nor the target's layout cuts, so that it moves whole."""

    name: str
    box: Box
    size: int


@dataclass(frozen=True)
class Move:
    name: str
    source: int
    target: int
    box: Box  # in global coordinates

    @property
    def size(self) -> int:
        return self.box.size

    @property
    def local(self) -> bool:
        return self.source == self.target


@dataclass(frozen=True)
class RankPlan:
    """One rank's moves in parameter order: parts it already holds, parts it receives, parts it sends."""

    keep: list[Move]
    receive: list[Move]
    send: list[Move]


@dataclass(frozen=True, eq=False)
class Plan:
    """All moves, as three int32 arrays [moves] of segment index, source rank and target rank, to save memory.

    They are sorted by segment, then by target. `num_ranks` covers both meshes.
    """

    source: Layout
    target: Layout
    itemsize: int
    segments: tuple[Segment, ...]
    part_of_move: NDArray[np.int32] = field(repr=False)
    source_of_move: NDArray[np.int32] = field(repr=False)
    target_of_move: NDArray[np.int32] = field(repr=False)

    @property
    def num_ranks(self) -> int:
        return max(self.source.mesh.end, self.target.mesh.end)

    @cached_property
    def _bytes_of_move(self) -> NDArray[np.int64]:
        sizes = np.array([part.size for part in self.segments], dtype=np.int64)
        return sizes[self.part_of_move] * self.itemsize

    @cached_property
    def _travels(self) -> NDArray[np.bool_]:
        return np.not_equal(self.source_of_move, self.target_of_move)

    def traffic(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Returns arrays (source rank, target rank, bytes), [moves] each, of the moves between different ranks."""
        rows = self._travels
        return self.source_of_move[rows], self.target_of_move[rows], self._bytes_of_move[rows]

    def _sum_by_rank(self, ranks: NDArray[np.int32]) -> NDArray[np.int64]:
        totals = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(totals, ranks[self._travels], self._bytes_of_move[self._travels])
        return totals

    @cached_property
    def _received(self) -> NDArray[np.int64]:
        return self._sum_by_rank(self.target_of_move)

    @cached_property
    def _sent(self) -> NDArray[np.int64]:
        return self._sum_by_rank(self.source_of_move)

    def received_bytes(self, rank: int) -> int:
        return int(self._received[rank]) if rank < self.num_ranks else 0

    def sent_bytes(self, rank: int) -> int:
        return int(self._sent[rank]) if rank < self.num_ranks else 0

    @cached_property
    def _kept(self) -> NDArray[np.int64]:
        totals = np.zeros(self.num_ranks, dtype=np.int64)
        stays = ~self._travels
        np.add.at(totals, self.target_of_move[stays], self._bytes_of_move[stays])
        return totals

    def kept_bytes(self, rank: int) -> int:
        """Returns the bytes of the rank's target that it already holds as a source."""
        return int(self._kept[rank]) if rank < self.num_ranks else 0

    @property
    def bytes_moved(self) -> int:
        return int(self._received.sum())

    @cached_property
    def lower_bound(self) -> int:
        """Returns the bytes that target ranks do not hold yet, computed from the layouts rather than the moves."""
        known: dict[tuple[Rule, Rule], int] = {}
        total = 0
        for spec in self.target.specs:
            rules = self.source.rule_of(spec.name), self.target.rule_of(spec.name)
            if rules not in known:
                known[rules] = _missing_elements(self.source, self.target, spec.name)
            total += known[rules]
        return total * self.itemsize

    def moves_in(self, rank: int) -> list[Move]:
        """Returns all moves into the rank's target boxes, including those from itself."""
        return self._moves(np.flatnonzero(self.target_of_move == rank))

    def of(self, rank: int) -> RankPlan:
        moves = self.moves_in(rank)
        sent = np.flatnonzero((self.source_of_move == rank) & self._travels)
        return RankPlan(
            keep=[move for move in moves if move.local],
            receive=[move for move in moves if not move.local],
            send=self._moves(sent),
        )

    def _moves(self, rows: NDArray[np.intp]) -> list[Move]:
        columns = (self.part_of_move, self.source_of_move, self.target_of_move)
        part_ids, sources, targets = (column[rows].tolist() for column in columns)
        return [
            Move(self.segments[part].name, source, target, self.segments[part].box)
            for part, source, target in zip(part_ids, sources, targets, strict=True)
        ]


def plan_reshard(source: Layout, target: Layout, itemsize: int = 4) -> Plan:
    _refuse_different_models(source, target)
    boxes = _BoxCutter()
    demands = [demand for spec in target.specs for demand in _demands(source, target, spec, boxes)]
    senders = _choose_senders(demands, max(source.mesh.end, target.mesh.end))
    counts = [len(demand.wanted_by) for demand in demands]
    return Plan(
        source=source,
        target=target,
        itemsize=itemsize,
        segments=tuple(demand.part for demand in demands),
        part_of_move=np.repeat(np.arange(len(demands), dtype=np.int32), counts),
        source_of_move=_column(senders, sum(counts)),
        target_of_move=_column([demand.wanted_by for demand in demands], sum(counts)),
    )


class _Demand(NamedTuple):
    part: Segment
    held_by: Ranks
    wanted_by: Ranks


class _BoxCutter:
    """Cuts target boxes at the edges of source boxes, and caches the cuts, which repeat from layer to layer."""

    def __init__(self) -> None:
        self._known: dict[tuple[Box, tuple[Box, ...]], list[tuple[Box, int, Box]]] = {}

    def cut(self, wanted: Box, held: tuple[Box, ...]) -> list[tuple[Box, int, Box]]:
        """Returns (part, its size, the held box that contains it); the parts tile `wanted` exactly."""
        if (key := (wanted, held)) not in self._known:
            cuts = [(wanted.intersect(box), box) for box in held]
            cut = [(part, part.size, box) for part, box in cuts if part is not None]
            if sum(size for _, size, _ in cut) != wanted.size:
                raise AssertionError(f"{wanted} is not covered exactly once by {held}")
            self._known[key] = cut
        return self._known[key]


def _demands(
    source: Layout, target: Layout, spec: ParameterSpec, boxes: _BoxCutter
) -> Iterator[_Demand]:
    held = source.ranks_by_box(spec.name)
    for wanted, wanted_by in target.ranks_by_box(spec.name).items():
        for box, size, home in boxes.cut(wanted, tuple(held)):
            yield _Demand(Segment(spec.name, box, size), held[home], wanted_by)


def _choose_senders(demands: Sequence[_Demand], num_ranks: int) -> list[list[int]]:
    """Chooses the sender of each part for each receiver: the receiver itself if it holds it, else the least loaded.

    Large parts are assigned first, so that small ones even out the load.
    """
    load = [0] * num_ranks
    senders: list[list[int]] = [[] for _ in demands]
    for index in sorted(range(len(demands)), key=lambda index: -demands[index].part.size):
        demand = demands[index]
        idle = [(load[rank], rank) for rank in demand.held_by]
        heapq.heapify(idle)
        own = set(demand.held_by)
        for rank in demand.wanted_by:
            if rank in own:
                senders[index].append(rank)
                continue
            carried, sender = idle[0]
            senders[index].append(sender)
            heapq.heapreplace(idle, (carried + demand.part.size, sender))
        for carried, rank in idle:
            load[rank] = carried
    return senders


def _missing_elements(source: Layout, target: Layout, name: str) -> int:
    held = {box: frozenset(ranks) for box, ranks in source.ranks_by_box(name).items()}
    missing = 0
    for wanted, ranks in target.ranks_by_box(name).items():
        missing += wanted.size * len(ranks)
        for own, owners in held.items():
            common = wanted.intersect(own)
            if common is not None:
                missing -= common.size * len(owners.intersection(ranks))
    return missing


def _refuse_different_models(source: Layout, target: Layout) -> None:
    for name in {**source.by_name, **target.by_name}:
        shapes = [
            layout.by_name[name].shape if name in layout.by_name else None
            for layout in (source, target)
        ]
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{name} has the shape {shapes[0]} in the layout {source.mesh} and {shapes[1]} in "
                f"{target.mesh}, but a reshard needs the same parameters in both; use the same "
                f"model configuration for training and generation."
            )


def _column(ranks: Sequence[Sequence[int]], length: int) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(ranks), dtype=np.int32, count=length)


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes a second and direction. `ranks_per_host` ranks, in rank order, share a host and its link."""

    bytes_per_s: float
    ranks_per_host: int = 1
    local_bytes_per_s: float | None = (
        None  # of each rank, to and from the others of its host; None: free
    )


@dataclass(frozen=True)
class Busiest:
    """`who` carries `num_bytes` in `direction` ("sends" or "receives") and needs `seconds` for it."""

    seconds: float
    who: str
    direction: str
    num_bytes: int


def busiest_link(plan: Plan, links: Links) -> Busiest:
    """Finds the slowest of all links between and inside hosts, which work concurrently."""
    source, target, sizes = plan.traffic()
    hosts = -(-plan.num_ranks // links.ranks_per_host)
    source_host, target_host = source // links.ranks_per_host, target // links.ranks_per_host
    leaves = source_host != target_host
    name = "rank" if links.ranks_per_host == 1 else "host"
    loads = [
        _most(name, "sends", source_host[leaves], sizes[leaves], hosts, links.bytes_per_s),
        _most(name, "receives", target_host[leaves], sizes[leaves], hosts, links.bytes_per_s),
    ]
    if links.local_bytes_per_s is not None:
        stays, speed = ~leaves, links.local_bytes_per_s
        loads += [
            _most("rank", "sends", source[stays], sizes[stays], plan.num_ranks, speed),
            _most("rank", "receives", target[stays], sizes[stays], plan.num_ranks, speed),
        ]
    return max(loads, key=lambda one: one.seconds)


def _most(
    name: str,
    direction: str,
    places: NDArray[np.int32],
    sizes: NDArray[np.int64],
    num_places: int,
    bytes_per_s: float,
) -> Busiest:
    totals = np.zeros(num_places, np.int64)
    np.add.at(totals, places, sizes)
    busiest = int(totals.argmax())
    num_bytes = int(totals[busiest])
    return Busiest(num_bytes / bytes_per_s, f"{name} {busiest}", direction, num_bytes)
