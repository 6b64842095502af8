"""Named tensors as Hugging Face has them, one after another in the host's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from mindgrpo.backend.contract import HostArrays, Pool
from mindgrpo.parallel.sharding import Box, Layout

# Tensors begin at multiples of 64 bytes, as other libraries want them.
ALIGN_ELEMENTS = 16
FLOAT_BYTES = 4


def _aligned(count: int) -> int:
    return -(-count // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


def num_elements(boxes: Sequence[Box]) -> int:
    """Of the memory that tensors of these shapes take, the gaps between them included."""
    return sum(_aligned(prod(box.shape)) for box in boxes)


class HostTensors:
    """The parts of `layout`'s parameters that `rank` has, float32 [out, in], each contiguous, from the pool's start on.

    Several of them may use one pool, one after another. Weight sync writes into it as into any rank's weights; a rank
    off the layout's grid has none and needs no pool.
    """

    on_host_only = True

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
            self.hf_views[name] = memory.view(offset, box.shape)
            offset += _aligned(box.size)

    @property
    def arrays(self) -> HostTensors:
        return self

    @property
    def names(self) -> list[str]:
        return list(self.boxes)
