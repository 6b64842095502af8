"""Cuts the transfers between two ranks into rounds of bounded size, as regions of stored tensors.

Parts that are adjacent in memory on both sides are merged. A part that is too large for a round is cut along its first
stored dim, and a single expert that is too large along its second, which keeps contiguous parts contiguous. Both ranks
of a pair compute the same rounds.
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
    """The region of a part in the sender's stored tensor, and that in the receiver's, of equal shapes."""

    source: Region
    target: Region

    @property
    def size(self) -> int:
        return self.source.size

    def rows(self, first: int, last: int, dim: int = 0) -> Transfer:
        """Returns the slice [first, last) of both regions along `dim`, counted from the regions' starts."""
        return Transfer(*(_rows(region, first, last, dim) for region in (self.source, self.target)))


def _rows(region: Region, first: int, last: int, dim: int) -> Region:
    slices = list(region.slices)
    start = slices[dim].start
    slices[dim] = slice(start + first, start + last)
    return replace(region, slices=tuple(slices))


def transfers(moves: Iterable[Move], source: Places, target: Places) -> list[Transfer]:
    """Returns the transfers of `moves` between two ranks, whose storage `source` and `target` describe."""
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
    """Merges sorted parts of one tensor whose columns follow each other on both sides."""
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
    """Packs transfers, cut into rows, into rounds of at most `capacity` elements, but at least one row each."""
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
    """Yields parts with the dim to cut them along: 1 for experts larger than a round, which come singly, else 0."""
    shape = part.source.shape
    if len(shape) < 3 or part.size <= capacity * shape[0]:
        yield part, 0
        return
    for index in range(shape[0]):
        yield part.rows(index, index + 1), 1


def pair_capacity(plan: Plan, bucket_bytes: int) -> int:
    """Returns the elements of a round between two ranks, so that no rank sends or receives over a bucket in total."""
    source, target, _ = plan.traffic()
    pairs = np.unique(np.stack((source, target), 1), axis=0)
    most = max((np.bincount(pairs[:, side]).max(initial=0) for side in (0, 1)), default=0)
    return max(1, bucket_bytes // plan.itemsize // max(1, int(most)))


def device_buffer_bytes(plan: Plan, bucket_bytes: int) -> int:
    """Returns an upper bound of any rank's temporary memory while a plan runs between devices, in bytes.

    Contiguous parts take none.
    """
    ranks = range(plan.num_ranks)
    return max(
        (
            min(bucket_bytes, plan.sent_bytes(rank)) + min(bucket_bytes, plan.received_bytes(rank))
            for rank in ranks
        ),
        default=0,
    )
