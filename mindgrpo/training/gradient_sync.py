"""Makes a rank's accumulated gradients those of the whole batch and the whole model, between graphs.

Which gradients are partial follows from the layout alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.sharding import ParameterSpec, num_replicas
from mindgrpo.weights.local_weights import Weights


class GradientSync:
    """Sums over ranks that share a parameter, then over data-parallel ranks; and the global norm."""

    def __init__(self, gradients: Weights, backend: Backend) -> None:
        self._gradients = gradients
        layout, rank = gradients.layout, gradients.rank
        grid = layout.grid
        tp_size = grid.model_parallel
        model_ranks = grid.model_group(rank)
        index = grid.coordinates(rank).model
        shared: dict[tuple[int, ...], list[str]] = {}
        self._copies: dict[str, int] = {}
        for spec in gradients.specs():
            if spec.name not in gradients.hf_views:
                continue
            stages = layout.stages_of(spec.name)
            self._copies[spec.name] = num_replicas(spec, tp_size) * len(stages)
            for ranks in self._sharers(spec, tp_size, index, model_ranks):
                shared.setdefault(ranks, []).append(spec.name)
            if len(stages) > 1:
                ends = grid.stage_group(rank)
                shared.setdefault((ends[0], ends[-1]), []).append(spec.name)
        self._square = backend.kernels.square_sum
        self._counted = list(self._once())
        self._shared = [(backend.group(ranks), names) for ranks, names in shared.items()]
        self._data = backend.group(grid.data_group(rank))
        self._replica = backend.group(grid.replica(grid.coordinates(rank).data))

    def _once(self) -> Iterator[tuple[np.ndarray, int]]:
        """(array, on how many ranks it is): whole tensors, or their parts where these differ in that."""
        for entry in self._gradients.fused:
            names = [spec.name for spec in entry.specs if spec.name in self._copies]
            counts = {self._copies[name] for name in names}
            if len(counts) == 1:
                # What a tensor holds beside its parts is padding, whose gradient is zero.
                yield self._gradients.tensors[entry.key], counts.pop()
            else:
                yield from ((self._gradients.hf_views[name], self._copies[name]) for name in names)

    @staticmethod
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

    def sum(self) -> None:
        self._gradients.pool.pull()
        parts = self._gradients.hf_views
        for group, names in self._shared:
            flat = np.concatenate([parts[name].reshape(-1) for name in names])
            group.sum_array(flat)
            start = 0
            for name in names:
                part = parts[name]
                part[...] = flat[start : start + part.size].reshape(part.shape)
                start += part.size
        if self._data.size > 1:
            for run in self._gradients.flat_buffers:
                self._data.sum_array(run)
        self._gradients.pool.push()

    def global_norm(self) -> float:
        """The 2-norm over the model's parameters, each counted once."""
        square = sum(self._square(array) / copies for array, copies in self._counted)
        total = self._replica.sum_array(np.array([square], np.float64))
        return float(np.sqrt(total[0]))
