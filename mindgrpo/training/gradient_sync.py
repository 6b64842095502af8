"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between passes.

Which gradients are partial follows from the layout alone (`sums_of`, pure). They are summed where they are: arrays of
the host's, or graphs on the device (device_update.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.mesh import DATA_AXES, DENSE
from mindgrpo.weights.local_weights import Weights


class GradientSync(Protocol):
    def sum(self) -> float:
        """Sums over ranks that share a parameter, then over data-parallel ranks.

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


def sums_of(gradients: Weights) -> Sums:
    layout, rank = gradients.layout, gradients.rank
    mesh = layout.mesh
    # What all gradients are summed over, ranks have alike afterwards.
    alike = frozenset.intersection(DATA_AXES, *(spec.data_axes for spec in layout.specs))
    norm_ranks = mesh.group(rank, [axis for axis in DENSE if axis not in alike])
    shared: dict[tuple[int, ...], list[str]] = {}
    copies: dict[str, int] = {}
    for spec in gradients.specs():
        if spec.name not in gradients.boxes:
            continue
        holders = frozenset(layout.ranks_by_box(spec.name)[gradients.boxes[spec.name]])
        copies[spec.name] = len(holders.intersection(norm_ranks))
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
    """Whole tensors, or their parts where these differ in how often they are there."""
    for entry in gradients.fused:
        names = [spec.name for spec in entry.specs if spec.name in copies]
        counts = {copies[name] for name in names}
        if len(counts) == 1:
            # What a tensor holds beside its parts is padding, whose gradient is zero.
            yield NormTerm(entry.key, None, counts.pop())
        else:
            yield from (NormTerm(entry.key, name, copies[name]) for name in names)


class HostGradientSync:
    """A GradientSync of gradients in the host's own memory."""

    def __init__(self, gradients: Weights, backend: Backend) -> None:
        sums, arrays = sums_of(gradients), gradients.arrays
        self._square = backend.kernels.square_sum
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
        self._data = [(data[run.data_axes], values) for run, values in ranges]
        self._norm_group = backend.group(sums.norm_ranks)

    def sum(self) -> float:
        for group, shares in self._shared:
            flat = np.concatenate([share.reshape(-1) for share in shares])
            group.sum_array(flat)
            start = 0
            for share in shares:
                share[...] = flat[start : start + share.size].reshape(share.shape)
                start += share.size
        for group, values in self._data:
            if group.size > 1:
                group.sum_array(values)
        square = sum(self._square(array) / copies for array, copies in self._norm_terms)
        total = self._norm_group.sum_array(np.array([square], np.float64))
        return float(np.sqrt(total[0]))
