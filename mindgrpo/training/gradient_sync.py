"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between passes.

Which gradients are partial follows from the layout alone (`sums_of`, pure). They are summed where they are: arrays of
the host's, or graphs on the device, where no gradient passes the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Graph, Group
from mindgrpo.parallel.mesh import DATA_AXES, DENSE
from mindgrpo.training.optimizer_shares import (
    TENSORS_OF_LOOP,
    ShardedTensor,
    SumOfShares,
    buckets,
    by_group,
    of_graphs,
    shares_in,
)
from mindgrpo.weights.local_weights import FusedTensor, Weights


class GradientSync(Protocol):
    def sum(self) -> float:
        """Sums over ranks that share a parameter, then over data-parallel ranks, each of which may get its rows alone.

        Returns the 2-norm of the summed gradients over the model's parameters, each counted once.
        """


@dataclass(frozen=True)
class NormTerm:
    """A stored tensor, or one parameter's part of it, that `copies` of the norm's ranks hold."""

    key: str
    name: str | None
    copies: int


@dataclass(frozen=True)
class Sums:
    """Names of the parameters to be summed by group of ranks, in order; then by data axes; and the norm's terms.

    `norm_ranks` hold the whole model together.
    """

    shared: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    data: Mapping[frozenset[str], tuple[int, ...]]
    norm_ranks: tuple[int, ...]
    norm_terms: tuple[NormTerm, ...]


def sums_of(gradients: Weights, is_sharded: bool = False) -> Sums:
    """`is_sharded`: a rank gets the sums of its rows alone (optimizer_shares.py)."""
    layout, rank = gradients.layout, gradients.rank
    mesh, summed = layout.mesh, layout.split_over_data() if is_sharded else layout
    boxes = summed.held_by(rank)
    # What all gradients are summed over, ranks have alike afterwards, unless it is cut there.
    alike = frozenset.intersection(
        DATA_AXES, *(spec.data_axes - set(spec.axes) for spec in summed.specs)
    )
    norm_ranks = mesh.group(rank, [axis for axis in DENSE if axis not in alike])
    shared: dict[tuple[int, ...], list[str]] = {}
    copies: dict[str, int] = {}
    for spec in gradients.specs():
        if spec.name not in gradients.boxes:
            continue
        holders = frozenset(layout.ranks_by_box(spec.name)[gradients.boxes[spec.name]])
        if spec.name in boxes:
            counted = summed.ranks_by_box(spec.name)[boxes[spec.name]]
            copies[spec.name] = len(set(counted).intersection(norm_ranks))
        # Both ends of a pipeline have a part of what lies on them both.
        for axes in (spec.summed_over - DATA_AXES, {"pp"}):
            ranks = tuple(other for other in mesh.group(rank, axes) if other in holders)
            if len(ranks) > 1:
                shared.setdefault(ranks, []).append(spec.name)
    return Sums(
        tuple((ranks, tuple(names)) for ranks, names in shared.items()),
        {entry.data_axes: mesh.group(rank, entry.data_axes) for entry in gradients.fused},
        norm_ranks,
        tuple(_norm_terms(gradients, copies)),
    )


def _norm_terms(gradients: Weights, copies: dict[str, int]) -> Iterator[NormTerm]:
    """Yields whole tensors, or their parts where these differ in how many ranks hold a copy."""
    for entry in gradients.fused:
        names = [spec.name for spec in entry.specs if spec.name in copies]
        counts = {copies[name] for name in names}
        if not counts:
            continue
        if len(counts) == 1:
            # What a tensor holds beside its parts is padding, whose gradient is zero.
            yield NormTerm(entry.key, None, counts.pop())
        else:
            yield from (NormTerm(entry.key, name, copies[name]) for name in names)


def _own_slices(
    gradients: Weights, sums: Sums, sharded: Sequence[ShardedTensor]
) -> Iterator[tuple[NormTerm, tuple[slice, ...]]]:
    """Yields what a rank has of the norm's terms, in the stored tensors, where it gets its rows alone."""
    tensors = {tensor.whole.key: tensor for tensor in sharded}
    boxes = gradients.layout.split_over_data().held_by(gradients.rank)
    for term in sums.norm_terms:
        if term.name is not None:
            yield term, gradients.region(term.name, boxes[term.name]).slices
            continue
        for start, stop, _ in tensors[term.key].own_rows():
            yield term, (slice(start, stop),)


