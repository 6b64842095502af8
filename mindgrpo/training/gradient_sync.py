"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between passes.

Which gradients are partial follows from the layout alone (`sums_of`, pure). They are summed where they are, by the
arithmetic of their pool.
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


def _columns_of(gradients: Weights, entry: FusedTensor, names: Collection[str]) -> Columns:
    """Returns the columns of the parameters `names`, neighbours joined."""
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
    """Yields what the norm is made of, and how many of its ranks have the same; of `sharded` tensors the own rows."""
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
    """Sums over ranks that share a parameter, then over data-parallel ones, which get their rows of `sharded` alone."""

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
        """Returns the 2-norm of the summed gradients over the model's parameters, each counted once."""
        for add in self._sums:
            add()
        return self._norm()
