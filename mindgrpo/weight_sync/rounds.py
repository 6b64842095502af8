"""Cuts what moves between two ranks into rounds of bounded size, in the form in which both sides store it.

Parts that are stored side by side on both sides move as one; a part that is too large for a round is cut along its
first stored dim, and an expert that is by itself too large along its second, and so what was contiguous still is. The
two ranks of a pair compute the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np

from mindgrpo.weight_sync.plan import Move, Plan
from mindgrpo.weights.local_weights import Places, Region


@dataclass(frozen=True)
class Transfer:
    """A part of a tensor as the sender stores it, and where the receiver stores the same; both have one shape."""

    source: Region
    target: Region

    @property
    def size(self) -> int:
        return self.source.size

    def rows(self, first: int, last: int, dim: int = 0) -> Transfer:
        """Returns the part from row `first` of the stored tensors' part to row `last`, which is not in it."""
        return Transfer(*(_rows(region, first, last, dim) for region in (self.source, self.target)))


def _rows(region: Region, first: int, last: int, dim: int) -> Region:
    slices = list(region.slices)
    start = slices[dim].start
    slices[dim] = slice(start + first, start + last)
    return replace(region, slices=tuple(slices))


def transfers(moves: Iterable[Move], source: Places, target: Places) -> list[Transfer]:
    """Returns what carries `moves` from one rank, which stores by `source`, to one that stores by `target`."""
    moving = [Transfer(source.region(m.name, m.box), target.region(m.name, m.box)) for m in moves]
    joined: list[Transfer] = []
    for _, own in groupby(sorted(moving, key=_place), _tensors):
        joined += _joined(list(own))
    return joined


def _tensors(part: Transfer) -> tuple[str, str]:
    return part.source.key, part.target.key


def _place(part: Transfer) -> tuple[object, ...]:
    starts = [tuple(one.start for one in part.source.slices)]
    return *_tensors(part), *starts


def _joined(moving: Sequence[Transfer]) -> Iterator[Transfer]:
    """Yields parts of one tensor, in order, as few as they make up: those whose columns follow each other are one."""
    current = moving[0]
    for part in moving[1:]:
        sides = [(current.source, part.source), (current.target, part.target)]
        if all(_follows(*side) for side in sides):
            current = Transfer(*(_both(*side) for side in sides))
        else:
            yield current
            current = part
    yield current


def _follows(one: Region, other: Region) -> bool:
    ends = one.slices[-1].stop, other.slices[-1].start
    return one.slices[:-1] == other.slices[:-1] and ends[0] == ends[1]


def _both(one: Region, other: Region) -> Region:
    columns = slice(one.slices[-1].start, other.slices[-1].stop)
    return replace(one, slices=(*one.slices[:-1], columns))


def in_rounds(moving: Iterable[Transfer], capacity: int) -> list[list[Transfer]]:
    """Fills rounds of `capacity` elements in turn, each of at least one row."""
    rounds: list[list[Transfer]] = []
    free = 0
    for part, dim in chain.from_iterable(_with_dims(part, capacity) for part in moving):
        num_rows = part.source.shape[dim]
        width, first = part.size // num_rows, 0
        while first < num_rows:
            if not rounds or free < width:
                rounds.append([])
                free = capacity
            taken = min(num_rows - first, max(1, free // width))
            rounds[-1].append(part.rows(first, first + taken, dim))
            first, free = first + taken, free - taken * width
    return rounds


def _with_dims(part: Transfer, capacity: int) -> Iterator[tuple[Transfer, int]]:
    """Yields parts with the dim that they are to be cut along: experts that are larger than a round one by one."""
    shape = part.source.shape
    if len(shape) < 3 or part.size <= capacity * shape[0]:
        yield part, 0
        return
    for index in range(shape[0]):
        yield part.rows(index, index + 1), 1


def pair_capacity(plan: Plan, bucket_bytes: int) -> int:
    """Returns the elements of a round between two ranks, where no rank sends or receives more than a bucket in all."""
    source, target, _ = plan.traffic()
    pairs = np.unique(np.stack((source, target), 1), axis=0)
    most = max((np.bincount(pairs[:, side]).max(initial=0) for side in (0, 1)), default=0)
    return max(1, bucket_bytes // plan.itemsize // max(1, int(most)))


def device_buffer_bytes(plan: Plan, bucket_bytes: int) -> int:
    """Returns the most bytes beside the weights on the rank that needs most, while a plan runs between devices.

    What lies in one piece on both sides takes none.
    """
    ranks = range(plan.num_ranks)
    return max(
        (
            min(bucket_bytes, plan.sent_bytes(rank)) + min(bucket_bytes, plan.received_bytes(rank))
            for rank in ranks
        ),
        default=0,
    )
