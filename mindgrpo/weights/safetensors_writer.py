"""Hugging Face weight directories, written: shards of safetensors and their index.

Never writes over a model that is already there, and refuses values that the chosen dtype cannot
express rather than writing infinities.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# MindFormers' index.
NAME_MAP_FILE = "param_name_map.json"

_DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class SafetensorsWriter:
    """Writes tensors, in the order they are added, into shards and their index.

    A shard is kept in memory until it is full. Nothing has its final name before `close`, and
    the index comes last; leaving a `with` block by an exception removes what was written.
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
        self._shards: list[tuple[Path, list[str]]] = []
        self._total_bytes = 0
        self._names: set[str] = set()
        self._closed = False
        self.directory.mkdir(parents=True, exist_ok=True)
        old = sorted(p.name for p in self.directory.glob("*.safetensors*") if p.name[0] != ".")
        if old:
            raise UserError(
                f"{self.directory} already holds {old[0]}, which is not written over; "
                f"choose another directory or remove it."
            )

    def add(self, name: str, array: NDArray[Any]) -> None:
        if name in self._names:
            raise ValueError(f"{name} was added before")
        if array.dtype not in (np.float32, np.float16):
            raise TypeError(f"{name} has the dtype {array.dtype}, but float32 is written")
        stored = _as_stored(array, self._dtype, name)
        pending_bytes = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and pending_bytes + stored.nbytes > self._max_shard_bytes:
            self._flush()
        self._names.add(name)
        self._pending[name] = stored

    def close(self) -> list[Path]:
        """Gives the files their names; the returned list ends with the index, if there is one."""
        self._flush()
        if not self._shards:
            raise ValueError("no tensor was added")
        count = len(self._shards)
        files: list[Path] = []
        weight_map: dict[str, str] = {}
        for number, (written, names) in enumerate(self._shards, start=1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else SINGLE_FILE
            os.replace(written, self.directory / final)
            files.append(self.directory / final)
            weight_map.update(dict.fromkeys(names, final))
        self._shards, self._closed = [], True
        if count > 1:
            files.append(self._write_index(weight_map))
        return files

    def discard(self) -> None:
        """Removes what has been written and not yet been named."""
        for written, _ in self._shards:
            written.unlink(missing_ok=True)
        self._shards, self._pending = [], {}

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.discard()
        elif not self._closed:
            self.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        written = self.directory / f".{SINGLE_FILE}.{os.getpid()}.{len(self._shards)}.part"
        self._shards.append((written, list(self._pending)))
        with written.open("wb") as stream:
            _write_shard(stream, self._pending, _DTYPE_CODES[self._dtype])
        self._total_bytes += sum(tensor.nbytes for tensor in self._pending.values())
        self._pending = {}

    def _write_index(self, weight_map: dict[str, str]) -> Path:
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        written = self.directory / f".{INDEX_FILE}.{os.getpid()}.part"
        written.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        final = self.directory / INDEX_FILE
        os.replace(written, final)
        return final


def _write_shard(stream: BinaryIO, tensors: dict[str, NDArray[Any]], code: str) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        place = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": place}
        offset = place[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    stream.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        stream.write(tensor.data)


def _as_stored(array: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    """A contiguous little-endian copy in the file's dtype, rounded to nearest, ties to even."""
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
