"""Named tensors as Hugging Face has them, one after another in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mindgrpo.backend.contract import HostArrays, Pool
from mindgrpo.parallel.sharding import Box, Layout

# Tensors begin at multiples of it, as other libraries want them.
ALIGN_BYTES = 64


def aligned_size(box: Box, itemsize: int) -> int:
    """Elements of a tensor and of what is left free up to the next one."""
    return -(-box.size * itemsize // ALIGN_BYTES) * ALIGN_BYTES // itemsize


class HostTensors:
    """The parts of `layout`'s parameters that `rank` has, from the pool's start on; none off its mesh.

    `hf_views` are [out, in]; matrices lie in memory [in, out] where ranks keep them so, and then nothing is transposed
    on the way here. Several of these may use one pool, one after another. Weight sync writes into it as into any
    rank's weights.
    """

    def __init__(self, layout: Layout, rank: int, pool: Pool) -> None:
        self.layout, self.pool = layout, pool
        self.boxes: Mapping[str, Box] = layout.held_by(rank)
        self.hf_views: dict[str, np.ndarray] = {}
        if not self.boxes:
            return
        with pool.on_host() as memory:
            self._lay_out(memory)

    def _lay_out(self, memory: HostArrays) -> None:
        offset = 0
        for name, box in self.boxes.items():
            spec = self.layout.by_name[name]
            view = memory.view(offset, spec.as_stored(box.shape))
            self.hf_views[name] = view.swapaxes(-1, -2) if spec.transposed else view
            offset += aligned_size(box, self.pool.itemsize)

    @property
    def arrays(self) -> HostTensors:
        return self

    @property
    def names(self) -> list[str]:
        return list(self.boxes)
