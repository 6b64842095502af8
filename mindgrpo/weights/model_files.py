"""Reads and writes safetensors models: parameters by name, of which a rank reads only its slices.

The safetensors library validates each file's header. Values are read through memory maps, because the library cannot
give numpy bfloat16, and written one tensor at a time, because its own writer takes all tensors of a file at once, sorts
them, and makes the file readable by the user only. Values that overflow the chosen dtype are an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mindgrpo.backend.dtypes import Dtype, bits_of, numpy_dtype
from mindgrpo.errors import UserError, writing
from mindgrpo.parallel.sharding import Box
from mindgrpo.strict_files import is_inside, looked_at, read_object

# The scalar head [1, H] of a sequence classifier.
SCORE = "score.weight"
# Of a vision encoder's parameters, beside those of its language model.
VISUAL = "visual."
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# MindFormers' index.
NAME_MAP_FILE = "param_name_map.json"
# The default size of a model's files.
MAX_SHARD_BYTES = 2 << 30
# The block in which a tensor is rounded or transposed while it is written.
BLOCK_BYTES = 32 << 20
# By safetensors' names. numpy knows no bfloat16: it is carried as the upper half of a float32.
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_DIMS = 8
TILE_ROWS, TILE_COLUMNS = 64, 256
_DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
# A router's bias is float32 in files of any dtype, as in transformers: rounding it would change the choice of experts.
KEPT_EXACT = ".e_score_correction_bias"
_AGAIN = "download or copy it again."


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copies `source` to `target`, of equal shapes and any strides; transposed copies run tile by tile.

    Stored weights are [in, out] and files [out, in]; tiles are four times as fast as rows.
    """
    if target.ndim > 2:
        for inner, own in zip(target, source, strict=True):
            copy(inner, own)
        return
    if target.ndim < 2 or _is_by_rows(target) == _is_by_rows(source):
        target[...] = source
        return
    if not _is_by_rows(target):
        target, source = target.T, source.T
    rows, columns = target.shape
    for i in range(0, rows, TILE_ROWS):
        for j in range(0, columns, TILE_COLUMNS):
            tile = slice(i, i + TILE_ROWS), slice(j, j + TILE_COLUMNS)
            target[tile] = source[tile]


def _is_by_rows(array: np.ndarray) -> bool:
    return array.strides[0] >= array.strides[1]


def by_rows(source: np.ndarray) -> NDArray[np.float32]:
    """Returns a new C-contiguous, little-endian float32 array, as files store it."""
    fresh = np.empty(source.shape, "<f4")
    copy(fresh, source)
    return fresh


class ModelTensor(NamedTuple):
    """A tensor of a file; `values` returns it, of `shape` and numpy dtype STORED_AS[dtype], usually memory-mapped."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    values: Callable[[], NDArray[Any]]


# A box of a parameter, and the file tensor that holds it.
TensorSlice = tuple[Box, ModelTensor]


class ModelFiles:
    """Reads parameters by name, each from one file tensor, or from several that hold disjoint slices of it.

    A tensor may lack dims of length 1 that its slice has: an expert's matrix [out, in] is the slice [i:i + 1] of a
    parameter [experts, out, in].
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, ModelTensor | Sequence[TensorSlice]]
    ) -> None:
        self.path = path
        self.slices: dict[str, Sequence[TensorSlice]] = {
            name: [(whole_box(one.shape), one)] if isinstance(one, ModelTensor) else one
            for name, one in tensors.items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.slices)

    def shape(self, name: str) -> tuple[int, ...]:
        stops = (box.stop for box, _ in self._slices_of(name))
        return tuple(max(ends) for ends in zip(*stops, strict=True))

    def check_dtype(self, name: str) -> None:
        """Raises UserError for a dtype that `read` does not support."""
        for _, tensor in self._slices_of(name):
            if tensor.dtype not in STORED_AS:
                raise UserError(
                    f"{name} in {tensor.file} has the dtype {tensor.dtype}, but weights must be one of "
                    f"{', '.join(STORED_AS)}; convert the model to one of these."
                )

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """Returns slice `box` of a parameter, or all of it, as a new float32 array. Raises UserError."""
        out = np.empty(self.shape(name) if box is None else box.shape, np.float32)
        self.read_into(out, name, box)
        return out

    def read_into(self, out: np.ndarray, name: str, box: Box | None = None) -> None:
        """Reads slice `box` of a parameter, or all of it, and nothing else, into `out`, of any dtype and strides.

        Raises UserError.
        """
        self.check_dtype(name)
        shape = self.shape(name)
        box = whole_box(shape) if box is None else box
        if len(box.stop) != len(shape) or any(b > n for b, n in zip(box.stop, shape, strict=True)):
            raise UserError(
                f"{name} in {self._slices_of(name)[0][1].file} has the shape {list(shape)}, which does not reach to "
                f"{list(box.stop)} as its config.json implies; use the config.json of these weights."
            )
        for held, tensor in self._slices_of(name):
            common = held.intersect(box)
            if common is None:
                continue
            stored = _slice(tensor.values().reshape(held.shape), common.within(held))
            if tensor.dtype == "BF16":
                stored = np.array(stored, np.uint32)
                stored <<= 16
                stored = stored.view(np.float32)
            copy(_slice(out, common.within(box)), stored)

    def _slices_of(self, name: str) -> Sequence[TensorSlice]:
        if name not in self.slices:
            raise UserError(
                f"{self.path} has no tensor {name} among its {len(self.slices)}; "
                f"check that config.json and the weights belong to the same model."
            )
        return self.slices[name]


