"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between passes.

Which gradients are partial follows from the layout alone (`sums_of`, pure). They are summed where they are: arrays of
the host's, or graphs on the device (device_update.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.sharding import ParameterSpec, num_replicas
from mindgrpo.weights.local_weights import Weights


class GradientSync(Protocol):
    def sum(self) -> float:
        """Sums over ranks that share a parameter, then over data-parallel ranks.

        Returns the 2-norm of the summed gradients over the model's parameters, each counted once.
        """


@dataclass(frozen=True)
class NormTerm:
    """A stored tensor, or one parameter's part of it, that `copies` ranks of a replica hold."""

    key: str
    name: str | None
    copies: int


@dataclass(frozen=True)
class Sums:
    """Names of the parameters to be summed by group of ranks, in order; the norm's terms."""

    shared: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]
    data: tuple[int, ...]
    replica: tuple[int, ...]
    norm_terms: tuple[NormTerm, ...]


def sums_of(gradients: Weights) -> Sums:
    layout, rank = gradients.layout, gradients.rank
    mesh = layout.mesh
    tp_size = mesh.model_parallel
    model_ranks = mesh.model_group(rank)
    index = mesh.coordinates(rank).model
    shared: dict[tuple[int, ...], list[str]] = {}
    copies: dict[str, int] = {}
    for spec in gradients.specs():
        if spec.name not in gradients.boxes:
            continue
        stages = layout.stages_of(spec.name)
        copies[spec.name] = num_replicas(spec, tp_size) * len(stages)
        for ranks in _sharers(spec, tp_size, index, model_ranks):
            shared.setdefault(ranks, []).append(spec.name)
        if len(stages) > 1:
            ends = mesh.stage_group(rank)
            shared.setdefault((ends[0], ends[-1]), []).append(spec.name)
    return Sums(
        tuple((ranks, tuple(names)) for ranks, names in shared.items()),
        tuple(mesh.data_group(rank)),
        tuple(mesh.replica(mesh.coordinates(rank).data)),
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


def _sharers(
    spec: ParameterSpec, tp_size: int, index: int, ranks: Sequence[int]
) -> list[tuple[int, ...]]:
    if tp_size == 1:
        return []
    if spec.partial_gradient:
        return [tuple(ranks)]
    replicas = num_replicas(spec, tp_size)
    if spec.replicate and replicas > 1:
        first = index // replicas * replicas
        return [tuple(ranks[first : first + replicas])]
    return []


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
        self._flat_buffers = arrays.flat_buffers
        self._data = backend.group(sums.data)
        self._replica = backend.group(sums.replica)

    def sum(self) -> float:
        for group, shares in self._shared:
            flat = np.concatenate([share.reshape(-1) for share in shares])
            group.sum_array(flat)
            start = 0
            for share in shares:
                share[...] = flat[start : start + share.size].reshape(share.shape)
                start += share.size
        if self._data.size > 1:
            for run in self._flat_buffers:
                self._data.sum_array(run)
        square = sum(self._square(array) / copies for array, copies in self._norm_terms)
        total = self._replica.sum_array(np.array([square], np.float64))
        return float(np.sqrt(total[0]))
