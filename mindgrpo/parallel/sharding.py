"""Which part of each parameter a rank holds, for any mesh.

A parameter is split along at most one dim over the model axis, and lives on the pipeline stage
of its layer. Boxes are in global coordinates. Refuses splits that would cut an attention head in
two, and pipelines that leave a stage without a layer. Knows nothing of tensors' values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from operator import le, sub
from typing import Literal

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Mesh

Position = int | Literal["first", "last", "first_and_last"]


@dataclass(frozen=True)
class ParameterSpec:
    """`shape` is global, in Hugging Face orientation ([out, in]).

    `dim` is split over the model axis in steps of `unit` elements (None: whole on every rank).
    `replicate` lets neighbouring ranks share a unit where there are fewer units than ranks.
    `position` is the parameter's pipeline home: a layer index, or an end of the pipeline, or both.
    `partial_gradient`: whole on every rank of a model group, of which each sees its part of the gradient only.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    unit: int = 1
    replicate: bool = False
    position: Position = field(kw_only=True)
    decay: bool = field(kw_only=True)
    partial_gradient: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.dim is not None and self.shape[self.dim] % self.unit:
            raise UserError(
                f"{self.name} has {self.shape[self.dim]} elements along dim {self.dim}, which is "
                f"no multiple of its head size {self.unit}; correct head_dim in config.json."
            )

    @property
    def num_units(self) -> int:
        return 1 if self.dim is None else self.shape[self.dim] // self.unit

    @property
    def split_rule(self) -> SplitRule:
        return self.shape, self.dim, self.unit, self.replicate


# Parameters of one rule are cut alike, whatever their names and layers.
SplitRule = tuple[tuple[int, ...], int | None, int, bool]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: `start` inclusive, `stop` exclusive."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where there is no common element."""
        if len(self.start) != len(other.start):
            raise ValueError(f"{self} and {other} are boxes of different tensors")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(le, stop, start)):
            return None
        return Box(start, stop)

    def within(self, outer: Box) -> Box:
        """This box in the coordinates of `outer`, which must contain it."""
        if self.size and self.intersect(outer) != self:
            raise ValueError(f"{self} does not lie within {outer}")
        return Box(*(tuple(map(sub, edge, outer.start)) for edge in (self.start, self.stop)))


def layers_of_stage(
    num_layers: int, pipeline_stage: int, offset: int | Sequence[int] = 0
) -> list[range]:
    """Each stage's layers. `offset` 0 gives the earliest stages the layers that are left over.

    A list reads as in MindFormers: stage i has num_layers // pipeline_stage + offset[i] layers.
    """
    base, left_over = divmod(num_layers, pipeline_stage)
    if base < 1:
        raise UserError(
            f"pipeline_stage {pipeline_stage} would split {num_layers} layers, but every stage needs a layer; lower "
            "pipeline_stage."
        )
    if isinstance(offset, int):
        if offset != 0:
            raise UserError(
                f"offset is {offset}, but a number other than 0 has no meaning; "
                f"give a list of {pipeline_stage} numbers, one a pipeline stage."
            )
        offset = [int(stage < left_over) for stage in range(pipeline_stage)]
    if len(offset) != pipeline_stage or sum(offset) != left_over:
        raise UserError(
            f"offset {list(offset)} must have {pipeline_stage} entries (one a pipeline stage) "
            f"with the sum {left_over} ({num_layers} layers modulo {pipeline_stage} stages); "
            f"set it to 0 to split evenly."
        )
    if min(counts := [base + extra for extra in offset]) < 1:
        raise UserError(
            f"pipeline_stage {pipeline_stage} would split {num_layers} layers as {counts}, but "
            f"every stage needs a layer; lower pipeline_stage or change offset."
        )
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def stages_of(spec: ParameterSpec, stage_layers: Sequence[range]) -> tuple[int, ...]:
    last = len(stage_layers) - 1
    if isinstance(spec.position, str):
        return {"first": (0,), "last": (last,), "first_and_last": (0, last)[: last + 1]}[
            spec.position
        ]
    for stage, layers in enumerate(stage_layers):
        if spec.position in layers:
            return (stage,)
    raise ValueError(f"{spec.name} belongs to layer {spec.position}, which no stage has")


