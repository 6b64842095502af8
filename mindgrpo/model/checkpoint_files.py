"""Hugging Face weight directories, read slice by slice (`checkpoint_writing` writes them).

Reads only the bytes of the rows that are asked for and gives float32. Refuses weights that are
damaged, incomplete or not floating point.
"""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.layout.split import Box
from mindgrpo.model.checkpoint_writing import (
    INDEX_FILE,
    NAME_MAP_FILE,
    SINGLE_FILE,
    SafetensorsWriter,
)

__all__ = ["SafetensorsDirectory", "SafetensorsWriter"]

# numpy knows no bfloat16: it is carried as the upper half of a float32.
_STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class _Entry(NamedTuple):
    file: Path
    offset: int  # of the first byte, from the start of the file
    dtype: str
    shape: tuple[int, ...]


class SafetensorsDirectory:
    """`model.safetensors` if there is one, else the shards that the index names."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UserError(
                f"the model directory {self.path} does not exist; give a Hugging Face directory "
                f"with config.json and {SINGLE_FILE}."
            )
        if (self.path / SINGLE_FILE).exists():
            self._entries = _read_header(self.path / SINGLE_FILE)
        else:
            self._entries = _entries_of_index(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """A fresh float32 array of the box (everything without one)."""
        entry = self._entry(name)
        if entry.dtype not in _STORED_AS:
            raise UserError(
                f"{name} in {entry.file} has the dtype {entry.dtype}, but weights must be F32, "
                f"F16 or BF16; convert the checkpoint to one of these."
            )
        slices = slices_within(box, entry.shape, name, entry.file)
        if 0 in entry.shape:
            return np.zeros(entry.shape, np.float32)[slices]
        # Opened for each read: pages of a closed map do not count as this program's memory.
        stored: NDArray[Any] = np.memmap(
            entry.file, _STORED_AS[entry.dtype], "r", entry.offset, entry.shape
        )
        return as_float32(np.asarray(stored[slices]), entry.dtype)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise UserError(
                f"{self.path} has no tensor {name} among its {len(self._entries)}; "
                f"check that config.json and the weights belong to the same model."
            )
        return self._entries[name]


def slices_within(
    box: Box | None, shape: tuple[int, ...], name: str, file: Path
) -> tuple[slice, ...]:
    if box is None:
        return tuple(slice(0, length) for length in shape)
    if len(box.stop) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
        raise UserError(
            f"{name} in {file} has the shape {list(shape)}, which does not reach to "
            f"{list(box.stop)} as its config.json implies; use the config.json of these weights."
        )
    return box.slices


def as_float32(stored: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype != "BF16":
        return np.array(stored, dtype=np.float32, order="C")
    bits = np.array(stored, dtype=np.uint32, order="C")
    bits <<= 16
    return bits.view(np.float32)


def _entries_of_index(directory: Path) -> dict[str, _Entry]:
    index = directory / INDEX_FILE
    if not index.exists():
        if (directory / NAME_MAP_FILE).is_file():
            return _entries_of_map(directory / NAME_MAP_FILE, _name_map(directory / NAME_MAP_FILE))
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt"))
        found = f" (it has {', '.join(others)}: convert them)" if others else ""
        raise UserError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}; "
            f"give a Hugging Face directory with safetensors weights."
        )
    return _entries_of_map(index, _weight_map(index))


def _entries_of_map(index: Path, weight_map: dict[str, str]) -> dict[str, _Entry]:
    shards = {
        shard: _read_header(_shard_path(index, shard))
        for shard in dict.fromkeys(weight_map.values())
    }
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(
                f"{index} says that {name} is in {shard}, which has no such tensor; "
                f"download the checkpoint again."
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _name_map(path: Path) -> dict[str, str]:
    """MindFormers' index: names and files, and nothing around them."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(shard) for name, shard in names.items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is no map of tensors to files (a JSON object); copy the checkpoint again."
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'{index} is no index of safetensors (a JSON object with "weight_map"); '
            f"download the checkpoint again."
        ) from error


def _shard_path(index: Path, shard: str) -> Path:
    # By its spelling, not resolved: in Hugging Face's cache the shards are links to elsewhere.
    if Path(shard).is_absolute() or ".." in PurePosixPath(shard.replace("\\", "/")).parts:
        raise UserError(
            f"{index} names the shard {shard}, which lies outside its directory; "
            f"correct the path or download the checkpoint again."
        )
    path = index.parent / shard
    if not path.is_file():
        raise UserError(
            f"{index} names the shard {shard}, which is missing; download the checkpoint again."
        )
    return path


def _read_header(file: Path) -> dict[str, _Entry]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        if header is None:
            raise ValueError("the header is cut off")
        header.pop("__metadata__", None)
        return _entries_of_header(header, file, start=8 + length, size=size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{file} ({size} bytes) is damaged or not a safetensors file: {error}; "
            f"download or copy it again."
        ) from error


def _entries_of_header(
    header: dict[str, Any], file: Path, start: int, size: int
) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    end = start
    for name, item in header.items():
        begin, stop = (start + int(offset) for offset in item["data_offsets"])
        dtype, shape = str(item["dtype"]), tuple(int(length) for length in item["shape"])
        if begin < start or stop < begin or min(shape, default=0) < 0:
            raise ValueError(f"the place of {name} makes no sense")
        if (
            dtype in _STORED_AS
            and prod(shape) * np.dtype(_STORED_AS[dtype]).itemsize != stop - begin
        ):
            raise ValueError(f"{name} has not the bytes that its shape {list(shape)} needs")
        entries[name] = _Entry(file, begin, dtype, shape)
        end = max(end, stop)
    if end != size:
        raise ValueError(f"its header speaks of {end} bytes")
    return entries
