"""Hugging Face weight directories, read slice by slice (`checkpoint_writing` writes them).

Reads only the bytes of the rows that are asked for and gives float32. Refuses weights that are
damaged, incomplete or not floating point.
"""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import (
    NotJson,
    is_inside,
    parse_json,
    read_object,
)
from mindgrpo.weights.safetensors_writer import (
    INDEX_FILE,
    NAME_MAP_FILE,
    SINGLE_FILE,
    SafetensorsWriter,
)

__all__ = ["SafetensorsDirectory", "SafetensorsWriter"]

# numpy knows no bfloat16: it is carried as the upper half of a float32.
_STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# The format's own limit.
MAX_HEADER_BYTES = 100_000_000


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
        if entry.dtype not in _STORED_AS:
            raise UserError(
                f"{name} in {entry.file} has the dtype {entry.dtype}, but weights must be F32, "
                f"F16 or BF16; convert the checkpoint to one of these."
            )

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """A fresh float32 array of the box (everything without one)."""
        self.check_dtype(name)
        entry = self._entry(name)
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
    names = read_object(path, "the map of tensors to files", "copy the checkpoint again.")
    if not all(isinstance(shard, str) for shard in names.values()):
        raise UserError(
            f"{path} is no map of tensors to files (a JSON object of names); copy the checkpoint again."
        )
    return names


def _weight_map(index: Path) -> dict[str, str]:
    again = "download the checkpoint again."
    weight_map = read_object(index, "the index of safetensors", again).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise UserError(
            f'{index} is no index of safetensors (a JSON object with "weight_map", from names to '
            f"files); {again}"
        )
    return weight_map


def _shard_path(index: Path, shard: str) -> Path:
    if not is_inside(shard):
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
    if not file.is_file():
        raise UserError(f"{file} is no regular file; download or copy it again.")
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise NotJson("the header is cut off")
            header = parse_json(stream.read(length))
        return _entries_of_header(header, file, start=8 + length, size=size)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror}; make it readable or copy it again."
        ) from error
    except NotJson as error:
        raise UserError(
            f"{file} ({size} bytes) is damaged or not a safetensors file: {error}; "
            f"download or copy it again."
        ) from error


def _entries_of_header(
    header: dict[str, Any], file: Path, start: int, size: int
) -> dict[str, _Entry]:
    """Raises NotJson."""
    if not isinstance(header, dict):
        raise NotJson("its header is no object")
    entries: dict[str, _Entry] = {}
    places = []
    for name, item in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, begin, stop = _described(name, item)
        if dtype in _STORED_AS and (
            prod(shape) * np.dtype(_STORED_AS[dtype]).itemsize != stop - begin
        ):
            raise NotJson(f"{name} has not the bytes that its shape {list(shape)} needs")
        entries[name] = _Entry(file, start + begin, dtype, shape)
        places.append((begin, stop, name))
    end = 0
    for begin, stop, name in sorted(places):
        if begin < end:
            raise NotJson(f"{name} lies over another tensor")
        end = stop
    if start + end != size:
        raise NotJson(f"its header speaks of {start + end} bytes")
    return entries


def _described(name: str, item: object) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and the range of bytes of one tensor. Raises NotJson."""
    given = item if isinstance(item, dict) else {}
    dtype, shape, place = given.get("dtype"), given.get("shape"), given.get("data_offsets")
    if not (isinstance(dtype, str) and _are_counts(shape) and _are_counts(place)):
        raise NotJson(f"what it says of {name} is no dtype, shape and data_offsets")
    assert isinstance(shape, list) and isinstance(place, list)
    if len(place) != 2 or place[0] > place[1] or len(shape) > 8:
        raise NotJson(f"the place of {name} makes no sense")
    return dtype, tuple(shape), place[0], place[1]


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        type(count) is int and 0 <= count < 1 << 50 for count in value
    )
