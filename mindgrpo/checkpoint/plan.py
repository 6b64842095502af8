"""Plans which rank writes which chunk of each global tensor: every element once, replicas shared out evenly. Pure.

The layout that saves leaves no trace in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mindgrpo.parallel.sharding import Box, Layout

FLOAT_BYTES = 4
# A reader verifies a whole chunk to take a part of it, and holds one at a time.
CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Chunk:
    """The slice `box` of the tensor `name` among those of `role`."""

    role: str
    name: str
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.size * FLOAT_BYTES

    @property
    def key(self) -> str:
        """Its name in its file."""
        edges = zip(self.box.start, self.box.stop, strict=True)
        return f"{self.role}/{self.name}[{','.join(f'{a}:{b}' for a, b in edges)}]"


def plan_chunks(
    layouts: Mapping[str, Layout], num_ranks: int, chunk_bytes: int = CHUNK_BYTES
) -> list[list[Chunk]]:
    """Returns each rank's chunks, in the order of roles and tensors. `layouts` by role, all within `num_ranks`.

    Chunks that one rank alone holds are dealt first, then the largest: those with a choice even the loads out.
    """
    chunks: list[tuple[Chunk, list[int]]] = []
    for role, layout in layouts.items():
        for spec in layout.specs:
            ranks_of: dict[Box, list[int]] = {}
            for rank, box in layout.holders(spec.name):
                ranks_of.setdefault(box, []).append(rank)
            for box, ranks in ranks_of.items():
                chunks += [(Chunk(role, spec.name, part), ranks) for part in cut(box, chunk_bytes)]
    loads = [0] * num_ranks
    by_rank: list[list[tuple[int, Chunk]]] = [[] for _ in range(num_ranks)]
    order = sorted(enumerate(chunks), key=lambda one: (len(one[1][1]), -one[1][0].num_bytes))
    for index, (chunk, ranks) in order:
        owner = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[owner] += chunk.num_bytes
        by_rank[owner].append((index, chunk))
    return [[chunk for _, chunk in sorted(own, key=lambda one: one[0])] for own in by_rank]


def cut(box: Box, chunk_bytes: int) -> Iterator[Box]:
    """Cuts `box` along its first dim into boxes of at most `chunk_bytes`, or of one row where that is more."""
    rows = box.shape[0] if box.shape else 1
    row_bytes = box.size // max(rows, 1) * FLOAT_BYTES
    step = max(1, chunk_bytes // max(row_bytes, 1))
    if rows <= step:
        yield box
        return
    for start in range(box.start[0], box.stop[0], step):
        stop = min(start + step, box.stop[0])
        yield Box((start, *box.start[1:]), (stop, *box.stop[1:]))
