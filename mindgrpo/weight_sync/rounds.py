"""Cuts a plan's moves into pieces that travel in rounds through buckets of bounded size.

In a round each sender fills one bucket. A part that several ranks want stands in it once: the
pieces share the place. A receiver may read from several buckets in a round. Refuses buckets that
cannot hold one row of a parameter, since parts are cut along their first dim only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weight_sync.plan import Move, Plan, Segment

DEFAULT_BUCKET_BYTES = 16 << 20
SMALLEST_BUCKET_BYTES = 1 << 16


@dataclass(frozen=True)
class Piece:
    move: Move
    box: Box  # the piece of the move's box, in global coordinates
    sender_offset: int  # in elements, within the sender's bucket of this round


class _Place(NamedTuple):
    round: int
    offset: int
    box: Box


def rounds(plan: Plan, bucket_bytes: int, rank: int | None = None) -> list[list[Piece]]:
    """Returns the pieces of each round, ordered by sender, offset and target.

    With `rank`, only the pieces it sends or receives; the number of rounds stays that of all
    ranks, so that all pass the same barriers.
    """
    _refuse_small_bucket(plan, bucket_bytes)
    capacity = bucket_bytes // plan.itemsize
    result: list[list[Piece]] = []
    for sender, targets_by_part in _gifts(plan):
        sent = [plan.segments[index] for index in targets_by_part]
        for part, targets, places in zip(
            sent, targets_by_part.values(), _pack(sent, capacity), strict=True
        ):
            seen = targets if rank in (None, sender) else [t for t in targets if t == rank]
            moves = [Move(part.name, sender, target, part.box) for target in seen]
            for slot in places:
                result.extend([] for _ in range(slot.round + 1 - len(result)))
                result[slot.round] += [Piece(move, slot.box, slot.offset) for move in moves]
    return result


def _gifts(plan: Plan) -> Iterator[tuple[int, dict[int, list[int]]]]:
    """Yields each sender with the parts that it sends and to whom, in the order of ranks and parts."""
    rows = np.flatnonzero(plan.source_of_move != plan.target_of_move)
    rows = rows[np.argsort(plan.source_of_move[rows], kind="stable")]
    columns = (plan.source_of_move, plan.part_of_move, plan.target_of_move)
    gifts: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for source, part, target in zip(*(column[rows].tolist() for column in columns), strict=True):
        gifts[source][part].append(target)
    yield from gifts.items()


def _pack(sent: Sequence[Segment], capacity: int) -> Iterator[list[_Place]]:
    """Fills one sender's buckets row by row, each to the brim before the next is begun."""
    current, used = 0, 0
    for part in sent:
        places = []
        first, last, row_size = _rows(part)
        while first < last:
            if capacity - used < row_size:
                current, used = current + 1, 0
            taken = min(last - first, (capacity - used) // row_size)
            places.append(_Place(current, used, _cut_rows(part.box, first, first + taken)))
            first, used = first + taken, used + taken * row_size
        yield places


def _rows(part: Segment) -> tuple[int, int, int]:
    """Returns the part's first row, the end of its rows, and the elements of a row; a scalar is one row."""
    first, last = (part.box.start[0], part.box.stop[0]) if part.box.start else (0, 1)
    return first, last, part.size // (last - first)


def _cut_rows(box: Box, first: int, last: int) -> Box:
    if not box.start:
        return box
    return Box((first, *box.start[1:]), (last, *box.stop[1:]))


def _refuse_small_bucket(plan: Plan, bucket_bytes: int) -> None:
    if not plan.segments:
        return
    widest = max(plan.segments, key=lambda part: _rows(part)[2])
    need = _rows(widest)[2] * plan.itemsize
    if need > bucket_bytes:
        raise UserError(
            f"a reshard bucket of {bucket_bytes} bytes cannot hold one row of {widest.name}; "
            f"raise it to {need} bytes or more."
        )


def largest_row(plan: Plan) -> int:
    """Counts the elements of the longest row that moves."""
    return max((part.size // part.box.shape[0] for part in plan.segments), default=1)


def device_bucket_bytes(plan: Plan, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> int:
    """Returns a bucket's size between devices: the largest row of all ranks decides, so that all choose alike."""
    size = min(bucket_bytes, max(SMALLEST_BUCKET_BYTES, plan.bytes_moved))
    return max(size, largest_row(plan) * plan.itemsize)


def device_buffer_bytes(plan: Plan) -> int:
    """Counts the bytes that a transfer between devices takes beside the weights, on the rank that needs most.

    What a rank keeps is copied at once; each rank that it sends to or receives from adds a bucket at most.
    """
    source, target, _ = plan.traffic()
    size = device_bucket_bytes(plan)
    pairs = np.unique(np.stack((source, target), 1), axis=0)
    peers = [np.bincount(pairs[:, side], minlength=plan.num_ranks) for side in (0, 1)]
    most = 0
    for rank in range(plan.num_ranks):
        sent = min(size * int(peers[0][rank]), plan.sent_bytes(rank))
        received = min(size * int(peers[1][rank]), plan.received_bytes(rank))
        most = max(most, plan.kept_bytes(rank) + sent + received)
    return most
