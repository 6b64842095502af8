"""MindSpore's .ckpt files, read tensor by tensor: a few message fields of protobuf, and nothing is executed.

Reads only the bytes of the tensors that are asked for. Refuses encrypted and damaged files.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.safetensors_files import as_float32, slices_within

# MindSpore's name of a type -> (safetensors' name, how its bytes are read).
_TYPES = {"Float32": ("F32", "<f4"), "Float16": ("F16", "<f2"), "BFloat16": ("BF16", "<u2")}
# What a training run keeps beside the weights.
_NOT_WEIGHTS = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "exp_avg", "accu_grads.")
_TRAILER, _TRAILER_BYTES = b"crc_num", 17
VARINT, BYTES = 0, 2


class _Tensor(NamedTuple):
    """`segments` are (offset, length) in the file: large tensors come in slices."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]


class CkptDirectory:
    """Every tensor of a directory's *.ckpt files that may be a weight."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._tensors: dict[str, _Tensor] = {}
        for file in sorted(directory.glob("*.ckpt")):
            for name, tensor in read_ckpt(file).items():
                if name in self._tensors:
                    raise UserError(
                        f"{name} is in {file} and in {self._tensors[name].file}; leave one of these in the directory."
                    )
                if tensor.shape and not name.startswith(_NOT_WEIGHTS):
                    self._tensors[name] = tensor

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def check_dtype(self, name: str) -> None:
        """Raises UserError for what `read` cannot give."""
        file, dtype, shape, segments = self._tensors[name]
        if dtype not in _TYPES:
            raise UserError(
                f"{name} in {file} has the type {dtype}, but weights must be one of {', '.join(_TYPES)}; convert the "
                "checkpoint to one of these."
            )
        size = np.dtype(_TYPES[dtype][1]).itemsize
        if prod(shape) * size != sum(length for _, length in segments):
            raise _damaged(file, f"{name} has not the bytes that its shape {list(shape)} needs")

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """A fresh float32 array of the box (everything without one)."""
        self.check_dtype(name)
        file, dtype, shape, segments = self._tensors[name]
        code, stored_as = _TYPES[dtype]
        stored: NDArray[Any]
        if len(segments) == 1:
            stored = np.memmap(file, stored_as, "r", segments[0][0], shape)
        else:
            parts = [np.memmap(file, np.uint8, "r", start, (length,)) for start, length in segments]
            stored = np.concatenate(parts).view(stored_as).reshape(shape)
        slices = slices_within(box, shape, name, file)
        return as_float32(np.asarray(stored[slices]), code)


def read_ckpt(file: Path) -> dict[str, _Tensor]:
    """Where the tensors of a file lie. Raises UserError."""
    found: dict[str, _Tensor] = {}
    try:
        with file.open("rb") as stream:
            if not file.stat().st_size:
                raise ValueError("it is empty")
            with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as pages:
                for name, part in _values(pages, file):
                    earlier = found.get(name)
                    if earlier is not None and (earlier[1:3] != part[1:3]):
                        raise ValueError(f"the slices of {name!r} differ in type or shape")
                    if earlier is not None:
                        part = part._replace(segments=earlier.segments + part.segments)
                    found[name] = part
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except (ValueError, IndexError) as error:
        raise _damaged(file, str(error)) from None
    return found


def _values(pages: mmap.mmap, file: Path) -> Iterator[tuple[str, _Tensor]]:
    end = len(pages)
    if pages[max(0, end - _TRAILER_BYTES) : end].startswith(_TRAILER):
        end -= _TRAILER_BYTES
    for number, value in _fields(pages, 0, end):
        if number != 1 or isinstance(value, int):
            raise ValueError("it is no MindSpore checkpoint, or an encrypted one")
        parts = dict(_fields(pages, *value))
        tag, tensor = parts.get(1), parts.get(2)
        if not isinstance(tag, tuple) or not isinstance(tensor, tuple):
            raise ValueError("it holds a value that is no tensor")
        name = pages[tag[0] : tag[1]].decode("utf-8")
        yield name, _tensor(pages, tensor, file)


def _tensor(pages: mmap.mmap, place: tuple[int, int], file: Path) -> _Tensor:
    dims: list[int] = []
    dtype, content = "", (0, 0)
    for number, value in _fields(pages, *place):
        if number == 1 and isinstance(value, int):
            dims.append(value)
        elif number == 1 and isinstance(value, tuple):  # packed
            start, stop = value
            while start < stop:
                dim, start = _varint(pages, start, stop)
                dims.append(dim)
        elif number == 2 and isinstance(value, tuple):
            dtype = pages[value[0] : value[1]].decode("utf-8")
        elif number == 3 and isinstance(value, tuple):
            content = value
    shape = () if dims == [0] else tuple(dims)
    return _Tensor(file, dtype, shape, ((content[0], content[1] - content[0]),))


def _fields(pages: mmap.mmap, start: int, stop: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
    """(number, value or (start, stop) of its bytes) of a message's fields."""
    while start < stop:
        head, start = _varint(pages, start, stop)
        number, kind = head >> 3, head & 7
        if kind == VARINT:
            value, start = _varint(pages, start, stop)
            yield number, value
        elif kind == BYTES:
            length, start = _varint(pages, start, stop)
            if start + length > stop:
                raise ValueError("it ends within a field")
            yield number, (start, start + length)
            start += length
        else:
            raise ValueError("it is no MindSpore checkpoint, or an encrypted one")


def _varint(pages: mmap.mmap, start: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while start < stop and shift < 64:
        byte = pages[start]
        start += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, start
    raise ValueError("it ends within a number")


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} is damaged or not a checkpoint of MindSpore: {why}; copy it again.")
