"""Translates a layer's experts between parameters [experts, out, in] and the tensors of model files.

Files hold one tensor for each expert and matrix, or fused ones. A parameter is read from slices of them, so that a rank
reads only its own experts, and is written in the format of the run's initial model. A router's selection bias is
float32 [experts] in files, and here a parameter [ADDENDS, experts] whose rows are exact in bfloat16 and sum up to it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mindgrpo.backend.dtypes import numpy_dtype
from mindgrpo.errors import UserError
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.model_files import (
    STORED_AS,
    ModelFiles,
    ModelTensor,
    TensorSlice,
    whole_box,
)

# Formats: of most models' files, of Mixtral's, of transformers 5 in memory, and of the parameters here.
ExpertNames = Literal["per_expert", "mixtral", "fused", "stacked"]
Slices = Mapping[str, Sequence[TensorSlice]]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Mixtral's name of the module with router and experts.
MIXTRAL_MODULE = "block_sparse_moe"
FUSED_INWARD = "gate_up_proj"
# The suffix of a router's bias, and how many bfloat16 numbers represent a float32 exactly as their sum.
BIAS, ADDENDS = "gate.e_score_correction_bias", 3
_OF_ONE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_OF_ONE_IN_MIXTRAL = re.compile(rf"(.*)\.{MIXTRAL_MODULE}\.experts\.(\d+)\.(w[123])\.weight")
_MIXTRAL_ROUTER = re.compile(rf"(.*)\.{MIXTRAL_MODULE}\.gate\.weight")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_PARAMETER = re.compile(r"(.*)\.mlp\.experts\.(gate_proj|up_proj|down_proj)\.weight")
_ROUTER = re.compile(r"(.*)\.mlp\.gate\.weight")


def names_of_experts(names: Iterable[str], model_type: str) -> ExpertNames:
    """Returns the experts' format in files with the tensors `names`; if these have no experts, the family's format."""
    for name in names:
        if _FUSED.fullmatch(name):
            return "fused"
        if _OF_ONE.fullmatch(name):
            return "per_expert"
        if _OF_ONE_IN_MIXTRAL.fullmatch(name):
            return "mixtral"
    return "mixtral" if model_type == "mixtral" else "per_expert"


def stacked(slices: Slices, directory: Path) -> dict[str, Sequence[TensorSlice]]:
    """Assembles parameters from the file tensors `slices`. Raises UserError where experts are missing."""
    parameters: dict[str, Sequence[TensorSlice]] = {}
    experts: dict[str, dict[int, TensorSlice]] = {}
    for name, own in slices.items():
        if match := _OF_ONE.fullmatch(name):
            module, projection = match[1], match[3]
        elif match := _OF_ONE_IN_MIXTRAL.fullmatch(name):
            module, projection = f"{match[1]}.mlp.experts", MIXTRAL_PROJECTIONS[match[3]]
        else:
            parameters |= _renamed(name, own)
            continue
        # One expert's matrix is always a single tensor.
        ((_, tensor),) = own
        index, of_layer = int(match[2]), experts.setdefault(f"{module}.{projection}.weight", {})
        of_layer[index] = Box((index, 0, 0), (index + 1, *tensor.shape)), tensor
    for name, by_index in experts.items():
        _check_complete(name, by_index, directory)
        parameters[name] = [by_index[index] for index in sorted(by_index)]
    return parameters


def _renamed(name: str, own: Sequence[TensorSlice]) -> dict[str, Sequence[TensorSlice]]:
    if name.endswith(f".{BIAS}"):
        ((_, tensor),) = own
        return {name: [_addend_of(tensor, index) for index in range(ADDENDS)]}
    if match := _MIXTRAL_ROUTER.fullmatch(name):
        return {f"{match[1]}.mlp.gate.weight": own}
    match = _FUSED.fullmatch(name)
    ((_, tensor),) = own
    if match is None or len(tensor.shape) != 3:
        return {name: own}
    if match[2] != FUSED_INWARD:
        return {f"{name}.weight": own}
    number, both, hidden = tensor.shape
    half, box = both // 2, whole_box((number, both // 2, hidden))
    return {
        f"{match[1]}.{projection}.weight": [(box, _rows_of(tensor, slice(start, start + half)))]
        for projection, start in (("gate_proj", 0), ("up_proj", both - half))
    }


def addends(bias: NDArray[Any]) -> NDArray[Any]:
    """Splits `bias` float32 [experts] into bfloat16-exact rows that sum up to it, float32 [ADDENDS, experts]."""
    made = []
    for _ in range(ADDENDS):
        made.append(bias.astype(numpy_dtype("bfloat16")).astype(np.float32))
        bias = bias - made[-1]
    return np.stack(made)


def _addend_of(tensor: ModelTensor, index: int) -> TensorSlice:
    """Returns row `index` of the parameter [ADDENDS, experts] whose rows sum up to `tensor` [experts]."""

    def values() -> NDArray[Any]:
        own: NDArray[Any] = addends(ModelFiles(tensor.file, {BIAS: tensor}).read(BIAS))[index]
        return own

    box = Box((index, 0), (index + 1, *tensor.shape))
    # An unreadable dtype is kept, so that check_dtype refuses it.
    dtype = "F32" if tensor.dtype in STORED_AS else tensor.dtype
    return box, tensor._replace(dtype=dtype, values=values)


def _rows_of(tensor: ModelTensor, rows: slice) -> ModelTensor:
    """Returns the slice `rows` of the second dim of a fused tensor [experts, rows, hidden]."""
    number, _, hidden = tensor.shape
    shape = (number, rows.stop - rows.start, hidden)
    return tensor._replace(shape=shape, values=partial(_part, tensor, rows))


def _part(tensor: ModelTensor, rows: slice) -> NDArray[Any]:
    part: NDArray[Any] = tensor.values()[:, rows]
    return part


def _check_complete(name: str, by_index: Mapping[int, TensorSlice], directory: Path) -> None:
    missing = [index for index in range(len(by_index)) if index not in by_index]
    if missing:
        raise UserError(
            f"The model directory '{directory}' lacks expert {missing[0]} of {name} but has later ones; restore its "
            "safetensors files."
        )
    (first, _), *others = by_index.values()
    for box, tensor in others:
        if box.shape != first.shape:
            raise UserError(
                f"Experts of {name} have the shapes {list(first.shape[1:])} and {list(box.shape[1:])} ({tensor.file}), "
                "but all of a layer have one; restore the directory from its source."
            )


@dataclass(frozen=True)
class FileTensor:
    """A tensor to write to a file: boxes of parameters, concatenated along dim -2.

    A router's bias is instead the sum of its boxes.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[str, Box], ...]

    @property
    def rows(self) -> FileRows:
        return FileRows(self, 0, self.shape[0] if self.shape else 1)

    def in_rows(self, most: int) -> Iterator[FileRows]:
        """Yields ranges of at most `most` experts of a fused tensor; one range for any other tensor."""
        if len(self.shape) < 3:
            yield self.rows
            return
        for first in range(0, self.shape[0], most):
            yield FileRows(self, first, min(first + most, self.shape[0]))


