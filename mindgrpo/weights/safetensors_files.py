"""Reads Hugging Face weight directories slice by slice, as float32 (`safetensors_writer` writes them).

Only the bytes of the rows that are asked for are read. The safetensors library checks each file's header.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import is_inside, read_object
from mindgrpo.weights.safetensors_writer import (
    INDEX_FILE,
    NAME_MAP_FILE,
    SINGLE_FILE,
    SafetensorsWriter,
)

__all__ = ["SafetensorsDirectory", "SafetensorsWriter"]

# numpy knows no bfloat16: it is carried as the upper half of a float32.
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_DIMS = 8
_AGAIN = "download or copy it again."


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

    def check_dtype(self, name: str) -> None:
        """Raises UserError for what `read` cannot give."""
        entry = self._entry(name)
        if entry.dtype not in STORED_AS:
            raise UserError(
                f"{name} in {entry.file} has the dtype {entry.dtype}, but weights must be F32, "
                f"F16 or BF16; convert the model to one of these."
            )

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """Returns a fresh float32 array of the box (everything without one)."""
        self.check_dtype(name)
        entry = self._entry(name)
        slices = slices_within(box, entry.shape, name, entry.file)
        if 0 in entry.shape:
            return np.zeros(entry.shape, np.float32)[slices]
        # Opened for each read: pages of a closed map do not count as this program's memory.
        stored: NDArray[Any] = np.memmap(
            entry.file, STORED_AS[entry.dtype], "r", entry.offset, entry.shape
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
    index, name_map = directory / INDEX_FILE, directory / NAME_MAP_FILE
    if not index.exists():
        if name_map.is_file():
            return _entries_of_map(name_map, read_object(name_map, "the map of tensors", _AGAIN))
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt"))
        instead = f" (it has {', '.join(others)}: convert them)" if others else ""
        raise UserError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{instead}; "
            f"give a Hugging Face directory with safetensors weights."
        )
    weight_map = read_object(index, "the index of safetensors", _AGAIN).get("weight_map")
    return _entries_of_map(index, weight_map)


def _entries_of_map(index: Path, weight_map: Any) -> dict[str, _Entry]:
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(
            f"{index} is no index of safetensors (a JSON object from names to files, in "
            f'{INDEX_FILE} under "weight_map"); {_AGAIN}'
        )
    shards = {
        shard: _read_header(_shard_path(index, shard))
        for shard in dict.fromkeys(weight_map.values())
    }
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(
                f"{index} says that {name} is in {shard}, which has no such tensor; {_AGAIN}"
            )
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _shard_path(index: Path, shard: str) -> Path:
    if not is_inside(shard):
        raise UserError(
            f"{index} names the shard {shard}, which lies outside its directory; "
            f"correct the path or {_AGAIN}"
        )
    path = index.parent / shard
    if not path.is_file():
        raise UserError(f"{index} names the shard {shard}, which is missing; {_AGAIN}")
    return path


def _read_header(file: Path) -> dict[str, _Entry]:
    if not file.is_file():
        raise UserError(f"{file} is no regular file; {_AGAIN}")
    try:
        # Compares names, dtypes, shapes and offsets with each other and with the file's size.
        with safe_open(file, "np"):
            pass
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {
            name: _Entry(
                file, 8 + length + item["data_offsets"][0], item["dtype"], tuple(item["shape"])
            )
            for name, item in header.items()
        }
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}; make it readable or {_AGAIN}") from None
    except (SafetensorError, ValueError, TypeError) as error:
        raise _damaged(file, error) from None
    for name, entry in entries.items():
        if len(entry.shape) > MAX_DIMS:
            raise _damaged(file, f"{name} has {len(entry.shape)} dims")
    return entries


def _damaged(file: Path, why: object) -> UserError:
    return UserError(
        f"{file} ({file.stat().st_size} bytes) is damaged or not a safetensors file: {why}; {_AGAIN}"
    )
