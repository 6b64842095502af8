"""Writes one rank's chunks as a safetensors file, with digests, and reads chunks back from such files.

Weights are kept [in, out] and files hold [out, in]: the copies between them go tile by tile, four times as fast as
row by row. Sums of words show that two layouts hold the same values, however these were cut.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.format import DamagedCheckpoint, StoredChunk, StoredFile
from mindgrpo.checkpoint.plan import Chunk, plan_chunks
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.safetensors_writer import header_of

SUM_MODULUS = 1 << 64
TILE_ROWS, TILE_COLUMNS = 64, 256


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
            start, stop = chunk.box.start, chunk.box.stop
            stored.append(
                StoredChunk(start=start, stop=stop, file=path.name, offset=offset, digest=digest)
            )
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


class ShardReader:
    """The files of one checkpoint; the header of each is verified when it is first read from."""

    def __init__(self, folder: Path, files: dict[str, StoredFile]) -> None:
        self._folder, self._files = folder, files
        self._verified: set[str] = set()

    def read(self, chunk: StoredChunk) -> np.ndarray:
        """Returns a fresh float32 array of the chunk's shape. Raises DamagedCheckpoint."""
        path, file = self._folder / chunk.file, self._files[chunk.file]
        try:
            with path.open("rb") as stream:
                if chunk.file not in self._verified:
                    if hashlib.sha256(stream.read(file.header_bytes)).hexdigest() != file.header:
                        raise _changed(path, "its header is not the one that was")
                    self._verified.add(chunk.file)
                stream.seek(file.header_bytes + chunk.offset)
                values = np.empty(chunk.box.shape, "<f4")
                num_read = stream.readinto(values.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
        if num_read != values.nbytes or hashlib.sha256(values.data).hexdigest() != chunk.digest:
            raise _changed(
                path, f"bytes {chunk.offset} to {chunk.end} of its data are not those that were"
            )
        return values


def _changed(path: Path, what: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{path} is damaged: {what} written; use an earlier checkpoint.")


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


def values_of(chunk: Chunk, weights: Weights) -> np.ndarray:
    """Views a chunk's values in the weights of the rank that writes it."""
    return weights.hf_views[chunk.name][chunk.box.within(weights.boxes[chunk.name]).slices]


def values_digest(weights: Weights, backend: Backend) -> str:
    """Digests a role's values, the same under every layout; all ranks together. `weights` must be in memory."""
    own: dict[str, int] = {}
    for chunk in plan_chunks({"values": weights.layout}, backend.world_size)[backend.rank]:
        words = word_sum(values_of(chunk, weights))
        own[chunk.name] = (own.get(chunk.name, 0) + words) % SUM_MODULUS
    total: dict[str, int] = {}
    for sums in backend.world.gather_objects(own):
        for name, words in sums.items():
            total[name] = (total.get(name, 0) + words) % SUM_MODULUS
    return joined(total)