@dataclass(frozen=True)
class FileRows:
    """Rows [first, last) of a tensor along dim 0."""

    tensor: FileTensor
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.tensor.shape
        return (self.last - self.first, *shape[1:]) if shape else ()

    @property
    def boxes(self) -> tuple[tuple[str, Box], ...]:
        """Returns the parameters' boxes that make up the rows."""
        if len(self.tensor.shape) < 3:
            return self.tensor.boxes
        return tuple(
            (name, Box((self.first, *box.start[1:]), (self.last, *box.stop[1:])))
            for name, box in self.tensor.boxes
        )

    def made_of(self, values: Callable[[str, Box], NDArray[Any]]) -> NDArray[Any]:
        """Returns the rows as an array, given the `values` of boxes; a view where there is one box."""
        made = [values(name, box) for name, box in self.boxes]
        if self.tensor.name.endswith(f".{BIAS}"):
            total: NDArray[Any] = np.concatenate(made).astype(np.float32).sum(0)
            return total
        whole = made[0] if len(made) == 1 else np.concatenate(made, axis=-2)
        return whole.reshape(self.shape) if whole.ndim == len(self.shape) else whole[0]


def file_tensors(shapes: Mapping[str, Sequence[int]], names: ExpertNames) -> list[FileTensor]:
    """Returns the file tensors, in format `names`, of parameters of `shapes`, in their order.

    Raises UserError where a layer lacks one of its experts' parameters.
    """
    tensors: list[FileTensor] = []
    layers = set()
    for name, shape in shapes.items():
        if name.endswith(f".{BIAS}"):
            addends = tuple((name, Box((i, 0), (i + 1, shape[1]))) for i in range(shape[0]))
            tensors.append(FileTensor(name, tuple(shape[1:]), addends))
            continue
        match = _PARAMETER.fullmatch(name) if len(shape) > 2 and names != "stacked" else None
        if match is None:
            own = name
            if names == "mixtral" and (router := _ROUTER.fullmatch(name)):
                own = f"{router[1]}.{MIXTRAL_MODULE}.gate.weight"
            tensors.append(FileTensor(own, tuple(shape), ((name, whole_box(shape)),)))
        elif match[1] not in layers:
            layers.add(match[1])
            tensors += _of_experts(match[1], shapes, names)
    return tensors


def _of_experts(
    layer: str, shapes: Mapping[str, Sequence[int]], names: ExpertNames
) -> Iterator[FileTensor]:
    module = f"{layer}.mlp.experts"
    parameters = {projection: f"{module}.{projection}.weight" for projection in PROJECTIONS}
    gate, up, down = parameters.values()
    if missing := [name for name in parameters.values() if name not in shapes]:
        raise UserError(
            f"The model lacks {missing[0]} but has others of its experts; restore its files."
        )
    if names == "fused":
        number, inner, hidden = shapes[gate]
        half, both = whole_box(shapes[gate]), (number, 2 * inner, hidden)
        yield FileTensor(f"{module}.{FUSED_INWARD}", both, ((gate, half), (up, half)))
        outward = ((down, whole_box(shapes[down])),)
        yield FileTensor(down.removesuffix(".weight"), tuple(shapes[down]), outward)
        return
    for index in range(shapes[gate][0]):
        for name in parameters.values():
            _, *matrix = shapes[name]
            box = Box((index, 0, 0), (index + 1, *matrix))
            yield FileTensor(name_of_expert(name, index, names), tuple(matrix), ((name, box),))


def name_of_expert(parameter: str, index: int, names: ExpertNames) -> str:
    """Returns the tensor name of one expert's matrix of `parameter`; for the fused format the name per expert."""
    match = _PARAMETER.fullmatch(parameter)
    assert match is not None
    layer, projection = match.groups()
    if names == "mixtral":
        (word,) = (own for own, ours in MIXTRAL_PROJECTIONS.items() if ours == projection)
        return f"{layer}.{MIXTRAL_MODULE}.experts.{index}.{word}.weight"
    return f"{layer}.mlp.experts.{index}.{projection}.weight"