def _refuse_cut_heads(spec: ParameterSpec, model_parallel: int) -> None:
    units = spec.num_units
    if spec.replicate:
        if units % model_parallel and model_parallel % units:
            raise UserError(
                f"num_key_value_heads {units} can be neither split over nor repeated on "
                f"model_parallel {model_parallel} ranks ({spec.name}); set "
                f"parallel_config.model_parallel to a divisor or a multiple of {units}."
            )
    elif spec.unit > 1 and units % model_parallel:
        raise UserError(
            f"num_attention_heads {units} cannot be split evenly over model_parallel "
            f"{model_parallel} ranks ({spec.name}); set parallel_config.model_parallel to a "
            f"divisor of {units}."
        )


def num_replicas(spec: ParameterSpec, model_parallel: int) -> int:
    """How many ranks of the model axis hold the same box."""
    _refuse_cut_heads(spec, model_parallel)
    if spec.dim is None:
        return model_parallel
    return max(1, model_parallel // spec.num_units) if spec.replicate else 1


def box_of(spec: ParameterSpec, model_parallel: int, model_index: int) -> Box:
    """The part a model index holds: shares are rounded up, so the last may be short or empty."""
    if not 0 <= model_index < model_parallel:
        raise IndexError(f"model index {model_index} is outside model_parallel {model_parallel}")
    replicas = num_replicas(spec, model_parallel)
    start, stop = [0] * len(spec.shape), list(spec.shape)
    if spec.dim is not None:
        length = spec.shape[spec.dim]
        share = local_shape(spec, model_parallel)[spec.dim]
        start[spec.dim] = min(length, model_index // replicas * share)
        stop[spec.dim] = min(length, start[spec.dim] + share)
    return Box(tuple(start), tuple(stop))


def local_shape(spec: ParameterSpec, model_parallel: int) -> tuple[int, ...]:
    """The shape to allocate: the same on every model rank, padded where shares are short."""
    shares = model_parallel // num_replicas(spec, model_parallel)
    shape = list(spec.shape)
    if spec.dim is not None:
        shape[spec.dim] = -(-spec.num_units // shares) * spec.unit
    return tuple(shape)


@dataclass(frozen=True)
class Layout:
    """A mesh with the parameters laid out on it."""

    mesh: Mesh
    specs: tuple[ParameterSpec, ...]
    stage_layers: tuple[range, ...]

    def __post_init__(self) -> None:
        if len(self.stage_layers) != self.mesh.pipeline_stage:
            raise ValueError(f"{self.mesh} needs layers for each of its stages")
        if len({spec.name for spec in self.specs}) != len(self.specs):
            raise ValueError("two parameters have the same name")

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def _boxes(self) -> dict[SplitRule, tuple[Box, ...]]:
        num_shards = self.mesh.model_parallel
        rules = {spec.split_rule: spec for spec in self.specs}
        return {
            rule: tuple(box_of(spec, num_shards, index) for index in range(num_shards))
            for rule, spec in rules.items()
        }

    @cached_property
    def _held(self) -> list[list[dict[str, Box]]]:
        """By [stage][model index]: the data axis repeats these."""
        num_shards = range(self.mesh.model_parallel)
        held: list[list[dict[str, Box]]] = [[{} for _ in num_shards] for _ in self.stage_layers]
        for spec in self.specs:
            for index, box in enumerate(self._boxes[spec.split_rule]):
                if box.size:
                    for stage in stages_of(spec, self.stage_layers):
                        held[stage][index][spec.name] = box
        return held

    def boxes_of(self, name: str) -> tuple[Box, ...]:
        """One box a model index; replicated parts repeat and short tails may be empty."""
        return self._boxes[self.by_name[name].split_rule]

    def stages_of(self, name: str) -> tuple[int, ...]:
        return stages_of(self.by_name[name], self.stage_layers)

    def whole_on(self, mesh: Mesh) -> Layout:
        """The same parameters on a mesh that splits none of them."""
        if mesh.model_parallel != 1 or mesh.pipeline_stage != 1:
            raise ValueError(f"{mesh} splits parameters")
        return Layout(mesh, self.specs, (range(self.stage_layers[-1].stop),))

    def held_by(self, rank: int) -> dict[str, Box]:
        """Non-empty boxes by name, in the order of `specs`; nothing for ranks off the mesh."""
        if not self.mesh.holds(rank):
            return {}
        _, model, stage = self.mesh.coordinates(rank)
        return dict(self._held[stage][model])

    def holders(self, name: str) -> list[tuple[int, Box]]:
        """(rank, non-empty box) in the order of ranks."""
        boxes = self.boxes_of(name)
        return [
            (int(rank), boxes[model])
            for stage in self.stages_of(name)
            for row in self.mesh.array[stage]
            for model, rank in enumerate(row)
            if boxes[model].size
        ]