def _slice(array: NDArray[Any], box: Box) -> NDArray[Any]:
    """Returns the box of an array as a view, also for an array of no dims."""
    index: Any = (..., *box.slices)
    view: NDArray[Any] = array[index]
    return view


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


class SafetensorsDirectory(ModelFiles):
    """Opens `model.safetensors` if there is one, else the shards that the index names. Raises UserError."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        path = Path(directory)
        if not path.is_dir():
            raise UserError(
                f"the model directory {path} does not exist{looked_at(path)}; give a Hugging Face directory "
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
            f"{index} is not an index of safetensors (a JSON object from names to files, in "
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
        raise UserError(f"{file} is not a regular file; {_AGAIN}")
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
            # Mapped anew for each read, because pages of a closed map do not count as this process's memory.
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


def stored_dtype(name: str, dtype: Dtype) -> Dtype:
    """Returns the dtype that a tensor has in files of `dtype`: float32 for a router's bias."""
    return "float32" if name.endswith(KEPT_EXACT) else dtype


def header_of(
    shapes: Mapping[str, Sequence[int]], dtype: Dtype = "float32", metadata: str = "pt"
) -> tuple[bytes, list[int]]:
    """Returns the header of a safetensors file of these tensors, and each tensor's offset behind the header."""
    header: dict[str, Any] = {"__metadata__": {"format": metadata}}
    offsets = [0]
    for name, shape in shapes.items():
        own = stored_dtype(name, dtype)
        stop = offsets[-1] + tensor_bytes(shape, own)
        ends = {"shape": list(shape), "data_offsets": [offsets[-1], stop]}
        header[name] = {"dtype": _DTYPE_CODES[own], **ends}
        offsets.append(stop)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of 8 bytes
    return len(text).to_bytes(8, "little") + text, offsets[:-1]


def tensor_bytes(shape: Sequence[int], dtype: Dtype) -> int:
    return prod(shape) * np.dtype(STORED_AS[_DTYPE_CODES[dtype]]).itemsize


def plan_shards(
    shapes: Mapping[str, Sequence[int]], max_shard_bytes: int, dtype: Dtype = "float32"
) -> list[list[str]]:
    """Splits the tensors, in order, into files of at most `max_shard_bytes`; a larger tensor has a file of its own."""
    shards: list[list[str]] = []
    filled = max_shard_bytes
    for name, shape in shapes.items():
        size = tensor_bytes(shape, stored_dtype(name, dtype))
        if not shards or filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


