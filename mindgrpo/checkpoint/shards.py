"""One rank's pieces as one safetensors file, digested on their way to the disk, and pieces read back from such files.

Refuses bytes that are not those that were written, naming the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.checkpoint.format import DamagedCheckpoint, StoredFile, StoredPiece
from mindgrpo.checkpoint.plan import Piece, plan_pieces
from mindgrpo.weights.local_weights import Weights

ALIGN_BYTES = 8
SUM_MODULUS = 1 << 64


@dataclass(frozen=True)
class Shard:
    """`stored[i]` is where piece i lies; `sums[i]` is the sum of its words."""

    name: str
    file: StoredFile
    stored: list[StoredPiece]
    sums: list[int]


def word_sum(array: np.ndarray) -> int:
    """Of float32 values' bits: equal values have equal sums, however they were cut."""
    return int(array.view(np.uint32).sum(dtype=np.uint64))


def write_shard(
    path: Path, pieces: Sequence[Piece], array_of: Callable[[Piece], np.ndarray]
) -> Shard:
    """On the disk when it returns; `array_of` gives each piece's float32 values. Raises OSError."""
    header, offsets = _header(pieces)
    stored, sums = [], []
    with path.open("xb") as stream:
        stream.write(header)
        for piece, offset in zip(pieces, offsets, strict=True):
            array = array_of(piece)
            if not array.flags.c_contiguous or array.dtype != "<f4":
                array = by_rows(array)
            digest = hashlib.sha256(array.data).hexdigest()
            stream.write(array.data)
            box = piece.box
            stored.append(
                StoredPiece(
                    start=box.start, stop=box.stop, file=path.name, offset=offset, digest=digest
                )
            )
            sums.append(word_sum(array))
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    digest = hashlib.sha256(header).hexdigest()
    return Shard(
        path.name, StoredFile(bytes=size, header_bytes=len(header), header=digest), stored, sums
    )


def shard_bytes(pieces: Iterable[Piece]) -> int:
    """What the file takes, nearly: its header is a few hundred bytes a piece."""
    return sum(piece.num_bytes + 300 for piece in pieces)


def _header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    entries: dict[str, object] = {"__metadata__": {"format": "mindgrpo"}}
    offsets: list[int] = []
    offset = 0
    for piece in pieces:
        offsets.append(offset)
        place = [offset, offset + piece.num_bytes]
        entries[piece.key] = {
            "dtype": "F32",
            "shape": list(piece.box.shape),
            "data_offsets": place,
        }
        offset = place[1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text, offsets


class ShardReader:
    """The files of one checkpoint; the header of each is verified when it is first read from."""

    def __init__(self, folder: Path, files: dict[str, StoredFile]) -> None:
        self._folder, self._files = folder, files
        self._seen: set[str] = set()

    def read(self, piece: StoredPiece) -> np.ndarray:
        """float32 [box.shape], a fresh array. Raises DamagedCheckpoint."""
        path = self._folder / piece.file
        file = self._files[piece.file]
        try:
            with path.open("rb") as stream:
                if piece.file not in self._seen:
                    self._check_header(path, stream.read(file.header_bytes), file)
                stream.seek(file.header_bytes + piece.offset)
                values = np.empty(piece.box.shape, "<f4")
                got = stream.readinto(values.reshape(-1).view(np.uint8).data)
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read ({error.strerror}).") from None
        if got != values.nbytes or hashlib.sha256(values.data).hexdigest() != piece.digest:
            raise DamagedCheckpoint(
                f"{path} is damaged: bytes {piece.offset} to {piece.offset + values.nbytes} of its data are not those "
                "that were written; use an earlier checkpoint."
            )
        return values

    def _check_header(self, path: Path, header: bytes, file: StoredFile) -> None:
        if hashlib.sha256(header).hexdigest() != file.header:
            raise DamagedCheckpoint(
                f"{path} is damaged: its header is not the one that was written; use an earlier checkpoint."
            )
        self._seen.add(path.name)


ROWS, COLUMNS = 64, 256


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """target = source, of equal shapes."""
    if target.ndim != 2 or _is_by_rows(target) == _is_by_rows(source):
        target[...] = source
        return
    if not _is_by_rows(target):
        target, source = target.T, source.T
    rows, columns = target.shape
    for i in range(0, rows, ROWS):
        for j in range(0, columns, COLUMNS):
            target[i : i + ROWS, j : j + COLUMNS] = source[i : i + ROWS, j : j + COLUMNS]


def by_rows(source: np.ndarray) -> np.ndarray:
    """A fresh little-endian float32 copy with its elements in the order of a file."""
    fresh = np.empty(source.shape, "<f4")
    copy(fresh, source)
    return fresh


def _is_by_rows(array: np.ndarray) -> bool:
    return array.strides[0] >= array.strides[1]


def joined(sums: Mapping[str, int]) -> str:
    """One digest of the tensors' sums of words."""
    text = "".join(f"{name} {sums[name]}\n" for name in sorted(sums))
    return hashlib.sha256(text.encode()).hexdigest()


def values_digest(weights: Weights, backend: Backend) -> str:
    """Each element once, whatever ranks hold it; `weights` must be at hand."""
    role = "values"
    own: dict[str, int] = {}
    plan = plan_pieces({role: weights.layout}, backend.world_size)
    for piece in plan[backend.rank]:
        part = weights.parts[piece.name][piece.box.within(weights.boxes[piece.name]).slices]
        own[piece.name] = (own.get(piece.name, 0) + word_sum(part)) % SUM_MODULUS
    total: dict[str, int] = {}
    for sums in backend.world.gather_objects(own):
        for name, words in sums.items():
            total[name] = (total.get(name, 0) + words) % SUM_MODULUS
    return joined(total)
