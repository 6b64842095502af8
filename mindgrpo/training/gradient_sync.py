"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between passes.

Which gradients are partial follows from the layout alone (`sums_of`, pure). They are summed where they are: arrays of
the host's, or graphs on the device, where no gradient passes the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.contract import Backend, Graph, Group
from mindgrpo.parallel.mesh import DATA_AXES, DENSE
from mindgrpo.training.optimizer_shares import (
    ASSIGN,
    CONCAT,
    RESHAPE,
    SHAPE,
    SLICE,
    SPLIT,
    TENSORS_OF_LOOP,
    InTurn,
    ShardedTensor,
    SumOfShares,
    assigned,
    buckets,
    buckets_of,
    by_group,
    first_of,
    flattened,
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

    @property
    def rows_of_all(self) -> int:
        return int(np.prod(self.shape[:-1]))

    @property
    def size(self) -> int:
        """Counts the elements in the ranges."""
        return self.rows_of_all * sum(stop - start for start, stop in self.ranges)

    @property
    def region(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns where the rows of the first range begin and end, in every dim."""
        begin, end = [0] * len(self.shape), [*self.shape]
        begin[-1], end[-1] = self.ranges[0]
        if self.rows is not None:
            begin[0], end[0] = self.rows
        return tuple(begin), tuple(end)

    @property
    def is_whole(self) -> bool:
        """Whether the first range, of these rows, is all of the parameter."""
        return self.region == ((0,) * len(self.shape), self.shape)

    @property
    def widths(self) -> tuple[tuple[int, bool], ...]:
        """Returns the widths of the ranges and of what is between them, in order, and which are ranges."""
        edges = (0, *(edge for one in self.ranges for edge in one), self.shape[-1])
        widths = [stop - start for start, stop in pairwise(edges)]
        return tuple((width, i % 2 == 1) for i, width in enumerate(widths) if width > 0)


class _SumOfTensors(nn.Cell):
    """(ticket) -> ticket; sums whole parameters over a group, in one exchange behind that which gave the ticket."""

    def __init__(self, columns: Sequence[_Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.sizes = tuple(own.size for own in columns)
        self.total, self.map = group.sum_cell(), ops.HyperMap()

    def construct(self, ticket: Any) -> Any:
        # The calls of all ranks need one order, which independent operations of a graph do not have.
        total = self.total(ops.depend(CONCAT(self.map(flattened, self.parameters)), ticket))
        sums = SPLIT(total, self.sizes, 0)
        return ops.depend(first_of(total), self.map(assigned, self.parameters, sums))


class _SumOfColumns(nn.Cell):
    """As _SumOfTensors, of ranges of parameters' columns."""

    def __init__(self, columns: Sequence[_Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.widths = tuple(tuple(width for width, _ in own.widths) for own in columns)
        self.is_summed = tuple(tuple(summed for _, summed in own.widths) for own in columns)
        self.sizes = tuple(
            own.rows_of_all * width for own in columns for width, summed in own.widths if summed
        )
        self.total, self.join = group.sum_cell(), ops.Concat(-1)

    def construct(self, ticket: Any) -> Any:
        flat: tuple[Any, ...] = ()
        for i in range(len(self.parameters)):
            split = SPLIT(self.parameters[i], self.widths[i], -1)
            for number in range(len(split)):
                if self.is_summed[i][number]:
                    flat = (*flat, flattened(split[number]))
        total = self.total(ops.depend(CONCAT(flat), ticket))
        sums, at = SPLIT(total, self.sizes, 0), 0
        ticket = first_of(total)
        for i in range(len(self.parameters)):
            # Read once and written once: a graph does not promise an order between the two of one parameter.
            split = SPLIT(self.parameters[i], self.widths[i], -1)
            columns: tuple[Any, ...] = ()
            for number in range(len(split)):
                own = split[number]
                if self.is_summed[i][number]:
                    own, at = RESHAPE(sums[at], SHAPE(own)), at + 1
                columns = (*columns, own)
            ticket = ops.depend(ticket, ASSIGN(self.parameters[i], self.join(columns)))
        return ticket


class _Square(nn.Cell):
    """x -> the sum of its squares, [1]."""

    def __init__(self, squares: nn.Cell) -> None:
        super().__init__()
        self.squares = squares

    def construct(self, x: Any) -> Any:
        return RESHAPE(self.squares(x), (1,))


class _Norm(nn.Cell):
    """The 2-norm over the model: squares of columns, divided by the number of their copies, summed over ranks."""

    def __init__(
        self, columns: Sequence[_Columns], copies: Sequence[int], group: Group, squares: nn.Cell
    ) -> None:
        super().__init__()
        pairs = sorted(zip(columns, copies, strict=True), key=lambda pair: not pair[0].is_whole)
        self.num_whole = sum(own.is_whole for own, _ in pairs)
        parameters = [own.parameter for own, _ in pairs]
        self.whole = ms.ParameterTuple(parameters[: self.num_whole])
        self.cut = ms.ParameterTuple(parameters[self.num_whole :])
        self.regions = tuple(own.region for own, _ in pairs[self.num_whole :])
        self.shares = Tensor([1.0 / number for _, number in pairs] or [1.0], ms.float32)
        self.is_alone = group.size == 1
        self.nothing = Tensor([0.0], ms.float32)
        self.square, self.map = _Square(squares), ops.HyperMap()
        self.total, self.sum = group.sum_cell(), SumExt()

    def construct(self) -> Any:
        squares: tuple[Any, ...] = ()
        if self.num_whole > 0:
            squares = self.map(self.square, self.whole)
        for first in range(0, len(self.regions), TENSORS_OF_LOOP):
            last = min(first + TENSORS_OF_LOOP, len(self.regions))
            squares = squares + self.squares_of(first, last)
        square = self.nothing
        if len(squares) > 0:
            square = RESHAPE(self.sum(CONCAT(squares) * self.shares), (1,))
        if not self.is_alone:
            square = self.total(square)
        return ops.sqrt(square)

    def squares_of(self, first: int, last: int) -> tuple[Any, ...]:
        squares: tuple[Any, ...] = ()
        for i in range(first, last):
            begin, end = self.regions[i]
            own = SLICE(self.cut[i], begin, end, (1,) * len(begin))
            squares = (*squares, self.square(own))
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
            if len(ranks) == 1:
                return
            group = backend.group(ranks)
            summed = [own for own in columns if own.ranges]
            for kind, cut in ((_SumOfTensors, False), (_SumOfColumns, True)):
                for taken in of_graphs([own for own in summed if own.is_whole != cut]):
                    cells = [kind(own, group) for own in buckets(taken, [c.size for c in taken])]
                    self._totals.append(backend.graph(InTurn(cells), "sum of gradients"))

        for ranks, names in sums.shared:
            add(ranks, [_columns_of(gradients, entry, names) for entry in gradients.fused])
        entries = {entry.key: entry for entry in gradients.fused}
        if sharded:
            for group, shared in by_group(sharded, backend):
                scattered = [SumOfShares(own, gradients, group) for own in buckets_of(shared)]
                self._totals.append(backend.graph(InTurn(scattered), "sum of gradients"))
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
