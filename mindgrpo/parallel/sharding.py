"""Computes which slice of each parameter a rank holds, for any mesh.

A parameter can be sharded over any number of mesh axes, and lives on the pipeline stage of its layer. Boxes are in
global coordinates. Rejects splits that would cut an attention head in two, and pipelines with a stage without layers.
Works on shapes only, never on tensor values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import prod
from operator import le, sub
from typing import Literal, TypeVar

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import CONFIG_KEYS, DATA_AXES, DENSE_DATA, Mesh, view_of

Position = int | Literal["first", "last", "first_and_last"]
Ranks = tuple[int, ...]
# stage_layers[stage][chunk] is a range of layers.
StageLayers = tuple[tuple[range, ...], ...]
# How many layers each stage has beyond an even split: [stage], or [chunk][stage]; 0 splits evenly.
Offset = int | Sequence[int] | Sequence[Sequence[int]]
T = TypeVar("T")


@dataclass(frozen=True)
class Split:
    """Shards tensor dimension `dim` over mesh axis `axis`, in multiples of `unit` elements.

    `axis` may join several axes of one view with "+", outermost first ("dp+cp"), which are flattened into one.
    `replicate` gives neighbouring ranks copies of the same unit if there are fewer units than ranks (KV heads).
    """

    axis: str
    dim: int
    unit: int = 1
    replicate: bool = False

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.axis.split("+"))


@dataclass(frozen=True)
class ParameterSpec:
    """How one parameter is sharded and stored. `shape` is global, in Hugging Face orientation [..., out, in].

    `splits` use axes of one view of the mesh; several splits of one dim are nested in their order. The parameter is
    replicated along all other axes.
    `summed_over`: the axes whose ranks each compute a partial gradient, which has to be summed over the ranks that
    hold the same slice.
    `position` places the parameter in the pipeline: a layer index, the first stage, the last stage, or both.
    `window` limits sharding to this box of the parameter, and no rank holds elements outside it; None shards all of it.
    `transposed`: the stored tensor has its last two dims swapped, [..., in, out]. `fused_key` is the name of the stored
    tensor that concatenates several parameters along its last dim; empty if the parameter has a tensor of its own.
    """

    name: str
    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    position: Position = field(kw_only=True)
    decay: bool = field(kw_only=True)
    summed_over: frozenset[str] = field(default=DENSE_DATA, kw_only=True)
    window: Box | None = field(default=None, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    fused_key: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        view_of(self.axes)
        if len(self.axes) != sum(len(split.axes) for split in self.splits):
            raise ValueError(
                f"{self.name} is split twice over one axis, so that parts of it are nowhere"
            )
        for split in self.splits:
            if self.shape[split.dim] % split.unit:
                raise UserError(
                    f"{self.name} has {self.shape[split.dim]} elements along dim {split.dim}, which is "
                    f"no multiple of its head size {split.unit}; correct head_dim in config.json."
                )

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Returns the mesh axes that the parameter is sharded over."""
        return tuple(dict.fromkeys(axis for split in self.splits for axis in split.axes))

    @property
    def key(self) -> str:
        """Returns the name of the tensor that stores the parameter."""
        return self.fused_key or self.name

    @property
    def data_axes(self) -> frozenset[str]:
        return self.summed_over & DATA_AXES

    def split_over_data(self) -> ParameterSpec:
        """Shards each rank's slice further, along the first stored dim, over the data axes of its gradient sum."""
        first, *_ = self.as_stored(range(len(self.shape)))
        axes = (axis for axis in view_of(self.data_axes) if axis in self.data_axes)
        return replace(self, splits=(*self.splits, Split("+".join(axes), first)))

    def as_stored(self, dims: Sequence[T]) -> tuple[T, ...]:
        """Reorders a sequence with one entry per dim of `shape` to the dims of the stored tensor."""
        if not self.transposed:
            return tuple(dims)
        *outer, rows, columns = dims
        return (*outer, columns, rows)


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
        """Returns the intersection, or None if it is empty."""
        if len(self.start) != len(other.start):
            raise ValueError(f"{self} and {other} are boxes of different tensors")
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(map(le, stop, start)):
            return None
        return Box(start, stop)

    def within(self, outer: Box) -> Box:
        """Returns this box in the coordinates of `outer`, which must contain it."""
        if self.size and self.intersect(outer) != self:
            raise ValueError(f"{self} does not lie within {outer}")
        return Box(*(tuple(map(sub, edge, outer.start)) for edge in (self.start, self.stop)))


