"""Reads a model from files once: each part on the first of the ranks that hold it, which gives it to the others."""

from __future__ import annotations

from pathlib import Path

from mindgrpo.backend.contract import Backend
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec, Ranks
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import check_tensors, fill


class FirstHolders(Layout):
    """Of ranks that hold the same box, the first has it and the others have nothing."""

    def _ranks_by_box(self, spec: ParameterSpec, stages: Ranks) -> dict[Box, Ranks]:
        return {box: ranks[:1] for box, ranks in super()._ranks_by_box(spec, stages).items()}

    def held_by(self, rank: int) -> dict[str, Box]:
        boxes = super().held_by(rank)
        return {n: box for n, box in boxes.items() if self.ranks_by_box(n)[box] == (rank,)}


def load_once(weights: Weights, directory: str | Path, backend: Backend) -> None:
    """Fills a rank's weights, all ranks together; other ranks can read its pool. Raises UserError."""
    layout = weights.layout
    files = check_tensors(directory, layout.specs)
    readers = FirstHolders(layout.mesh, layout.specs, layout.stage_layers)
    fill(weights, files, readers.held_by(backend.rank))
    plan = plan_reshard(readers, layout, weights.pool.itemsize)
    if plan.bytes_moved:
        Resharder(plan, weights, weights, backend).run()
