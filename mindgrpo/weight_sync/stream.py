"""Gives the policy's weights to a receiver that takes named tensors, a group at a time through one bucket.

A group is a decoder layer, what comes before the layers, or what comes after them. Ranks of the receiver's layout have
its tensors whole; all ranks take part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.models.lora import merge
from mindgrpo.models.shard import Adapters
from mindgrpo.parallel.sharding import Layout, ParameterSpec
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import Traffic
from mindgrpo.weights.checksum import box_sum
from mindgrpo.weights.host_tensors import HostTensors, aligned_size
from mindgrpo.weights.local_weights import Weights


class TensorSink(Protocol):
    """Takes tensors on one rank. `pool` is host memory for the tensors of any one group, in the policy's dtype."""

    @property
    def pool(self) -> Pool: ...

    @property
    def host_copies(self) -> Sequence[Pool]: ...

    def take(self, tensors: HostTensors) -> None:
        """A whole group, in `pool`, which the next one overwrites."""


def groups_of(layout: Layout) -> list[Layout]:
    """The layout of each group, in the order of the model."""
    groups: dict[int, list[ParameterSpec]] = {}
    num_layers = layout.stage_layers[-1].stop
    for spec in layout.specs:
        at_the_ends = num_layers if spec.position == "last" else -1
        number = spec.position if isinstance(spec.position, int) else at_the_ends
        groups.setdefault(number, []).append(spec)
    return [replace(layout, specs=tuple(groups[number])) for number in sorted(groups)]


def bucket_size(layout: Layout, rank: int, dtype: Dtype) -> int:
    """Elements of a pool with room for any one group of `layout` on `rank`."""
    groups = [group.held_by(rank).values() for group in groups_of(layout)]
    return max(sum(aligned_size(box, ITEM_BYTES[dtype]) for box in boxes) for boxes in groups)


class TensorStream:
    """A WeightTransfer from `source` and its adapters to `sink`, on the ranks of `layout`, which splits no tensor."""

    copies: Sequence[Pool] = ()

    def __init__(
        self,
        source: Weights,
        adapters: Adapters | None,
        layout: Layout,
        backend: Backend,
        sink: TensorSink,
    ) -> None:
        self.layout, self._adapters, self._sink = layout, adapters, sink
        self._sums: dict[str, int] | None = None
        self._groups: list[tuple[HostTensors, Resharder]] = []
        for group in groups_of(layout):
            tensors = HostTensors(group, backend.rank, sink.pool)
            held = replace(source.layout, specs=group.specs)
            plan = plan_reshard(held, group, source.pool.itemsize)
            self._groups.append((tensors, Resharder(plan, source, tensors, backend)))
        self.host_copies: list[Pool] = [*sink.host_copies]
        if adapters is not None:
            own = adapters.weights
            whole = replace(layout, specs=own.layout.specs)
            self._copy = Weights(whole, backend.rank, backend, "adapters_copy", on_host_only=True)
            self.host_copies.append(self._copy.pool)
            self._low_rank = Resharder(plan_reshard(own.layout, whole), own, self._copy, backend)

    @property
    def has_sums(self) -> bool:
        return self._sums is not None

    def run(self, keeps_sums: bool = False) -> Traffic:
        started, num_bytes = time.perf_counter(), 0
        self._sums = {} if keeps_sums else None
        if self._adapters is not None:
            num_bytes += self._low_rank.run().bytes_received
        for tensors, resharder in self._groups:
            num_bytes += resharder.run().bytes_received
            if self._adapters is not None:
                merge(tensors, self._copy, self._adapters.settings)
            if self._sums is not None:
                for name, view in tensors.hf_views.items():
                    self._sums[name] = box_sum(view, tensors.boxes[name])
            if tensors.boxes:
                self._sink.take(tensors)
        return Traffic(num_bytes, time.perf_counter() - started)

    def sums(self) -> dict[str, int]:
        """Raises ValueError unless the last run kept them."""
        if self._sums is None:
            raise ValueError("the last transfer kept no sums")
        return self._sums
