"""The bucket in which a rank hands weights to its engine: memory that both processes see, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mindgrpo.backend.contract import Backend, HostArrays, Pool
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.vllm.child.mindgrpo_engine.checksum import checksum
from mindgrpo.rollout.vllm.settings import ITEM_BYTES, Dtype
from mindgrpo.weight_sync.stream import groups_of
from mindgrpo.weights.host_tensors import HostTensors, aligned_bytes
from mindgrpo.weights.local_weights import FLOAT_BYTES

CONVERTED_AT_ONCE = 1 << 20

HandOver = Callable[[list[dict[str, Any]]], None]


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 bits of float32 values, rounded to the nearest, ties to even; what is not a number stays none."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


class SharedTensors:
    """A TensorSink on the ranks that own an engine, and an empty one on the others.

    `hand_over` is called with a group's tensors, as the engine reads them: name, shape, whether it lies in memory
    transposed, offset in bytes and checksum.
    The bucket has room for the largest group. Half-precision weights arrive as float32 in memory of their own.
    """

    def __init__(self, layout: Layout, backend: Backend, dtype: Dtype, hand_over: HandOver) -> None:
        self._dtype, self._hand_over = dtype, hand_over
        groups = [group.held_by(backend.rank).values() for group in groups_of(layout)]

        def largest(itemsize: int) -> int:
            return max(sum(aligned_bytes(box, itemsize) for box in boxes) for boxes in groups)

        self.bucket: Any = backend.host_pool(largest(ITEM_BYTES[dtype]), shared=True)
        self.pool: Pool = self.bucket
        if dtype != "float32":
            self.pool = backend.host_pool(largest(FLOAT_BYTES))

    @property
    def host_copies(self) -> Sequence[Pool]:
        return [self.bucket] if self.pool is self.bucket else [self.bucket, self.pool]

    def take(self, tensors: HostTensors) -> None:
        with self.bucket.on_host() as memory:
            self._hand_over([*self._written(tensors, memory)])

    def _written(self, tensors: HostTensors, memory: HostArrays) -> Iterator[dict[str, Any]]:
        itemsize, offset = ITEM_BYTES[self._dtype], 0
        for name, view in tensors.hf_views.items():
            transposed = not view.flags.c_contiguous
            values = view.T if transposed else view
            room = aligned_bytes(tensors.boxes[name], itemsize)
            # The pool's elements are of four bytes whatever is in them.
            words = memory.view(offset // FLOAT_BYTES, (room // FLOAT_BYTES,))
            stored = words.view(np.uint8)[: values.size * itemsize]
            if itemsize != FLOAT_BYTES:
                self._convert(values.reshape(-1), stored.view(np.uint16))
            yield {
                "name": name,
                "shape": list(view.shape),
                "transposed": transposed,
                "offset": offset,
                "crc": checksum(stored.data),
            }
            offset += room

    def _convert(self, values: np.ndarray, stored: np.ndarray) -> None:
        for start in range(0, values.size, CONVERTED_AT_ONCE):
            some = slice(start, start + CONVERTED_AT_ONCE)
            if self._dtype == "bfloat16":
                stored[some] = to_bfloat16(values[some])
            else:
                stored[some] = values[some].astype(np.float16).view(np.uint16)
