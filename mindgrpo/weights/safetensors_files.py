"""Reads Hugging Face weight directories slice by slice, as float32 (`safetensors_writer` writes them).

Only the bytes of the rows that are asked for are read. The safetensors library checks each file's header.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from mindgrpo.errors import UserError
from mindgrpo.strict_files import is_inside, read_object
from mindgrpo.weights.model_files import STORED_AS, ModelFiles, ModelTensor
from mindgrpo.weights.safetensors_writer import (
    INDEX_FILE,
    NAME_MAP_FILE,
    SINGLE_FILE,
    SafetensorsWriter,
)

__all__ = ["SafetensorsDirectory", "SafetensorsWriter"]

MAX_DIMS = 8
_AGAIN = "download or copy it again."


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
