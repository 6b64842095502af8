"""The device mesh: named parallel axes over ranks, with a dense view and an expert view of the same ranks.

All arithmetic on rank numbers lives in this file. To add an axis, add a field to Mesh and its name to a view. A mesh
may cover only part of the world; looking up the index of a rank outside it raises UserError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from mindgrpo.errors import UserError

# Axes from outermost to innermost: ranks that are adjacent along the last axis have consecutive numbers.
DENSE = ("pp", "dp", "cp", "tp")
# Expert parallelism regroups the dp x cp x tp ranks of a stage into edp x ep x etp.
EXPERT = ("pp", "edp", "ep", "etp")
# Axes whose ranks process different tokens: every gradient is summed over these axes of its view.
DATA_AXES = frozenset(("dp", "cp", "edp"))
DENSE_DATA, EXPERT_DATA = DATA_AXES.intersection(DENSE), DATA_AXES.intersection(EXPERT)
# The parallel_config key of each axis.
CONFIG_KEYS = {
    "dp": "data_parallel",
    "cp": "context_parallel",
    "tp": "model_parallel",
    "pp": "pipeline_stage",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
}


def view_of(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the view (DENSE or EXPERT) that contains all `axes`. Raises ValueError if neither does."""
    names = set(axes)
    for view in (DENSE, EXPERT):
        if names <= set(view):
            return view
    raise ValueError(f"no view of a mesh has all of the axes {sorted(names)}")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the mesh axes. `spacing` is the step between its rank numbers: 4 takes ranks 0, 4, 8 and so on."""

    dp: int
    tp: int
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    spacing: int = 1

    def __post_init__(self) -> None:
        for axis, key in CONFIG_KEYS.items():
            value = getattr(self, axis)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(
                    f"{key} is {value!r}, but the axes of a layout are whole numbers from 1 up; "
                    f"set {key} to 1 or more in the parallel_config."
                )
        stage = self.dp * self.cp * self.tp
        if stage % (self.ep * self.etp):
            raise UserError(
                f"expert_parallel {self.ep} x expert_tensor_parallel {self.etp} does not divide the {stage} ranks of a "
                "stage (data_parallel x context_parallel x model_parallel); lower one of them in the parallel_config."
            )

    @property
    def edp(self) -> int:
        """Returns the size of the expert-data-parallel axis: how many ranks of a stage hold the same expert shard."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def size_of(self, axes: Iterable[str]) -> int:
        return prod(getattr(self, axis) for axis in axes)

    @property
    def size(self) -> int:
        return self.size_of(DENSE)

    @property
    def end(self) -> int:
        """Returns the exclusive upper bound of its rank numbers."""
        return self.size * self.spacing

    @property
    def first_ranks(self) -> Mesh:
        """Returns the mesh of the first rank of each dp replica. Valid for meshes with pp = cp = 1 only."""
        return Mesh(self.dp, 1, spacing=self.tp)

    def ranks(self, view: tuple[str, ...] = DENSE) -> NDArray[np.int64]:
        """Returns the rank numbers, int64, with one dim per axis of `view`: [pp, dp, cp, tp] or [pp, edp, ep, etp]."""
        shape = [getattr(self, axis) for axis in view]
        return (np.arange(self.size, dtype=np.int64) * self.spacing).reshape(shape)

    def holds(self, rank: int) -> bool:
        return 0 <= rank < self.end and rank % self.spacing == 0

    def index(self, rank: int, axis: str) -> int:
        """Returns the coordinate of `rank` along `axis`. Raises UserError for a rank outside the mesh."""
        if not self.holds(rank):
            raise UserError(
                f"rank {rank} is outside the layout {self}, which has {self.size} ranks; "
                f"start fewer ranks or enlarge an axis of the parallel_config."
            )
        # Avoids building the array of ranks, so that even an absurdly large layout gets its error message.
        return rank // self.spacing // self._stride(axis) % int(getattr(self, axis))

    def _stride(self, axis: str) -> int:
        view = view_of((axis,))
        return self.size_of(view[view.index(axis) + 1 :])

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Returns the communication group of `rank` along `axes` (of one view), in ascending order, `rank` included."""
        along = [axis for axis in view_of(axes) if axis in set(axes)]
        strides = [self._stride(axis) * self.spacing for axis in along]
        first = rank - sum(
            self.index(rank, axis) * step for axis, step in zip(along, strides, strict=True)
        )
        steps = [range(0, getattr(self, a) * s, s) for a, s in zip(along, strides, strict=True)]
        return tuple(first + sum(offsets) for offsets in product(*steps))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Returns all communication groups along `axes`, ordered by their first rank."""
        groups = (self.group(rank, axes) for rank in range(0, self.end, self.spacing))
        return list(dict.fromkeys(groups))

    def __str__(self) -> str:
        text = f"DP{self.dp}/MP{self.tp}"
        text += f"/PP{self.pp}" if self.pp > 1 else ""
        text += f"/CP{self.cp}" if self.cp > 1 else ""
        return text + (f"/EP{self.ep}/EMP{self.etp}" if self.ep * self.etp > 1 else "")
