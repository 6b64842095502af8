"""One role's weights on one rank: a pool, the tensors that cells compute with, and the tensors that files know.

Matrices are stored [in, out], as small products run faster that way, and q/k/v and gate/up concatenated in one
matrix; `hf_views` has each as a view of its Hugging Face tensor's slice, [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mindgrpo.backend.contract import Backend, PeerView, Pool
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, local_shape

FUSED = (
    ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
)
# Kept [vocabulary, hidden]: rows are gathered by token id.
UNTRANSPOSED = ("model.embed_tokens.weight", "lm_head.weight")
FLOAT_BYTES = 4


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
    if layout.grid.holds(rank):
        stage = layout.grid.coordinates(rank).stage
        for spec in layout.specs:
            if stage in layout.stages_of(spec.name):
                groups.setdefault(_fused_key(spec.name), []).append(spec)
    stored: list[FusedParameter] = []
    offset = 0
    for key, specs in sorted(groups.items(), key=lambda group: not group[1][0].decay):
        shapes = [local_shape(spec, layout.grid.model_parallel) for spec in specs]
        if is_transposed(specs[0].name, len(specs[0].shape)):
            shapes = [shape[::-1] for shape in shapes]
        widths = tuple(shape[-1] for shape in shapes)
        shape = (*shapes[0][:-1], sum(widths))
        stored.append(FusedParameter(key, tuple(specs), shape, widths, offset, specs[0].decay))
        offset += stored[-1].size
    return tuple(stored)


class Weights:
    """Arrays of `layout` on `rank`; also used for gradients and moments, which have the same arrangement.

    `tensors[key]` float32 as stored; `hf_views[name]` float32 [out, in], exactly the box `boxes[name]` of the
    Hugging Face tensor; `flat_buffers` two 1-dim ranges of the pool, with and without weight decay. `shared` lets
    other ranks read them; `on_host` keeps all of it in the host's memory, where no graph works on it.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        backend: Backend,
        shared: bool = False,
        on_host: bool = False,
    ) -> None:
        self.on_host = on_host
        self.fused = arrange(layout, rank)
        num_bytes = sum(entry.size for entry in self.fused) * FLOAT_BYTES
        self.pool: Pool = (
            backend.host_pool(num_bytes) if on_host else backend.pool(num_bytes, shared)
        )
        self._arrange(layout, rank, self.pool)

    @classmethod
    def of_peer(cls, layout: Layout, rank: int, pool: PeerView) -> Weights:
        """Views the weights that another rank of this host holds in shared memory, without a copy."""
        weights = cls.__new__(cls)
        weights.fused = arrange(layout, rank)
        weights._arrange(layout, rank, pool)
        return weights

    def _arrange(self, layout: Layout, rank: int, pool: Pool | PeerView) -> None:
        self.layout = layout
        self.rank = rank
        size = sum(entry.size for entry in self.fused)
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        self.tensors = {e.key: pool.view(e.offset, e.shape) for e in self.fused}
        self.hf_views = dict(self._views())
        decaying = sum(entry.size for entry in self.fused if entry.decay)
        self.flat_buffers = pool.view(0, (decaying,)), pool.view(decaying, (size - decaying,))

    @property
    def num_bytes(self) -> int:
        return self.pool.num_bytes

    def _views(self) -> Iterator[tuple[str, np.ndarray]]:
        for entry in self.fused:
            start = 0
            for spec, width in zip(entry.specs, entry.widths, strict=True):
                view = self.tensors[entry.key][..., start : start + width]
                start += width
                if is_transposed(spec.name, len(spec.shape)):
                    view = view.T
                box = self.boxes.get(spec.name)
                if box is not None:
                    yield spec.name, view[tuple(slice(0, extent) for extent in box.shape)]

    def specs(self) -> Iterator[ParameterSpec]:
        for entry in self.fused:
            yield from entry.specs