class HostGradientSync:
    """A GradientSync of gradients in the host's own memory; of `sharded` tensors a rank gets its rows alone."""

    def __init__(
        self, gradients: Weights, backend: Backend, sharded: Sequence[ShardedTensor] = ()
    ) -> None:
        sums, arrays = sums_of(gradients, bool(sharded)), gradients.arrays
        self._square = backend.kernels.square_sum
        if sharded:
            own = _own_slices(gradients, sums, sharded)
            self._norm_terms = [
                (arrays.tensors[term.key][slices], term.copies) for term, slices in own
            ]
        else:
            self._norm_terms = [
                (arrays.hf_views[t.name] if t.name else arrays.tensors[t.key], t.copies)
                for t in sums.norm_terms
            ]
        self._shared = [
            (backend.group(ranks), [arrays.hf_views[name] for name in names])
            for ranks, names in sums.shared
        ]
        data = {axes: backend.group(ranks) for axes, ranks in sums.data.items()}
        ranges = zip(arrays.ranges, arrays.flat_buffers, strict=True)
        self._data = [
            (data[run.data_axes], values, shares_in(sharded, run)) for run, values in ranges
        ]
        self._norm_group = backend.group(sums.norm_ranks)

    def sum(self) -> float:
        for group, views in self._shared:
            flat = np.concatenate([view.reshape(-1) for view in views])
            group.sum_array(flat)
            start = 0
            for view in views:
                view[...] = flat[start : start + view.size].reshape(view.shape)
                start += view.size
        for group, values, shares in self._data:
            if shares:
                group.sum_shares(values, shares)
            elif group.size > 1:
                group.sum_array(values)
        square = sum(self._square(array) / copies for array, copies in self._norm_terms)
        total = self._norm_group.sum_array(np.array([square], np.float64))
        return float(np.sqrt(total[0]))


@dataclass(frozen=True)
class _Columns:
    """Ranges [start, stop) of a parameter's columns, in order; `shape` is the parameter's on the device.

    `rows`: of these alone.
    """

    parameter: Any
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    rows: tuple[int, int] | None = None

    def size(self, start: int, stop: int) -> int:
        return int(np.prod(self.shape[:-1])) * (stop - start)


