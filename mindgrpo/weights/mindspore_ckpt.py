"""Reads MindSpore's .ckpt files with the message class that MindSpore has for them. Nothing is executed.

Every file is held in memory whole, as MindSpore itself holds it: `export` makes safetensors of a large model.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.safetensors_files import STORED_AS, as_float32, slices_within

# MindSpore's name of a dtype -> safetensors' name.
_DTYPES = {"Float32": "F32", "Float16": "F16", "BFloat16": "BF16"}
# What a training run keeps beside the weights.
_NOT_WEIGHTS = ("adam_m.", "adam_v.", "moments.", "moment1.", "moment2.", "exp_avg", "accu_grads.")
# Ends a file that has a checksum, before 10 bytes of it.
_CHECKSUM = b"crc_num"


class _Tensor(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    content: bytes


class CkptDirectory:
    """Every tensor of a directory's *.ckpt files that may be a weight."""

    def __init__(self, directory: Path) -> None:
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
        file, dtype, shape, content = self._tensors[name]
        if dtype not in _DTYPES:
            raise UserError(
                f"{name} in {file} has the type {dtype}, but weights must be one of {', '.join(_DTYPES)}; convert the "
                "file to one of these."
            )
        if prod(shape) * np.dtype(STORED_AS[_DTYPES[dtype]]).itemsize != len(content):
            raise _damaged(file, f"{name} has not the bytes that its shape {list(shape)} needs")

    def read(self, name: str, box: Box | None = None) -> NDArray[np.float32]:
        """Returns a fresh float32 array of the box (everything without one)."""
        self.check_dtype(name)
        file, dtype, shape, content = self._tensors[name]
        stored = np.frombuffer(content, STORED_AS[_DTYPES[dtype]]).reshape(shape)
        return as_float32(stored[slices_within(box, shape, name, file)], _DTYPES[dtype])


def read_ckpt(file: Path) -> dict[str, _Tensor]:
    """Reads a file's tensors by name; MindSpore writes large ones in slices. Raises UserError."""
    # MindSpore takes seconds to import, which only users of this format need to wait for.
    from google.protobuf.message import DecodeError
    from mindspore.train.checkpoint_pb2 import Checkpoint

    tensors: dict[str, _Tensor] = {}
    stored = Checkpoint()
    try:
        data = file.read_bytes()
        stored.ParseFromString(data[:-17] if data[-17:-10] == _CHECKSUM else data)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from None
    except (DecodeError, ValueError):
        raise _damaged(file, "its fields are not those of the format, or encrypted") from None
    for value in stored.value:
        tensor = value.tensor
        shape = () if list(tensor.dims) == [0] else tuple(tensor.dims)
        slice_ = _Tensor(file, tensor.tensor_type, shape, tensor.tensor_content)
        earlier = tensors.get(value.tag)
        if earlier is not None:
            if earlier[:3] != slice_[:3]:
                raise _damaged(file, f"the slices of {value.tag!r} differ in type or shape")
            slice_ = slice_._replace(content=earlier.content + slice_.content)
        tensors[value.tag] = slice_
    if not tensors:
        raise _damaged(file, "it holds no tensors, or encrypted ones")
    return tensors


def _damaged(file: Path, why: str) -> UserError:
    return UserError(f"{file} is damaged or no .ckpt file of MindSpore: {why}; copy it again.")
