"""A mesh of ranks with three axes: data, model (tensor) and pipeline stage.

Everything is a slice of one array, so no other file computes with rank numbers. A mesh may be
smaller than the world; it refuses to place a rank that lies outside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError


class Coordinates(NamedTuple):
    data: int
    model: int
    stage: int


@dataclass(frozen=True)
class Mesh:
    """`spacing` is the distance between neighbouring ranks: with 4, of four ranks each the first is in the mesh."""

    data_parallel: int
    model_parallel: int
    pipeline_stage: int = 1
    spacing: int = 1

    def __post_init__(self) -> None:
        for key in ("data_parallel", "model_parallel", "pipeline_stage"):
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{key} is {value!r}, but the axes of a layout are whole numbers from 1 up; "
                    f"set {key} to 1 or more in the parallel_config."
                )

    @property
    def size(self) -> int:
        return self.data_parallel * self.model_parallel * self.pipeline_stage

    @property
    def end(self) -> int:
        """All of its ranks are below this one."""
        return self.size * self.spacing

    @property
    def first_ranks(self) -> Mesh:
        """The first rank of each replica of a mesh without pipeline stages."""
        return Mesh(self.data_parallel, 1, 1, spacing=self.model_parallel)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """Ranks by [stage, data, model]: model neighbours are adjacent ranks."""
        shape = (self.pipeline_stage, self.data_parallel, self.model_parallel)
        ranks = (np.arange(self.size, dtype=np.int64) * self.spacing).reshape(shape)
        ranks.flags.writeable = False
        return ranks

    def holds(self, rank: int) -> bool:
        return 0 <= rank < self.end and rank % self.spacing == 0

    def coordinates(self, rank: int) -> Coordinates:
        if not self.holds(rank):
            raise UserError(
                f"rank {rank} is outside the layout {self}, which has {self.size} ranks; "
                f"start fewer ranks or enlarge an axis of the parallel_config."
            )
        # Without the array: a layout that nobody can run is refused with a sentence, however large it is.
        replica, model = divmod(rank // self.spacing, self.model_parallel)
        stage, data = divmod(replica, self.data_parallel)
        return Coordinates(data=data, model=model, stage=stage)

    def model_group(self, rank: int) -> tuple[int, ...]:
        data, _, stage = self.coordinates(rank)
        return _ranks(self.array[stage, data, :])

    def data_group(self, rank: int) -> tuple[int, ...]:
        _, model, stage = self.coordinates(rank)
        return _ranks(self.array[stage, :, model])

    def stage_group(self, rank: int) -> tuple[int, ...]:
        data, model, _ = self.coordinates(rank)
        return _ranks(self.array[:, data, model])

    def replica(self, data: int) -> tuple[int, ...]:
        """The ranks of one whole copy of the model, stage by stage."""
        if not 0 <= data < self.data_parallel:
            raise IndexError(f"data index {data} is outside {self}")
        return _ranks(self.array[:, data, :])

    def __str__(self) -> str:
        text = f"DP{self.data_parallel}/MP{self.model_parallel}"
        return text if self.pipeline_stage == 1 else f"{text}/PP{self.pipeline_stage}"


def _ranks(part: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(rank) for rank in part.ravel())