class _SumOverGroup(nn.Cell):
    """Sums columns of parameters over a group, in buckets, one after the other; gives what the last one ends with."""

    def __init__(self, columns: Sequence[_Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.ranges = tuple(own.ranges for own in columns)
        self.outer = tuple(own.shape[:-1] for own in columns)
        self.widths = tuple(own.shape[-1] for own in columns)
        self.sizes = tuple(tuple(own.size(*one) for one in own.ranges) for own in columns)
        self.buckets = buckets([sum(sizes) for sizes in self.sizes])
        self.total = group.sum_cell()

    def construct(self, ticket: Any) -> Any:
        for bucket in self.buckets:
            flat = []
            for i in bucket:
                for start, stop in self.ranges[i]:
                    flat.append(self.parameters[i][..., start:stop].reshape(-1))
            # The calls of all ranks need one order, which independent operations of a graph do not have.
            total = self.total(ops.depend(ops.concat(flat), ticket))
            ticket = total[:1]
            begin = 0
            for i in bucket:
                # Read once and written once: a graph does not promise an order between the two of one parameter.
                old, cursor, columns = self.parameters[i], 0, []
                for number in range(len(self.ranges[i])):
                    start, stop = self.ranges[i][number]
                    if start > cursor:
                        columns.append(old[..., cursor:start])
                    end = begin + self.sizes[i][number]
                    columns.append(total[begin:end].reshape((*self.outer[i], stop - start)))
                    begin, cursor = end, stop
                if cursor < self.widths[i]:
                    columns.append(old[..., cursor:])
                ticket = ops.depend(ticket, ops.assign(old, ops.concat(columns, -1)))
        return ticket


class _Norm(nn.Cell):
    """The 2-norm over the model: squares of columns, divided by the number of their copies, summed over ranks."""

    def __init__(
        self, columns: Sequence[_Columns], copies: Sequence[int], group: Group, squares: nn.Cell
    ) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.columns = tuple(own.ranges[0] for own in columns)
        self.rows = tuple(own.rows for own in columns)
        self.shares = Tensor([1.0 / number for number in copies] or [1.0], ms.float32)
        self.is_alone = group.size == 1
        self.nothing = Tensor([0.0], ms.float32)
        self.squares, self.total = squares, group.sum_cell()

    def construct(self) -> Any:
        squares: tuple[Any, ...] = ()
        for first in range(0, len(self.columns), TENSORS_OF_LOOP):
            last = min(first + TENSORS_OF_LOOP, len(self.columns))
            squares = squares + self.squares_of(first, last)
        square = self.nothing
        if len(squares) > 0:
            square = (ops.concat(squares) * self.shares).sum().reshape(1)
        if not self.is_alone:
            square = self.total(square)
        return ops.sqrt(square)

    def squares_of(self, first: int, last: int) -> tuple[Any, ...]:
        squares: tuple[Any, ...] = ()
        for i in range(first, last):
            start, stop = self.columns[i]
            values = self.parameters[i]
            rows = self.rows[i]
            if rows is not None:
                values = values[rows[0] : rows[1]]
            if stop - start < values.shape[-1]:
                values = values[..., start:stop]
            squares = (*squares, self.squares(values).reshape(1))
        return squares


def _columns_of(gradients: Weights, entry: FusedTensor, names: Collection[str] | None) -> _Columns:
    """Returns the columns of the parameters `names`, neighbours joined; None means all parameters."""
    ranges: list[tuple[int, int]] = []
    for spec, start, width in entry.columns():
        if names is not None and spec.name not in names:
            continue
        stop = start + width
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    return _Columns(gradients.parameters[entry.key], entry.shape, tuple(ranges))


def _part_of(gradients: Weights, entry: FusedTensor, slices: Sequence[slice]) -> _Columns:
    """Returns a range of rows, and of columns where `slices` has them; of a vector they are the same."""
    rows, columns = slices[0], (0, entry.shape[-1])
    if 1 < len(slices) == len(entry.shape):
        columns = (slices[-1].start, slices[-1].stop)
    parameter = gradients.parameters[entry.key]
    return _Columns(parameter, entry.shape, (columns,), (rows.start, rows.stop))


class DeviceGradientSync:
    """A GradientSync in graphs; of `sharded` tensors a rank gets its rows alone.

    What a tensor holds beside its parameters' parts is padding, with no gradient.
    """

    def __init__(
        self, gradients: Weights, backend: Backend, sharded: Sequence[ShardedTensor] = ()
    ) -> None:
        sums = sums_of(gradients, bool(sharded))
        self._totals: list[Graph] = []

        def add(ranks: tuple[int, ...], columns: list[_Columns]) -> None:
            summed = [own for own in columns if own.ranges]
            for taken in of_graphs(summed if len(ranks) > 1 else []):
                cell = _SumOverGroup(taken, backend.group(ranks))
                self._totals.append(backend.graph(cell, "sum of gradients"))

        for ranks, names in sums.shared:
            add(ranks, [_columns_of(gradients, entry, names) for entry in gradients.fused])
        entries = {entry.key: entry for entry in gradients.fused}
        if sharded:
            for group, shared in by_group(sharded, backend):
                tensors = [gradients.parameters[tensor.whole.key] for tensor in shared]
                cell = SumOfShares(shared, tensors, group)
                self._totals.append(backend.graph(cell, "sum of gradients"))
            own = list(_own_slices(gradients, sums, sharded))
            terms = [_part_of(gradients, entries[term.key], slices) for term, slices in own]
            copies = [term.copies for term, _ in own]
        else:
            for axes, ranks in sums.data.items():
                same = [entry for entry in gradients.fused if entry.data_axes == axes]
                add(ranks, [_columns_of(gradients, entry, None) for entry in same])
            terms = [
                _columns_of(gradients, entries[term.key], term.name and (term.name,))
                for term in sums.norm_terms
            ]
            copies = [term.copies for term in sums.norm_terms]
        group, squares = backend.group(sums.norm_ranks), backend.kernels.squares()
        cell = _Norm(terms, copies, group, squares)
        self._norm = backend.graph(cell, "gradient norm")
        self._ticket = Tensor([0.0], ms.float32)

    def sum(self) -> float:
        for total in self._totals:
            total(self._ticket)
        return float(self._norm().asnumpy()[0])
