"""The tensors of a model directory by name, read slice by slice as float32, whatever the format of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box

# By safetensors' names. numpy knows no bfloat16: it is carried as the upper half of a float32.
STORED_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


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