class SafetensorsWriter:
    """Writes a model's shards and their index, each tensor as it is added, whole or in ranges of rows.

    Tensors of a shard have to be added in the order of `shapes`. Several ranks may write shards of one directory; the
    first of them calls `close`, which renames the files to their final names, the index last. An exception in a `with`
    block removes the files written. `shards` are the names in each file, by default as many as max_shard_bytes allow.
    Raises UserError if the directory holds weights already, except with `joins`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        shapes: Mapping[str, Sequence[int]],
        max_shard_bytes: int = MAX_SHARD_BYTES,
        dtype: Dtype = "float32",
        joins: bool = False,
        shards: Sequence[Sequence[str]] | None = None,
    ) -> None:
        if dtype not in _DTYPE_CODES:
            raise UserError(f"the dtype {dtype!r} is not one of {', '.join(_DTYPE_CODES)}.")
        if max_shard_bytes < 1:
            raise UserError(f"max_shard_bytes is {max_shard_bytes}, but it must be positive.")
        if not shapes:
            raise ValueError("there is no tensor to write")
        self.directory = Path(directory)
        self._shapes, self._dtype = {name: tuple(shape) for name, shape in shapes.items()}, dtype
        self._shards = shards or plan_shards(shapes, max_shard_bytes, dtype)
        count = len(self._shards)
        self._names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            self._names = [SINGLE_FILE]
        self._shard_of = {name: i for i, names in enumerate(self._shards) for name in names}
        # By shard in progress: its file, and the names of the tensors still to come.
        self._open: dict[int, tuple[IO[bytes], list[str]]] = {}
        # By name of an incomplete tensor.
        self._rows_written: dict[str, int] = {}
        if joins:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        old = sorted(p.name for p in self.directory.glob("*.safetensors*") if p.name[0] != ".")
        if old:
            raise UserError(
                f"{self.directory} already holds {old[0]}, which is not overwritten; "
                f"choose another directory or remove it."
            )

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Writes a tensor, or its next rows along dim 0. Raises UserError.

        `array` is [rows, in], of any strides, float32 or a 16-bit dtype.
        """
        shape, rows = self._shapes[name], self._rows_written.get(name, 0)
        rows += len(array) if array.ndim else 0
        fits = (
            array.shape[1:] == shape[1:]
            and array.ndim == len(shape)
            and rows <= max(shape[:1], default=0)
        )
        if not fits or array.itemsize > 4:  # bfloat16 has no name in numpy
            raise TypeError(f"{name} is {array.dtype} {list(array.shape)}, but float32 is written")
        shard = self._shard_of[name]
        path = self._partial(shard)
        with writing(path):
            if shard not in self._open:
                names = self._shards[shard]
                self._open[shard] = path.open("wb"), list(reversed(names))
                shapes = {name: self._shapes[name] for name in names}
                self._open[shard][0].write(header_of(shapes, self._dtype)[0])
            stream, lacking = self._open[shard]
            if not lacking or lacking[-1] != name:
                raise ValueError(f"{name} was added before, or others come before it")
            values = np.atleast_1d(array)
            at_once = max(1, BLOCK_BYTES // max(1, values[:1].size * 4))
            for start in range(0, len(values), at_once):
                part = values[start : start + at_once]
                stream.write(_as_stored(part, stored_dtype(name, self._dtype), name).data)
            if array.ndim and rows < shape[0]:
                self._rows_written[name] = rows
                return
            self._rows_written.pop(name, None)
            lacking.pop()
            if not lacking:
                stream.close()

    def _partial(self, shard: int) -> Path:
        return self.directory / f".{self._names[shard]}.part"

    @property
    def weight_map(self) -> dict[str, str]:
        """Returns the file name by tensor name."""
        return {name: self._names[shard] for name, shard in self._shard_of.items()}

    def close(self) -> list[Path]:
        """Renames the files to their final names and returns their paths, the index last if there is one."""
        lacking = [name for _, names in self._open.values() for name in names]
        if lacking:
            raise ValueError(f"{len(lacking)} tensors were not added, first {lacking[-1]}")
        files = [self.directory / name for name in self._names]
        for shard, file in enumerate(files):
            os.replace(self._partial(shard), file)
        if len(files) > 1:
            total = sum(
                tensor_bytes(shape, stored_dtype(name, self._dtype))
                for name, shape in self._shapes.items()
            )
            index = {"metadata": {"total_size": total}, "weight_map": self.weight_map}
            written = self.directory / f".{INDEX_FILE}.part"
            written.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            files.append(written.replace(self.directory / INDEX_FILE))
        return files

    def discard(self) -> None:
        """Removes the files that this rank has written."""
        for shard, (stream, _) in self._open.items():
            with suppress(OSError):
                stream.close()
            self._partial(shard).unlink(missing_ok=True)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _as_stored(array: NDArray[Any], dtype: Dtype, name: str) -> NDArray[Any]:
    """Returns C-contiguous little-endian values rounded to `dtype`, to nearest even; 16-bit dtypes as uint16 bits."""
    if dtype != "float32" and array.dtype == numpy_dtype(dtype):
        bits = bits_of(array)
        if bits.flags.c_contiguous:
            return bits
        fresh = np.empty(bits.shape, "<u2")
        copy(fresh, bits)
        return fresh
    exact = array if array.dtype == "<f4" and array.flags.c_contiguous else by_rows(array)
    if dtype == "float32":
        return exact
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = exact.astype(numpy_dtype(dtype)).view("<u2")
    overflown = (rounded & _INFINITY[dtype]) == _INFINITY[dtype]
    if np.any(overflown & np.isfinite(exact)):
        raise UserError(
            f"{name} has values up to {np.abs(exact[overflown]).max():g}, which {dtype} cannot "
            f"express; save it as float32."
        )
    return rounded
