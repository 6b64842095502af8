"""Which rank writes which part of each global tensor: every element once, replicas shared out evenly. Pure.

Refuses to know values, files or where a checkpoint is read: the layout that saves leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindgrpo.parallel.sharding import Box, Layout

FLOAT_BYTES = 4
# A reader verifies a whole piece to take a part of it, and holds one at a time.
PIECE_BYTES = 32 << 20


@dataclass(frozen=True)
class Piece:
    """The part `box` of the tensor `name` among those of `role`."""

    role: str
    name: str
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.size * FLOAT_BYTES

    @property
    def key(self) -> str:
        """What it is called in its file."""
        edges = zip(self.box.start, self.box.stop, strict=True)
        return f"{self.role}/{self.name}[{','.join(f'{a}:{b}' for a, b in edges)}]"


def plan_pieces(
    layouts: Mapping[str, Layout], num_ranks: int, piece_bytes: int = PIECE_BYTES
) -> list[list[Piece]]:
    """By rank, in the order of roles and tensors. `layouts` by role; all within ranks 0 to num_ranks - 1."""
    choices: list[tuple[Piece, list[int]]] = []
    for role, layout in layouts.items():
        for spec in layout.specs:
            ranks_of: dict[Box, list[int]] = {}
            for rank, box in layout.holders(spec.name):
                ranks_of.setdefault(box, []).append(rank)
            for box, ranks in ranks_of.items():
                choices += [(Piece(role, spec.name, part), ranks) for part in cut(box, piece_bytes)]
    owners = _owners(choices, num_ranks)
    by_rank: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for (piece, _), owner in zip(choices, owners, strict=True):
        by_rank[owner].append(piece)
    return by_rank


def _owners(choices: list[tuple[Piece, list[int]]], num_ranks: int) -> list[int]:
    """What has one home first, then the largest: what is free to choose evens the rest out."""
    loads = [0] * num_ranks
    owners = [0] * len(choices)

    def urgency(index: int) -> tuple[int, int, int]:
        piece, ranks = choices[index]
        return len(ranks), -piece.num_bytes, index

    for index in sorted(range(len(choices)), key=urgency):
        piece, ranks = choices[index]
        owner = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += piece.num_bytes
        owners[index] = owner
    return owners


def cut(box: Box, piece_bytes: int) -> Iterator[Box]:
    """Parts of `box` along its first dim, each of at most `piece_bytes` if one row is."""
    rows = box.shape[0] if box.shape else 1
    row_bytes = box.size // max(rows, 1) * FLOAT_BYTES
    step = max(1, piece_bytes // max(row_bytes, 1))
    if rows <= step:
        yield box
        return
    for start in range(box.start[0], box.stop[0], step):
        stop = min(start + step, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))
