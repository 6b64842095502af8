"""One role's weights on one rank: their pool, the stored (fused) tensors, and views as Hugging Face tensors.

A ParameterSpec says how a parameter is stored. On the host, each is available as a view of its slice of the Hugging
Face tensor, [out, in]. HostTensors lays such slices out one after another in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from mindgrpo.backend.arithmetic.contract import Stored
from mindgrpo.backend.contract import Backend, HostArrays, PeerView, Pool
from mindgrpo.backend.dtypes import Dtype, device_bits
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec


@dataclass(frozen=True)
class FusedTensor:
    """One tensor of the pool: `specs` are concatenated along its last dim, `widths[i]` wide each."""

    specs: tuple[ParameterSpec, ...]
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    offset: int

    @property
    def key(self) -> str:
        return self.specs[0].key

    @property
    def decay(self) -> bool:
        return self.specs[0].decay

    @property
    def data_axes(self) -> frozenset[str]:
        return self.specs[0].data_axes

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def columns(self) -> Iterator[tuple[ParameterSpec, int, int]]:
        """Yields each parameter with its first column and its number of columns."""
        start = 0
        for spec, width in zip(self.specs, self.widths, strict=True):
            yield spec, start, width
            start += width


def arrange(layout: Layout, rank: int) -> tuple[FusedTensor, ...]:
    """Lays out the rank's tensors in its pool, grouped by weight decay (decayed first) and data axes.

    Each group is a contiguous range.
    """
    groups: dict[str, list[ParameterSpec]] = {}
    if layout.mesh.holds(rank):
        stage = layout.mesh.index(rank, "pp")
        for spec in layout.specs:
            if stage in layout.stages_of(spec.name):
                groups.setdefault(spec.key, []).append(spec)
    stored: list[FusedTensor] = []
    offset = 0
    for specs in sorted(groups.values(), key=lambda own: (not own[0].decay, *own[0].data_axes)):
        shapes = [spec.as_stored(layout.local_shapes[spec.name]) for spec in specs]
        widths = tuple(shape[-1] for shape in shapes)
        shape = (*shapes[0][:-1], sum(widths))
        stored.append(FusedTensor(tuple(specs), shape, widths, offset))
        offset += stored[-1].size
    return tuple(stored)


@dataclass(frozen=True)
class Region:
    """The slice `slices` of the stored tensor `key`, which has the shape `within`."""

    key: str
    slices: tuple[slice, ...]
    within: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(one.stop - one.start for one in self.slices)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, tensor: Any) -> Any:
        """Returns the region of a device tensor: the tensor itself if it is whole, else a view."""
        return tensor if self.shape == self.within else tensor[self.slices]

    def write(self, tensor: Any, values: Any) -> None:
        # The only form that works in MindSpore 2.9 and 2.10 on all devices: copy_ of a view and [...] write to a copy
        # or fail.
        tensor[self.slices] = values

    @property
    def is_contiguous(self) -> bool:
        """Returns whether the region is contiguous: every dim behind the first of extent above 1 is whole."""
        shape = self.shape
        cut = next((dim for dim, extent in enumerate(shape) if extent > 1), len(shape))
        return shape[cut + 1 :] == self.within[cut + 1 :]


class Places:
    """Finds where `rank` stores the parameters of `layout`: in fused tensors, or, with `apart`, each in its own."""

    def __init__(self, layout: Layout, rank: int, apart: bool = False) -> None:
        self._specs, self._boxes = layout.by_name, layout.held_by(rank)
        if apart:
            layout = replace(layout, specs=tuple(replace(s, fused_key="") for s in layout.specs))
        self._stored_at = {
            spec.name: (entry, start)
            for entry in arrange(layout, rank)
            for spec, start, _ in entry.columns()
        }

    def region(self, name: str, box: Box | None = None) -> Region:
        """Returns the region that stores `box` of parameter `name`, in global coordinates (None: this rank's box)."""
        entry, start = self._stored_at[name]
        own = self._boxes[name]
        *outer, last = self._specs[name].as_stored((own if box is None else box).within(own).slices)
        columns = slice(last.start + start, last.stop + start)
        return Region(entry.key, (*outer, columns), entry.shape)


class WeightArrays:
    """The weights of `rank` as numpy arrays in host memory, in several views.

    `tensors[key]` are the stored tensors. `hf_views[name]` [out, in] is box `boxes[name]` of the Hugging Face tensor.
    `flat_buffers` [elements] are the contiguous ranges of tensors with the same weight decay and data axes.
    """

    def __init__(
        self, layout: Layout, rank: int, fused: Sequence[FusedTensor], memory: HostArrays
    ) -> None:
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        self.tensors = {e.key: memory.view(e.offset, e.shape) for e in fused}
        self.hf_views = dict(self._views(fused))
        runs = groupby(fused, lambda entry: (entry.decay, entry.data_axes))
        self.flat_buffers = [
            memory.view(run[0].offset, (sum(entry.size for entry in run),))
            for _, own in runs
            for run in [list(own)]
        ]

    @classmethod
    def of_peer(cls, layout: Layout, rank: int, pool: PeerView) -> WeightArrays:
        """Views the weights that another rank of this host holds in shared memory, without a copy."""
        return cls(layout, rank, arrange(layout, rank), pool)

    def _views(self, fused: Sequence[FusedTensor]) -> Iterator[tuple[str, np.ndarray]]:
        for entry in fused:
            for spec, start, width in entry.columns():
                view = self.tensors[entry.key][..., start : start + width]
                if spec.transposed:
                    view = view.swapaxes(-1, -2)
                box = self.boxes.get(spec.name)
                if box is not None:
                    yield spec.name, view[tuple(slice(0, extent) for extent in box.shape)]


class Weights:
    """The parameters of `layout` on `rank`, in one pool; also gradients and moments, which are laid out alike.

    `name` is the role, the prefix of its Parameters' names. `shared` lets other ranks read the pool; `on_host_only`
    keeps it in host memory, where no graph uses it.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        backend: Backend,
        name: str = "weights",
        shared: bool = False,
        on_host_only: bool = False,
        dtype: Dtype = "float32",
    ) -> None:
        self.layout, self.rank, self.name = layout, rank, name
        self.on_host_only = on_host_only
        self.fused = arrange(layout, rank)
        size = sum(entry.size for entry in self.fused)
        self.pool: Pool = (
            backend.host_pool(size, dtype=dtype)
            if on_host_only
            else backend.pool(size, shared, dtype)
        )
        # A Parameter for each stored tensor, by key.
        self.parameters: dict[str, Any] = {}
        if not on_host_only:
            self.parameters = {e.key: self._parameter_of(e) for e in self.fused}

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Returns each stored tensor's location in the pool, by key, for arithmetic outside of model graphs."""
        of_graphs = self.parameters.get
        return {e.key: Stored(self.pool, e.offset, e.shape, of_graphs(e.key)) for e in self.fused}

    @cached_property
    def boxes(self) -> Mapping[str, Box]:
        """Returns the part of each parameter that this rank holds, in global coordinates."""
        return self.layout.held_by(self.rank)

    def _parameter_of(self, entry: FusedTensor) -> Any:
        return self.pool.parameter(f"{self.name}.{entry.key}", entry.offset, entry.shape)

    def restore_names(self) -> None:
        """Restores the Parameters' names, which a cell that contains them overwrites with their paths in it.

        Paths can be equal in several chunks of a stage, and a graph refuses two Parameters of one name.
        """
        for key, parameter in self.parameters.items():
            parameter.name = f"{self.name}.{key}"

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[WeightArrays]:
        """Yields the weights as numpy arrays, valid inside the block; `write` copies changes back to the device."""
        if self.pool.is_host_memory:
            yield self.arrays
            return
        with self.pool.on_host(write) as memory:
            yield WeightArrays(self.layout, self.rank, self.fused, memory)

    @cached_property
    def arrays(self) -> WeightArrays:
        """Returns the weights as arrays without a copy. Raises ValueError if the pool is in device memory."""
        if not self.pool.is_host_memory:
            raise ValueError(f"the {self.name}'s weights are in a device's memory: use on_host()")
        with self.pool.on_host() as memory:
            return WeightArrays(self.layout, self.rank, self.fused, memory)

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes

    @property
    def dtype(self) -> Dtype:
        return self.pool.dtype

    @property
    def names(self) -> list[str]:
        """Lists the parameters of which this rank holds a box."""
        return [spec.name for spec in self.specs() if spec.name in self.boxes]

    def region(self, name: str, box: Box | None = None) -> Region:
        """Returns the region that stores a parameter, or `box` of it: Places.region."""
        return self._places.region(name, box)

    @cached_property
    def _places(self) -> Places:
        return self.places_on(self.rank)

    def places_on(self, rank: int) -> Places:
        """Returns where another rank stores its parts."""
        return Places(self.layout, rank)

    def part(self, name: str, box: Box | None = None) -> Any:
        """Returns a view of `box` of parameter `name` on the device, in stored order; it sees later writes."""
        return self.view(self.region(name, box))

    def view(self, region: Region) -> Any:
        return region.of(self.parameters[region.key])

    def bits(self, region: Region) -> Any:
        """Returns a view of the device's memory as integers."""
        return region.of(device_bits(self.parameters[region.key]))

    def set_parts(self, written: Iterable[tuple[Region, Any]]) -> None:
        """Writes device tensors into regions of the same shapes; integer tensors hold the elements' bits."""
        for region, values in written:
            # As integers, which no device rounds, and in place, because compiled graphs keep reading this memory.
            region.write(device_bits(self.parameters[region.key]), device_bits(values))

    def specs(self) -> Iterator[ParameterSpec]:
        for entry in self.fused:
            yield from entry.specs


# Alignment of tensors, which other libraries expect.
ALIGN_BYTES = 64


def aligned_size(box: Box, itemsize: int) -> int:
    """Returns the box's number of elements, rounded up to ALIGN_BYTES."""
    return -(-box.size * itemsize // ALIGN_BYTES) * ALIGN_BYTES // itemsize


class HostTensors:
    """The parameters of `layout` on `rank`, one after another from the start of a host pool; empty off the mesh.

    `hf_views` are [out, in]; in memory, matrices that ranks store as [in, out] keep that order, so that transfers do
    not transpose. Several HostTensors may use one pool in turn. Weight sync can write into one as into Weights.
    """

    def __init__(self, layout: Layout, rank: int, pool: Pool) -> None:
        self.layout, self.pool = layout, pool
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        # By parameter name: in stored order, and as [out, in] views of it.
        self.tensors: dict[str, np.ndarray] = {}
        self.hf_views: dict[str, np.ndarray] = {}
        if not self.boxes:
            return
        with pool.on_host() as memory:
            self._lay_out(memory)

    def _lay_out(self, memory: HostArrays) -> None:
        offset = 0
        for name, box in self.boxes.items():
            spec = self.layout.by_name[name]
            view = memory.view(offset, spec.as_stored(box.shape))
            self.tensors[name] = view
            self.hf_views[name] = view.swapaxes(-1, -2) if spec.transposed else view
            offset += aligned_size(box, self.pool.itemsize)

    @property
    def arrays(self) -> HostTensors:
        return self

    def places_on(self, rank: int) -> Places:
        return Places(self.layout, rank, apart=True)

    @property
    def names(self) -> list[str]:
        return list(self.boxes)