def layers_of_stage(
    num_layers: int, pipeline_stage: int, offset: Offset = 0, pp_interleave_num: int = 1
) -> StageLayers:
    """Assigns layers to stages and chunks: chunk c of stage s is part c * pipeline_stage + s of the model.

    `offset` 0 gives one extra layer each to the earliest parts if the split is uneven. A list has MindFormers' meaning:
    part i gets num_layers // num_parts + offset[i] layers; with several chunks it is nested, offset[c][s]. Raises
    UserError if a part would have no layer or `offset` does not fit.
    """
    num_parts = pipeline_stage * pp_interleave_num
    base, left_over = divmod(num_layers, num_parts)
    over, keys = f"{pipeline_stage} stages", f"pipeline_stage {pipeline_stage}"
    if pp_interleave_num > 1:
        over += f" of {pp_interleave_num} chunks"
        keys += f" or pp_interleave_num {pp_interleave_num}"
    if base < 1:
        raise UserError(
            f"{num_layers} layers cannot be split over {over}, each of which needs a layer; lower {keys}."
        )
    if isinstance(offset, int):
        if offset != 0:
            raise UserError(
                f"offset is {offset}, but a number other than 0 has no meaning; "
                f"give a list of {pipeline_stage} numbers, one a pipeline stage."
            )
        flat = [int(part < left_over) for part in range(num_parts)]
    else:
        rows = [[extra] if isinstance(extra, int) else list(extra) for extra in offset]
        lists, shape = "", [1] * pipeline_stage
        if pp_interleave_num > 1:
            lists = f"{pp_interleave_num} lists (one a chunk) of "
            shape = [pipeline_stage] * pp_interleave_num
        flat = [extra for row in rows for extra in row]
        if sum(flat) != left_over or list(map(len, rows)) != shape:
            raise UserError(
                f"offset {list(offset)} must have {lists}{pipeline_stage} entries (one a pipeline stage) "
                f"with the sum {left_over} ({num_layers} layers modulo {over}); "
                f"set it to 0 to split evenly."
            )
    if min(counts := [base + extra for extra in flat]) < 1:
        raise UserError(
            f"{over} would split {num_layers} layers as {counts}, but each needs a layer; lower {keys} or change "
            "offset."
        )
    ends = list(accumulate(counts))
    ranges = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    return tuple(tuple(ranges[stage::pipeline_stage]) for stage in range(pipeline_stage))


