"""Writes Hugging Face weight directories: shards of safetensors and their index.

Values that the chosen dtype cannot express are an error, never written as infinities.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError, writing

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# MindFormers' index.
NAME_MAP_FILE = "param_name_map.json"
# Of a model's files, unless asked otherwise.
MAX_SHARD_BYTES = 2 << 30

_DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class SafetensorsWriter:
    """Writes tensors, in the order they are added, into shards and their index.

    A shard is kept in memory until it is full. Files get their final names in `close`, the index
    last; leaving a `with` block by an exception removes what was written. A directory that holds
    weights already is a UserError.
    """

    def __init__(
        self, directory: str | os.PathLike[str], max_shard_bytes: int, dtype: str = "float32"
    ) -> None:
        if dtype not in _DTYPE_CODES:
            raise UserError(f"the dtype {dtype!r} is not one of {', '.join(_DTYPE_CODES)}.")
        if max_shard_bytes < 1:
            raise UserError(f"max_shard_bytes is {max_shard_bytes}, but it must be positive.")
        self.directory = Path(directory)
        self._max_shard_bytes = max_shard_bytes
        self._dtype = dtype
        self._pending: dict[str, NDArray[Any]] = {}
        self._shards: dict[Path, dict[str, int]] = {}  # each tensor's name and bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        old = sorted(p.name for p in self.directory.glob("*.safetensors*") if p.name[0] != ".")
        if old:
            raise UserError(
                f"{self.directory} already holds {old[0]}, which is not overwritten; "
                f"choose another directory or remove it."
            )

    def add(self, name: str, array: NDArray[Any]) -> None:
        if name in self._pending or any(name in names for names in self._shards.values()):
            raise ValueError(f"{name} was added before")
        if array.dtype not in (np.float32, np.float16):
            raise TypeError(f"{name} has the dtype {array.dtype}, but float32 is written")
        stored = _as_stored(array, self._dtype, name)
        pending_bytes = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and pending_bytes + stored.nbytes > self._max_shard_bytes:
            self._write_pending()
        self._pending[name] = stored

    def close(self) -> list[Path]:
        """Names and returns the files, the index last if there is one."""
        if self._pending:
            self._write_pending()
        if not self._shards:
            raise ValueError("no tensor was added")
        count = len(self._shards)
        files = [self.directory / SINGLE_FILE]
        if count > 1:
            names = (f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count))
            files = [self.directory / name for name in names]
        for written, final in zip(self._shards, files, strict=True):
            os.replace(written, final)
        if count > 1:
            weight_map = {
                name: final.name
                for final, sizes in zip(files, self._shards.values(), strict=True)
                for name in sizes
            }
            total = sum(sum(sizes.values()) for sizes in self._shards.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            written = self.directory / f".{INDEX_FILE}.{os.getpid()}.part"
            written.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            files.append(written.replace(self.directory / INDEX_FILE))
        return files

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        for written in self._shards:
            written.unlink(missing_ok=True)

    def _write_pending(self) -> None:
        written = self.directory / f".{SINGLE_FILE}.{os.getpid()}.{len(self._shards)}.part"
        sizes = {name: (tensor.shape, tensor.nbytes) for name, tensor in self._pending.items()}
        self._shards[written] = {name: num_bytes for name, (_, num_bytes) in sizes.items()}
        with writing(written), written.open("wb") as stream:
            stream.write(header_of(sizes, _DTYPE_CODES[self._dtype], "pt")[0])
            for tensor in self._pending.values():
                stream.write(tensor.data)
        self._pending = {}


def header_of(
    sizes: Mapping[str, tuple[Sequence[int], int]], dtype: str, metadata: str
) -> tuple[bytes, list[int]]:
    """Returns what a safetensors file begins with, and the offset of each tensor after it.

    `sizes` has each tensor's shape and number of bytes, in the order of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": metadata}}
    offsets = [0]
    for name, (shape, num_bytes) in sizes.items():
        stop = offsets[-1] + num_bytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[-1], stop]}
        offsets.append(stop)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    return len(text).to_bytes(8, "little") + text, offsets[:-1]


def _as_stored(array: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """Copies to contiguous little-endian values of `dtype`, rounded to nearest, ties to even."""
    exact = np.array(array, dtype="<f4", order="C")
    if dtype == "float32":
        return exact
    if dtype == "float16":
        with np.errstate(over="ignore"):
            rounded: NDArray[Any] = exact.astype("<f2")
        overflown = np.isinf(rounded)
    else:
        rounded = _to_bfloat16(exact)
        overflown = (rounded & 0x7FFF) == 0x7F80
    if np.any(overflown & np.isfinite(exact)):
        raise UserError(
            f"{name} has values up to {np.abs(exact[overflown]).max():g}, which {dtype} cannot "
            f"express; save it as float32."
        )
    return rounded


def _to_bfloat16(exact: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = exact.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    nan = np.isnan(exact)
    if nan.any():
        # Rounding could carry a NaN's payload over into infinity; its upper half is kept instead.
        rounded[nan] = (bits[nan] >> 16) | 0x40
    return rounded
