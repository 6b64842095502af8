"""What a device gives back of its memory and says of it: MindSpore's own allocator on CPU, and stand-ins for an NPU.

Does not prove that an NPU's allocator does the same, nor what its drivers and HCCL keep for themselves.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil
from mindspore import Tensor, mint, nn

from mindgrpo.backend.device.backend import DeviceBackend
from mindgrpo.backend.device.hardware import Hardware
from mindgrpo.backend.device.host_cpu import HostCpu
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype

MIB = 1 << 20
LARGE = 256 * MIB


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


class Pooled(HostCpu):
    """The processors with memory of MindSpore's own allocator, as a device has, which hands out again what it gets."""

    give_up = Hardware.give_up

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        zeros = mint.zeros(tuple(shape), dtype=mindspore_dtype(dtype))
        zeros.reshape(-1)[:1].asnumpy()
        return zeros


class FirstRow(nn.Cell):
    def __init__(self, parameter: Any) -> None:
        super().__init__()
        self.parameter = parameter

    def construct(self, x: Any) -> Any:
        return self.parameter[:1] * x


def test_memory_that_a_graph_still_refers_to_is_given_back_and_used_again() -> None:
    backend = DeviceBackend(Pooled(), {})
    pool = backend.pool(LARGE // 4)
    graph = backend.graph(FirstRow(pool.parameter("large", 0, (LARGE // 4,))), "first row")
    pool.load()
    graph(Tensor([2.0])).asnumpy()
    once = rss()
    for leave in (pool.release, pool.offload, pool.release):
        leave()
        pool.load()
        # The graph has not run again: with its old memory there would be two.
        assert rss() - once < LARGE // 2
        np.testing.assert_array_equal(graph(Tensor([2.0])).asnumpy(), [0.0])
