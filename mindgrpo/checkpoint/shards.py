"""Plans which rank writes which chunk of each tensor, and writes one rank's chunks as a safetensors file with digests.

The layout that saves leaves no trace in the checkpoint. Weights are kept [in, out] and files hold [out, in]: the
copies between them go tile by tile, four times as fast as row by row. Sums of words show that two layouts hold the
same values, however these were cut.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.format import FLOAT_BYTES, StoredChunk, StoredFile
from mindgrpo.parallel.sharding import Box, Layout
from mindgrpo.weights.checksum import total_sums
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.safetensors_writer import header_of

TILE_ROWS, TILE_COLUMNS = 64, 256
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
    """Plans which rank writes which chunk of each tensor: every element once, replicas shared out evenly.

    Returns each rank's chunks, in the order of roles and tensors. `layouts` by role, all within `num_ranks`.

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


@dataclass(frozen=True)
class Shard:
    """A file that was written: `stored[i]` is where chunk i lies; `sums[i]` is the sum of its words."""

    name: str
    file: StoredFile
    stored: list[StoredChunk]
    sums: list[int]


def write_shard(
    path: Path, chunks: Sequence[Chunk], array_of: Callable[[Chunk], np.ndarray]
) -> Shard:
    """Writes and syncs a file of the float32 values that `array_of` gives of each chunk. Raises OSError."""
    sizes = {chunk.key: (chunk.box.shape, chunk.num_bytes) for chunk in chunks}
    header, offsets = header_of(sizes, "F32", "mindgrpo")
    stored, sums = [], []
    with path.open("xb") as stream:
        stream.write(header)
        for chunk, offset in zip(chunks, offsets, strict=True):
            array = array_of(chunk)
            if not array.flags.c_contiguous or array.dtype != "<f4":
                array = by_rows(array)
            digest = hashlib.sha256(array.data).hexdigest()
            stream.write(array.data)
            edges = {"start": chunk.box.start, "stop": chunk.box.stop}
            stored.append(StoredChunk(**edges, file=path.name, offset=offset, digest=digest))
            sums.append(word_sum(array))
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    digest = hashlib.sha256(header).hexdigest()
    file = StoredFile(bytes=size, header_bytes=len(header), header=digest)
    return Shard(path.name, file, stored, sums)


def shard_bytes(chunks: Iterable[Chunk]) -> int:
    """Estimates the size of a file: its header is a few hundred bytes a chunk."""
    return sum(chunk.num_bytes + 300 for chunk in chunks)


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` to `target`, of equal shapes, whatever the order of their elements."""
    if target.ndim != 2 or _is_by_rows(target) == _is_by_rows(source):
        target[...] = source
        return
    if not _is_by_rows(target):
        target, source = target.T, source.T
    rows, columns = target.shape
    for i in range(0, rows, TILE_ROWS):
        for j in range(0, columns, TILE_COLUMNS):
            tile = slice(i, i + TILE_ROWS), slice(j, j + TILE_COLUMNS)
            target[tile] = source[tile]


def by_rows(source: np.ndarray) -> np.ndarray:
    """Returns a fresh little-endian float32 copy with its elements in the order of a file."""
    fresh = np.empty(source.shape, "<f4")
    copy(fresh, source)
    return fresh


def _is_by_rows(array: np.ndarray) -> bool:
    return array.strides[0] >= array.strides[1]


def word_sum(array: np.ndarray) -> int:
    """Sums float32 values' bits: equal values have equal sums, however they were cut."""
    return int(array.view(np.uint32).sum(dtype=np.uint64))


def joined(sums: Mapping[str, int]) -> str:
    """Returns one digest of the tensors' sums of words."""
    text = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


def values_digest(weights: Weights, backend: Backend) -> str:
    """Digests a role's values, the same under every layout; all ranks together. `weights` must be in memory."""
    with weights.on_host() as host:
        views = host.hf_views.items()
        own = {name: word_sum(view.astype(np.float32, copy=False)) for name, view in views}
    return joined(total_sums(weights.layout, backend.world.gather_objects(own))[0])
