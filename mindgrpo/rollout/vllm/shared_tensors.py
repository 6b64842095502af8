"""The bucket in which a rank hands weights to its engine: memory that both processes see, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mindgrpo.backend.contract import Backend, HostArrays, Pool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.vllm.child.mindgrpo_engine.checksum import checksum
from mindgrpo.weight_sync.stream import bucket_size
from mindgrpo.weights.host_tensors import HostTensors, aligned_size

CONVERTED_AT_ONCE = 1 << 20

HandOver = Callable[[list[dict[str, Any]]], None]


class SharedTensors:
    """A TensorSink on the ranks that own an engine, and an empty one on the others.

    `hand_over` is called with a group's tensors, as the engine reads them: name, shape, whether it lies in memory
    transposed, offset in bytes and checksum.
    The bucket has room for the largest group. Weights of another dtype arrive in memory of their own.
    """

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        dtype: Dtype,
        hand_over: HandOver,
    ) -> None:
        """`dtype` is the engine's."""
        self._hand_over = hand_over
        size = bucket_size(layout, backend.rank, dtype)
        self.bucket: Any = backend.host_pool(size, shared=True, dtype=dtype)
        self.pool: Pool = self.bucket
        own = backend.compute_dtype
        if dtype != own:
            self.pool = backend.host_pool(bucket_size(layout, backend.rank, own), dtype=own)

    @property
    def host_copies(self) -> Sequence[Pool]:
        return [self.bucket] if self.pool is self.bucket else [self.bucket, self.pool]

    def take(self, tensors: HostTensors) -> None:
        with self.bucket.on_host() as memory:
            self._hand_over([*self._written(tensors, memory)])

    def _written(self, tensors: HostTensors, memory: HostArrays) -> Iterator[dict[str, Any]]:
        offset, itemsize = 0, self.bucket.itemsize
        for name, view in tensors.hf_views.items():
            transposed = not view.flags.c_contiguous
            values = (view.T if transposed else view).reshape(-1)
            stored = memory.view(offset, (values.size,))
            if self.pool is not self.bucket:
                # In parts, so that what numpy needs on the way stays small.
                for start in range(0, values.size, CONVERTED_AT_ONCE):
                    some = slice(start, start + CONVERTED_AT_ONCE)
                    stored[some] = values[some].astype(np.float32, copy=False)
            yield {
                "name": name,
                "shape": list(view.shape),
                "transposed": transposed,
                "offset": offset * itemsize,
                "crc": checksum(stored.view(np.uint8).data),
            }
            offset += aligned_size(tensors.boxes[name], itemsize)
