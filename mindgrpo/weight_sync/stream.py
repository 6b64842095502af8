"""Streams the policy's weights, group by group through one bucket, to receivers of named tensors (vLLM, files).

A group is a decoder layer, the parameters before the layers, or those after them. For layouts from `spread`, a group is
up to GROUP_BYTES of one file's tensors, with a layer's fused experts split where they are larger. Streaming is
collective over all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.models.lora import adapter_names, factor_box, merge
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec
from mindgrpo.weight_sync.execute import Resharder, Traffic
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weights.checksum import PartSums, box_sum
from mindgrpo.weights.expert_files import FileRows, FileTensor
from mindgrpo.weights.local_weights import HostTensors, Weights, aligned_size
from mindgrpo.weights.model_files import tensor_bytes

# The most that a rank gathers at once to write it to a file.
GROUP_BYTES = 128 << 20


class TensorSink(Protocol):
    """Consumes tensors on one rank. `pool` is a bucket in host memory that fits any group, in the policy's dtype."""

    @property
    def pool(self) -> Pool: ...

    @property
    def host_copies(self) -> Sequence[Pool]: ...

    def take(self, tensors: HostTensors) -> None:
        """Consumes a complete group, which lies in `pool` and is overwritten by the next one."""


def in_model_order(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Returns the parameters' shapes in model order: before the layers, layer by layer, after the layers."""
    ends = {"first": -1, "first_and_last": -1, "last": layout.num_layers}

    def number(spec: ParameterSpec) -> int:
        return spec.position if isinstance(spec.position, int) else ends[spec.position]

    return {spec.name: spec.shape for spec in sorted(layout.specs, key=number)}


def groups_of(layout: Layout) -> list[Layout]:
    """Returns the layout of each group in model order; the n-th layers of all pipeline stages form one group."""
    groups: dict[int, list[ParameterSpec]] = {}
    for spec in layout.specs:
        number = layout.num_layers if spec.position == "last" else -1
        if isinstance(spec.position, int):
            (stage,) = layout.stages_of(spec.name)
            number = list(chain(*layout.stage_layers[stage])).index(spec.position)
        groups.setdefault(number, []).append(spec)
    return [replace(layout, specs=tuple(groups[number])) for number in sorted(groups)]


@dataclass(frozen=True)
class Spread:
    """A model's files distributed over writer ranks: each group's layout, and `rows[r][i]`, writer r's i-th group."""

    groups: list[Layout]
    rows: list[list[list[FileRows]]]

    def of(self, rank: int) -> list[list[FileRows]]:
        """Returns the groups of file rows that a world rank writes, none unless it is a writer."""
        mesh = self.groups[0].mesh
        return self.rows[mesh.index(rank, "pp")] if mesh.holds(rank) else []


def spread(
    layout: Layout,
    files: Sequence[Sequence[FileTensor]],
    num_ranks: int,
    world_size: int,
    dtype: Dtype,
) -> Spread:
    """Distributes `files` over `num_ranks` ranks of the world; each file is written by one rank.

    A rank gets consecutive files, in groups of at most GROUP_BYTES, or of a single larger tensor or expert.
    """
    rows = []
    for rank in range(num_ranks):
        share = slice(len(files) * rank // num_ranks, len(files) * (rank + 1) // num_ranks)
        rows.append([group for tensors in files[share] for group in _in_groups(tensors, dtype)])
    mesh = Mesh(1, 1, num_ranks, spacing=world_size // num_ranks)
    stages = tuple((range(rank, rank + 1),) for rank in range(num_ranks))
    groups: list[dict[str, ParameterSpec]] = []
    for rank, own in enumerate(rows):
        number = 0
        for group in own:
            windows = _windows(group)
            # A group's layout has one window per parameter, so two ranks' parts of one go to different groups.
            while number < len(groups) and windows.keys() & groups[number].keys():
                number += 1
            groups += [{}] * (number == len(groups))
            groups[number] = groups[number] | {
                name: replace(layout.by_name[name], position=rank, window=window)
                for name, window in windows.items()
            }
            number += 1
    return Spread([Layout(mesh, tuple(own.values()), stages) for own in groups], rows)


def _in_groups(tensors: Sequence[FileTensor], dtype: Dtype) -> Iterator[list[FileRows]]:
    group: list[FileRows] = []
    filled = 0
    for tensor in tensors:
        an_expert = tensor_bytes(tensor.shape[1:], dtype)
        for rows in tensor.in_rows(max(1, GROUP_BYTES // an_expert)):
            size = tensor_bytes(rows.shape, dtype)
            if group and filled + size > GROUP_BYTES:
                yield group
                group, filled = [], 0
            group.append(rows)
            filled += size
    if group:
        yield group


def _windows(group: Sequence[FileRows]) -> dict[str, Box]:
    """Returns the box that the group covers of each parameter."""
    windows: dict[str, Box] = {}
    for name, box in chain.from_iterable(rows.boxes for rows in group):
        first = windows.setdefault(name, box)
        windows[name] = Box(first.start, box.stop)
    return windows


def bucket_size(groups: Sequence[Layout], rank: int, dtype: Dtype) -> int:
    """Returns the elements of a pool that fits the largest of `groups` on `rank`."""
    boxes = [group.held_by(rank).values() for group in groups]
    return max(sum(aligned_size(box, ITEM_BYTES[dtype]) for box in own) for own in boxes)


def adapters_of(groups: Sequence[Layout], adapters: Layout) -> list[Layout]:
    """Returns each group's layout of LoRA factors, placed like the matrices they adapt, and of the same experts."""

    def specs(group: Layout) -> Iterator[ParameterSpec]:
        for base in group.specs:
            for name in adapter_names(base.name):
                if (own := adapters.by_name.get(name)) is not None:
                    window = base.window and factor_box(base.window, own.shape)
                    yield replace(own, position=base.position, window=window)

    return [replace(group, specs=tuple(specs(group))) for group in groups]


class TensorStream:
    """Transfers `source`, with adapters merged in, to `sink` group by group; the groups' layouts split no tensor."""

    copies: Sequence[Pool] = ()

    def __init__(
        self,
        source: Weights,
        adapters: Adapters | None,
        groups: Sequence[Layout],
        backend: Backend,
        sink: TensorSink,
    ) -> None:
        self._sink, self._backend = sink, backend
        self._settings = None if adapters is None else adapters.settings
        self._sums: dict[str, int] | None = None
        self.host_copies: list[Pool] = [*sink.host_copies]

        def receiving(own: Weights, group: Layout, pool: Pool) -> tuple[HostTensors, Resharder]:
            tensors = HostTensors(group, backend.rank, pool)
            specs = [own.layout.by_name[spec.name] for spec in group.specs]
            held = replace(own.layout, specs=tuple(specs))
            plan = plan_reshard(held, group, own.pool.itemsize)
            return tensors, Resharder(plan, own, tensors, backend)

        self._groups = [receiving(source, group, sink.pool) for group in groups]
        self._low_rank: list[tuple[HostTensors, Resharder]] = []
        if adapters is not None:
            own = adapters.weights
            low_rank = adapters_of(groups, own.layout)
            size = bucket_size(low_rank, backend.rank, own.dtype)
            pool = backend.host_pool(size, dtype=own.dtype)
            self.host_copies.append(pool)
            self._low_rank = [receiving(own, group, pool) for group in low_rank]

    @property
    def layout(self) -> Layout:
        """Returns the receiver's layout. Raises ValueError where several groups have parts of one parameter."""
        groups = [tensors.layout for tensors, _ in self._groups]
        specs = tuple(spec for group in groups for spec in group.specs)
        return replace(groups[0], specs=specs)

    @property
    def has_sums(self) -> bool:
        return self._sums is not None

    def run(self, keeps_sums: bool = False) -> Traffic:
        started, num_bytes = time.perf_counter(), 0
        self._sums = {} if keeps_sums else None
        for index, (tensors, resharder) in enumerate(self._groups):
            num_bytes += resharder.run().bytes_received
            if self._settings is not None:
                low_rank, arriving = self._low_rank[index]
                num_bytes += arriving.run().bytes_received
                merge(tensors, low_rank, self._settings, self._backend.kernels)
            if self._sums is not None:
                for name, view in tensors.hf_views.items():
                    self._sums[name] = box_sum(view, tensors.boxes[name])
            if tensors.boxes:
                self._sink.take(tensors)
        return Traffic(num_bytes, time.perf_counter() - started)

    def sums(self, own: PartSums) -> dict[str, int]:
        """Returns the checksums that the last run took of arriving tensors. Raises ValueError unless it kept them."""
        if self._sums is None:
            raise ValueError("the last transfer kept no sums")
        return self._sums
