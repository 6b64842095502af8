"""The tensors of a model directory by name, read slice by slice as float32: Hugging Face's safetensors.

Other formats give ModelFiles, too. Only the bytes of the rows that are asked for are read; the safetensors library
checks each file's header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import is_inside, read_object
from mindgrpo.weights.safetensors_writer import INDEX_FILE, NAME_MAP_FILE, SINGLE_FILE

# By safetensors' names. numpy knows no bfloat16: it is carried as the upper half of a float32.
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_DIMS = 8
_AGAIN = "download or copy it again."


class ModelTensor(NamedTuple):
    """`values` returns an array of `shape`, as STORED_AS says of `dtype`; reading parts of it is cheap."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], NDArray[Any]]


class ModelFiles:
    def __init__(self, path: Path, tensors: Mapping[str, ModelTensor]) -> None:
        self.path = path
        self.tensors = tensors

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def check_dtype(self, name: str) -> None:
        """Raises UserError for what `read` cannot give."""
        tensor = self._tensor(name)
        if tensor.dtype not in STORED_AS:
            raise UserError(
                f"{name} in {tensor.file} has the dtype {tensor.dtype}, but weights must be one of "
                f"{', '.join(STORED_AS)}; convert the model to one of these."
            )

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """Returns a fresh float32 array of the box (everything without one)."""
        self.check_dtype(name)
        tensor = self._tensor(name)
        slices = _slices(box, tensor, name)
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, np.float32)[slices]
        stored = np.asarray(tensor.values()[slices])
        if tensor.dtype != "BF16":
            return np.array(stored, dtype=np.float32, order="C")
        bits = np.array(stored, dtype=np.uint32, order="C")
        bits <<= 16
        return bits.view(np.float32)

    def _tensor(self, name: str) -> ModelTensor:
        if name not in self.tensors:
            raise UserError(
                f"{self.path} has no tensor {name} among its {len(self.tensors)}; "
                f"check that config.json and the weights belong to the same model."
            )
        return self.tensors[name]


def _slices(box: Box | None, tensor: ModelTensor, name: str) -> tuple[slice, ...]:
    shape = tensor.shape
    if box is None:
        return tuple(map(slice, shape))
    if len(box.stop) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
        raise UserError(
            f"{name} in {tensor.file} has the shape {list(shape)}, which does not reach to "
            f"{list(box.stop)} as its config.json implies; use the config.json of these weights."
        )
    return box.slices


class SafetensorsDirectory(ModelFiles):
    """`model.safetensors` if there is one, else the shards that the index names."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise UserError(
                f"the model directory {path} does not exist; give a Hugging Face directory "
                f"with config.json and {SINGLE_FILE}."
            )
        single = path / SINGLE_FILE
        super().__init__(path, _read_header(single) if single.exists() else _tensors_of_index(path))


def _tensors_of_index(directory: Path) -> dict[str, ModelTensor]:
    index, name_map = directory / INDEX_FILE, directory / NAME_MAP_FILE
    if not index.exists():
        if name_map.is_file():
            return _tensors_of_map(name_map, read_object(name_map, "the map of tensors", _AGAIN))
        others = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt"))
        instead = f" (it has {', '.join(others)}: convert them)" if others else ""
        raise UserError(
            f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}{instead}; "
            f"give a Hugging Face directory with safetensors weights."
        )
    weight_map = read_object(index, "the index of safetensors", _AGAIN).get("weight_map")
    return _tensors_of_map(index, weight_map)


def _tensors_of_map(index: Path, weight_map: Any) -> dict[str, ModelTensor]:
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


def _read_header(file: Path) -> dict[str, ModelTensor]:
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
        tensors = {}
        for name, item in header.items():
            dtype, shape, (start, _) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
            if len(shape) > MAX_DIMS:
                raise ValueError(f"{name} has {len(shape)} dims")
            # Opened for each read: pages of a closed map do not count as this program's memory.
            code = STORED_AS.get(dtype, "u1")
            values = partial(np.memmap, file, code, "r", 8 + length + start, shape)
            tensors[name] = ModelTensor(file, dtype, shape, values)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error}; make it readable or {_AGAIN}") from None
    except (SafetensorError, ValueError, TypeError) as error:
        raise UserError(
            f"{file} ({file.stat().st_size} bytes) is damaged or not a safetensors file: {error}; {_AGAIN}"
        ) from None
    return tensors
