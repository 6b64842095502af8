"""Reduces accumulated gradients over the ranks after the backward passes, and computes their global norm.

The layout alone determines which gradients are partial (`sums_of`, pure). They are reduced in place, on the device or
the host that holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mindgrpo.backend.arithmetic.choose import arithmetic_of
from mindgrpo.backend.arithmetic.contract import Columns, Operation, ShardedTensor
from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.mesh import DATA_AXES, DENSE
from mindgrpo.weights.local_weights import FusedTensor, Weights


@dataclass(frozen=True)
class NormTerm:
    """One addend of the gradient norm: a stored tensor, or parameter `name` in it, held by `copies` norm ranks."""

    key: str
    name: str | None
    copies: int


@dataclass(frozen=True)
class Sums:
    """Lists the reductions of one rank: `shared` (ranks, parameter names) in order, then `data` (data axes -> ranks).

    The norm is reduced over `norm_ranks`, which together hold the whole model, from `norm_terms`.
    """

    shared: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    data: Mapping[frozenset[str], tuple[int, ...]]
    norm_ranks: tuple[int, ...]
    norm_terms: tuple[NormTerm, ...]


def sums_of(gradients: Weights, is_sharded: bool = False) -> Sums:
    """Derives the reductions from the layout; `is_sharded` (ZeRO-1): a rank gets the sums of its own rows only."""
    layout, rank = gradients.layout, gradients.rank
    mesh, summed = layout.mesh, layout.split_over_data() if is_sharded else layout
    boxes = summed.held_by(rank)
    # Data axes over which every gradient is a replica after the sum; the norm leaves them out.
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
        # A tied embedding lies on the first and on the last stage, and each has a part of its gradient.
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
    """Yields stored tensors whole, or parameter by parameter where their numbers of replicas differ."""
    for entry in gradients.fused:
        names = [spec.name for spec in entry.specs if spec.name in copies]
        counts = {copies[name] for name in names}
        if not counts:
            continue
        if len(counts) == 1:
            # The rest of the tensor is padding, whose gradient is zero.
            yield NormTerm(entry.key, None, counts.pop())
        else:
            yield from (NormTerm(entry.key, name, copies[name]) for name in names)


def _own_slices(
    gradients: Weights, sums: Sums, sharded: Sequence[ShardedTensor]
) -> Iterator[tuple[NormTerm, tuple[slice, ...]]]:
    """Yields each norm term with the slices of its stored tensor that this rank owns under ZeRO-1."""
    tensors = {tensor.whole.key: tensor for tensor in sharded}
    boxes = gradients.layout.split_over_data().held_by(gradients.rank)
    for term in sums.norm_terms:
        if term.name is not None:
            yield term, gradients.region(term.name, boxes[term.name]).slices
            continue
        for start, stop, _ in tensors[term.key].own_rows():
            yield term, (slice(start, stop),)


def _columns_of(gradients: Weights, entry: FusedTensor, names: Collection[str]) -> Columns:
    """Returns the columns of a stored tensor that hold the parameters `names`, adjacent ranges merged."""
    ranges: list[tuple[int, int]] = []
    for spec, start, width in entry.columns():
        if spec.name not in names:
            continue
        stop = start + width
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    return Columns(gradients.stored[entry.key], tuple(ranges))


def _norm_columns(
    gradients: Weights, sums: Sums, sharded: Sequence[ShardedTensor]
) -> Iterator[tuple[Columns, int]]:
    """Yields the columns of each norm term and its number of replicas; of `sharded` tensors only the owned rows."""
    entries = {entry.key: entry for entry in gradients.fused}
    for term, slices in _own_slices(gradients, sums, sharded) if sharded else ():
        entry, rows, columns = entries[term.key], slices[0], (0, entries[term.key].shape[-1])
        if 1 < len(slices) == len(entry.shape):
            columns = (slices[-1].start, slices[-1].stop)
        edges = (rows.start, rows.stop)
        yield Columns(gradients.stored[term.key], (columns,), edges, slices), term.copies
    for term in () if sharded else sums.norm_terms:
        whole = Columns(gradients.stored[term.key], ((0, entries[term.key].shape[-1]),))
        if term.name is None:
            yield whole, term.copies
            continue
        own = _columns_of(gradients, entries[term.key], (term.name,))
        spec = gradients.layout.by_name[term.name]
        region = gradients.region(term.name).slices
        yield replace(own, region=region, is_transposed=spec.transposed), term.copies


class GradientSync:
    """Reduces gradients over the ranks that share a parameter, then over the data axes: all-reduce, or reduce-scatter.

    Tensors in `sharded` (ZeRO-1) are reduce-scattered: each rank ends with the sums of the rows it owns.
    """

    def __init__(
        self, gradients: Weights, backend: Backend, sharded: Sequence[ShardedTensor] = ()
    ) -> None:
        sums, stored = sums_of(gradients, bool(sharded)), gradients.stored
        arithmetic = arithmetic_of(gradients.pool, backend)
        self._sums: list[Operation] = [
            arithmetic.sum_columns(
                [_columns_of(gradients, entry, names) for entry in gradients.fused],
                backend.group(ranks),
            )
            for ranks, names in sums.shared
        ]
        if sharded:
            self._sums.append(arithmetic.scatter_sum(sharded, stored))
        for axes, ranks in () if sharded else sums.data.items():
            if len(ranks) > 1:
                same = [stored[entry.key] for entry in gradients.fused if entry.data_axes == axes]
                self._sums.append(arithmetic.sum_tensors(same, backend.group(ranks)))
        columns = list(_norm_columns(gradients, sums, sharded))
        self._norm = arithmetic.norm(
            [own for own, _ in columns],
            [copies for _, copies in columns],
            backend.group(sums.norm_ranks),
        )

    def sum(self) -> float:
        """Reduces the gradients in place; returns their global 2-norm, each parameter counted once."""
        for add in self._sums:
            add()
        return self._norm()
