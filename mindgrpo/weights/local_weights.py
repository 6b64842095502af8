"""One role's weights on one rank: a pool, the tensors that cells compute with, and the tensors that files know.

Matrices are stored [in, out], as small products run faster that way, and q/k/v and gate/up concatenated in one
matrix; on the host each can be had as a view of its Hugging Face tensor's slice, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops

from mindgrpo.backend.contract import Backend, HostArrays, PeerView, Pool
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, local_shape

FUSED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
# Kept [vocabulary, hidden]: rows are gathered by token id.
UNTRANSPOSED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class FusedParameter:
    """One tensor of the pool: `specs` are concatenated along its last dim, `widths[i]` wide each."""

    key: str
    specs: tuple[ParameterSpec, ...]
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    offset: int
    decay: bool

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def columns(self) -> Iterator[tuple[ParameterSpec, int, int]]:
        """Each parameter with its first column and its number of columns."""
        start = 0
        for spec, width in zip(self.specs, self.widths, strict=True):
            yield spec, start, width
            start += width


def _fused_key(name: str) -> str:
    for key, modules in FUSED:
        for module in modules:
            name = name.replace(f".{module}.", f".{key}.")
    return name


def is_transposed(name: str, num_dims: int) -> bool:
    """Tells whether parameter `name` is stored [in, out]."""
    return num_dims == 2 and name not in UNTRANSPOSED


def arrange(layout: Layout, rank: int) -> tuple[FusedParameter, ...]:
    """Lays out the rank's tensors in its pool: those with weight decay first, so that each kind is one flat range."""
    groups: dict[str, list[ParameterSpec]] = {}
    if layout.mesh.holds(rank):
        stage = layout.mesh.coordinates(rank).stage
        for spec in layout.specs:
            if stage in layout.stages_of(spec.name):
                groups.setdefault(_fused_key(spec.name), []).append(spec)
    stored: list[FusedParameter] = []
    offset = 0
    for key, specs in sorted(groups.items(), key=lambda group: not group[1][0].decay):
        shapes = [local_shape(spec, layout.mesh.model_parallel) for spec in specs]
        if is_transposed(specs[0].name, len(specs[0].shape)):
            shapes = [shape[::-1] for shape in shapes]
        widths = tuple(shape[-1] for shape in shapes)
        shape = (*shapes[0][:-1], sum(widths))
        stored.append(FusedParameter(key, tuple(specs), shape, widths, offset, specs[0].decay))
        offset += stored[-1].size
    return tuple(stored)


@dataclass(frozen=True)
class Region:
    """Part of a tensor as it is stored."""

    key: str
    slices: tuple[slice, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(one.stop - one.start for one in self.slices)


class WeightArrays:
    """Arrays of `layout` on `rank`, in host memory.

    `tensors[key]` as stored; `hf_views[name]` [out, in], exactly the box `boxes[name]` of the
    Hugging Face tensor; `flat_buffers` two 1-dim ranges of the memory, with and without weight decay.
    """

    def __init__(
        self, layout: Layout, rank: int, fused: Sequence[FusedParameter], memory: HostArrays
    ) -> None:
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        self.tensors = {e.key: memory.view(e.offset, e.shape) for e in fused}
        self.hf_views = dict(self._views(fused))
        size = sum(entry.size for entry in fused)
        decaying = sum(entry.size for entry in fused if entry.decay)
        self.flat_buffers = memory.view(0, (decaying,)), memory.view(decaying, (size - decaying,))

    @classmethod
    def of_peer(cls, layout: Layout, rank: int, pool: PeerView) -> WeightArrays:
        """The weights that another rank of this host holds in shared memory, without a copy."""
        return cls(layout, rank, arrange(layout, rank), pool)

    def _views(self, fused: Sequence[FusedParameter]) -> Iterator[tuple[str, np.ndarray]]:
        for entry in fused:
            for spec, start, width in entry.columns():
                view = self.tensors[entry.key][..., start : start + width]
                if is_transposed(spec.name, len(spec.shape)):
                    view = view.T
                box = self.boxes.get(spec.name)
                if box is not None:
                    yield spec.name, view[tuple(slice(0, extent) for extent in box.shape)]


class Weights:
    """The pool of `layout`'s parameters on `rank`; also of gradients and moments, which are arranged alike.

    `name` is the role's, the start of its parameters' names. `shared` lets other ranks read the pool; `on_host_only`
    keeps all of it in the host's memory, where no graph works on it.
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
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        # A Parameter for each stored tensor, by key.
        self.parameters: dict[str, Any] = {}
        if not on_host_only:
            self.parameters = {e.key: self._parameter_of(e) for e in self.fused}

    def _parameter_of(self, entry: FusedParameter) -> Any:
        return self.pool.parameter(f"{self.name}.{entry.key}", entry.offset, entry.shape)

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[WeightArrays]:
        """The values as arrays, valid inside; with `write`, what was written goes to the device."""
        if self.pool.is_host_memory:
            yield self.arrays
            return
        with self.pool.on_host(write) as memory:
            yield WeightArrays(self.layout, self.rank, self.fused, memory)

    @cached_property
    def arrays(self) -> WeightArrays:
        """The weights themselves. Raises ValueError where the device's memory is not the host's."""
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
        """Of the parameters that this rank holds a part of."""
        return [spec.name for spec in self.specs() if spec.name in self.boxes]

    def region(self, name: str, box: Box | None = None) -> Region:
        """Where `box` of parameter `name` (global coordinates; None: all that is here) is stored."""
        entry, start = self._stored_at[name]
        own = self.boxes[name]
        slices = (own if box is None else box).within(own).slices
        if is_transposed(name, len(slices)):
            slices = slices[::-1]
        last = slices[-1]
        return Region(entry.key, (*slices[:-1], slice(last.start + start, last.stop + start)))

    def is_transposed(self, name: str) -> bool:
        """Whether parameter `name` is stored [in, out]."""
        return is_transposed(name, len(self.boxes[name].start))

    def part(self, name: str, box: Box | None = None) -> Any:
        """`box` of parameter `name` on the device, as it is stored: a view, which sees what is written later."""
        region = self.region(name, box)
        return self.parameters[region.key][region.slices]

    def set_parts(self, written: Sequence[tuple[Region, Any]]) -> None:
        """Writes tensors of the device, in the order of their elements, into regions of parameters."""
        for region, values in written:
            # As integers, which no device rounds, and in place: graphs go on to read the memory that they know.
            bits = device_bits(self.parameters[region.key])
            bits[region.slices] = device_bits(values.reshape(region.shape))

    @cached_property
    def _stored_at(self) -> dict[str, tuple[FusedParameter, int]]:
        return {
            spec.name: (entry, start) for entry in self.fused for spec, start, _ in entry.columns()
        }

    def specs(self) -> Iterator[ParameterSpec]:
        for entry in self.fused:
            yield from entry.specs


def device_bits(tensor: Any) -> Any:
    """The same memory of the device as integers, int32 or int16."""
    return tensor.view(ms.int32 if tensor.dtype == ms.float32 else ms.int16)


def round_into(target: Weights, source: Weights) -> None:
    """Gives `target` the values of `source`, in its own dtype; both of one layout, on one rank."""
    if source.pool.is_host_memory:
        with target.on_host(write=True) as rounded, source.on_host() as exact:
            for to, values in zip(rounded.flat_buffers, exact.flat_buffers, strict=True):
                to[...] = values
        return
    for weights in (target, source):
        weights.pool.load()
    for key, parameter in target.parameters.items():
        ops.assign(parameter, source.parameters[key].astype(mindspore_dtype(target.dtype)))