def box_of(spec: ParameterSpec, mesh: Mesh, index: Mapping[str, int]) -> Box:
    """Returns the box of the ranks at coordinates `index` {axis: coordinate}.

    Shard sizes are rounded up to whole units, so that the last shard may be short or empty.
    """
    start, stop = [0] * len(spec.shape), list(spec.shape)
    if spec.window is not None:
        start, stop = list(spec.window.start), list(spec.window.stop)
    for split in spec.splits:
        size, dim, at = mesh.size_of(split.axes), split.dim, 0
        for axis in split.axes:
            extent = getattr(mesh, axis)
            if not 0 <= index[axis] < extent:
                raise IndexError(f"index {index[axis]} is outside axis {axis} of {mesh}")
            at = at * extent + index[axis]
        units = -(-(stop[dim] - start[dim]) // split.unit)
        copies = _copies(spec, split, size, units)
        share = -(-units // (size // copies)) * split.unit
        start[dim] = min(stop[dim], start[dim] + at // copies * share)
        stop[dim] = min(stop[dim], start[dim] + share)
    return Box(tuple(start), tuple(stop))


def _copies(spec: ParameterSpec, split: Split, size: int, units: int) -> int:
    """Returns how many neighbouring ranks, of `size`, hold a copy of each of `units`.

    Raises UserError if attention heads would be cut.
    """
    key = CONFIG_KEYS.get(split.axis, split.axis)
    if split.replicate:
        if units and units % size and size % units:
            raise UserError(
                f"num_key_value_heads {units} can be neither split over nor repeated on "
                f"{key} {size} ranks ({spec.name}); set "
                f"parallel_config.{key} to a divisor or a multiple of {units}."
            )
        return max(1, size // max(1, units))
    if split.unit > 1 and units % size:
        raise UserError(
            f"num_attention_heads {units} cannot be split evenly over {key} "
            f"{size} ranks ({spec.name}); set parallel_config.{key} to a "
            f"divisor of {units}."
        )
    return 1


def local_shape(spec: ParameterSpec, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape to allocate, the same on every rank: that of the first shard, which is never a short one."""
    return box_of(spec, mesh, dict.fromkeys(spec.axes, 0)).shape


# (shape, splits, stages, window): parameters with equal rules are sharded identically.
Rule = tuple[tuple[int, ...], tuple[Split, ...], tuple[int, ...], Box | None]


@dataclass(frozen=True)
class Layout:
    """A mesh and the sharding of a model's parameters on it.

    `splits_tokens` turns on sequence parallelism: between tensor-parallel GEMMs, activations are sharded over tokens.
    """

    mesh: Mesh
    specs: tuple[ParameterSpec, ...]
    stage_layers: StageLayers
    splits_tokens: bool = False

    def __post_init__(self) -> None:
        if len(self.stage_layers) != self.mesh.pp:
            raise ValueError(f"{self.mesh} needs layers for each of its stages")
        if len(self.by_name) != len(self.specs):
            raise ValueError("two parameters have the same name")

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        specs: tuple[ParameterSpec, ...],
        offset: Offset = 0,
        splits_tokens: bool = False,
        pp_interleave_num: int = 1,
    ) -> Layout:
        """Makes the layout of a model. Raises UserError if its layers or heads cannot be split over `mesh`."""
        layers = [spec.position for spec in specs if isinstance(spec.position, int)]
        num_layers = max(layers, default=0) + 1
        stage_layers = layers_of_stage(num_layers, mesh.pp, offset, pp_interleave_num)
        layout = cls(mesh, specs, stage_layers, splits_tokens)
        _ = layout.local_sizes
        return layout

    @cached_property
    def by_name(self) -> dict[str, ParameterSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def _stage_of_layer(self) -> dict[int, int]:
        return {
            layer: stage
            for stage, chunks in enumerate(self.stage_layers)
            for layers in chunks
            for layer in layers
        }

    @cached_property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape to allocate on a rank for each parameter, by name, with short shards padded.

        Raises UserError if the mesh would cut attention heads.
        """
        # Most parameters repeat in every layer.
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        shapes = {}
        for spec in self.specs:
            rule = (spec.shape, spec.splits, spec.window)
            if rule not in known:
                known[rule] = local_shape(spec, self.mesh)
            shapes[spec.name] = known[rule]
        return shapes

    @cached_property
    def local_sizes(self) -> dict[str, int]:
        """Returns the number of elements of each of `local_shapes`. Raises UserError if the mesh would cut heads."""
        return {name: prod(shape) for name, shape in self.local_shapes.items()}

    @cached_property
    def stored_sizes(self) -> dict[str, int]:
        """Returns the number of elements of each stored tensor on a rank, by its key."""
        sizes: dict[str, int] = {}
        for spec in self.specs:
            sizes[spec.key] = sizes.get(spec.key, 0) + self.local_sizes[spec.name]
        return sizes

    @property
    def token_shares(self) -> int:
        """Returns the number of token shards between tensor-parallel GEMMs: tp with sequence parallelism, else 1."""
        return self.mesh.tp if self.splits_tokens else 1

    @property
    def num_layers(self) -> int:
        return len(self._stage_of_layer)

    @property
    def num_chunks(self) -> int:
        """Returns the number of layer chunks per stage (interleaved pipeline)."""
        return len(self.stage_layers[0])

    def stages_of(self, name: str) -> tuple[int, ...]:
        position, last = self.by_name[name].position, len(self.stage_layers) - 1
        if isinstance(position, str):
            ends = {"first": (0,), "last": (last,), "first_and_last": (0, last)[: last + 1]}
            return ends[position]
        if position not in self._stage_of_layer:
            raise ValueError(f"{name} belongs to layer {position}, which no stage has")
        return (self._stage_of_layer[position],)

    def whole_on(self, mesh: Mesh) -> Layout:
        """Returns the layout with every parameter whole on each rank of `mesh`, which may have a dp axis only."""
        if mesh.size != mesh.dp:
            raise ValueError(f"{mesh} splits parameters")
        return Layout(mesh, self.specs, ((range(self.num_layers),),))

    @cached_property
    def stage_sizes(self) -> tuple[int, ...]:
        """Returns the number of elements that a rank of each stage stores, with short shards padded."""
        sizes = [0] * len(self.stage_layers)
        for spec in self.specs:
            for stage in self.stages_of(spec.name):
                sizes[stage] += self.local_sizes[spec.name]
        return tuple(sizes)

    @property
    def num_replicas(self) -> int:
        """Returns the largest number of data-parallel ranks (dp x cp or edp) that a gradient is summed over."""
        return max(self.mesh.size_of(spec.data_axes) for spec in self.specs)

    @property
    def has_replicas(self) -> bool:
        """Returns whether gradients are summed over data-parallel replicas."""
        return self.num_replicas > 1

    def split_over_data(self) -> Layout:
        """Returns the layout of optimizer state: each slice is sharded over its replicas (ZeRO-1, arXiv:1910.02054)."""
        return self._split_over_data

    @cached_property
    def _split_over_data(self) -> Layout:
        return replace(self, specs=tuple(spec.split_over_data() for spec in self.specs))

    @cached_property
    def _rules(self) -> dict[str, Rule]:
        return {s.name: (s.shape, s.splits, self.stages_of(s.name), s.window) for s in self.specs}

    @cached_property
    def _known(self) -> dict[Rule, dict[Box, Ranks]]:
        return {}

    def rule_of(self, name: str) -> Rule:
        return self._rules[name]

    def ranks_by_box(self, name: str) -> Mapping[Box, Ranks]:
        """Returns the distinct non-empty boxes of a parameter, and for each the ranks that hold it, in order."""
        rule = self._rules[name]
        if rule not in self._known:
            self._known[rule] = self._ranks_by_box(self.by_name[name], rule[2])
        return self._known[rule]

    def _ranks_by_box(self, spec: ParameterSpec, stages: Ranks) -> dict[Box, Ranks]:
        view = view_of(spec.axes)
        ranks = self.mesh.ranks(view)[list(stages)]
        by_box: dict[Box, list[int]] = {}
        for numbers in product(*(range(getattr(self.mesh, axis)) for axis in spec.axes)):
            index: dict[str, int] = dict(zip(spec.axes, numbers, strict=True))
            box = box_of(spec, self.mesh, index)
            if box.size:
                here = ranks[tuple(index.get(axis, slice(None)) for axis in view)]
                by_box.setdefault(box, []).extend(here.ravel().tolist())
        return {box: tuple(sorted(own)) for box, own in by_box.items()}

    @cached_property
    def _held(self) -> dict[tuple[int, ...], dict[str, Box]]:
        """Caches the results of `held_by`, by the rank's coordinates along pp and all sharded axes."""
        return {}

    @cached_property
    def _axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("pp", *(axis for spec in self.specs for axis in spec.axes))))

    def held_by(self, rank: int) -> dict[str, Box]:
        """Returns the non-empty boxes that `rank` holds, by parameter name in the order of `specs`.

        The result is empty for a rank outside the mesh.
        """
        if not self.mesh.holds(rank):
            return {}
        index = {axis: self.mesh.index(rank, axis) for axis in self._axes}
        key = tuple(index.values())
        if key not in self._held:
            boxes: dict[Rule, Box] = {}
            held: dict[str, Box] = {}
            for spec in self.specs:
                rule = self._rules[spec.name]
                if index["pp"] not in rule[2]:
                    continue
                if rule not in boxes:
                    boxes[rule] = box_of(spec, self.mesh, index)
                if boxes[rule].size:
                    held[spec.name] = boxes[rule]
            self._held[key] = held
        return dict(self._held[key])
