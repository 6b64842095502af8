"""Measures what the roofline of `plan` divides its counts by, as values of keys of context.roofline.

Rates are those that are reached, so that the shares of a peak are 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.targets import Target
from mindgrpo.doctor.jobs import CheckLine, Starts, ok

CALLS, KERNELS, MIB = 10, 300, 1 << 20


class _Chain(nn.Cell):
    """Multiplies x by `factor` so many times, a kernel each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def construct(self, x: Any, factor: Any) -> Any:
        for _ in range(self.count):
            x = x * factor
        return x


def seconds_of(call: Callable[[], object], backend: Backend, calls: int = CALLS) -> float:
    """Returns the seconds of a call after the first."""
    call()
    backend.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    backend.synchronize()
    return (time.perf_counter() - started) / calls


def rate_lines(backend: Backend, target: Target, starts: Starts) -> Iterator[CheckLine]:
    """Measures the rates of one device."""
    starts("rates")
    is_small = target.keeps_weights_on_host
    side, size = (512, 16 * MIB) if is_small else (4096, 256 * MIB)
    rates = {"matmul_share": 1.0, "memory_share": 1.0}
    for dtype in {"float32", backend.compute_dtype}:
        key = "float32_tflops" if dtype == "float32" else "matmul_tflops"
        square = Tensor(np.ones((side, side), np.float32)).astype(mindspore_dtype(dtype))
        rates[key] = 2e-12 * side**3 / seconds_of(partial(ops.matmul, square, square), backend)
    large, one = Tensor(np.ones(size // 4, np.float32)), Tensor([1.0], ms.float32)
    single = backend.graph(_Chain(1), "one kernel")
    rates["memory_GB_per_s"] = 2e-9 * size / seconds_of(lambda: single(large, one), backend)
    chain, few = backend.graph(_Chain(KERNELS), "many kernels"), Tensor([1.0, 1.0])
    started = time.perf_counter()
    chain(few, one).asnumpy()
    rates["compile_ms"] = 1e3 * (time.perf_counter() - started) / KERNELS
    rates["launch_us"] = 1e6 * seconds_of(lambda: chain(few, one), backend) / KERNELS
    rates["call_us"] = 1e6 * seconds_of(lambda: ops.mul(few, one), backend, KERNELS)
    rates["sync_us"] = 1e6 * seconds_of(lambda: single(few, one).asnumpy(), backend)
    # An operation that NPUs leave to their AI CPU.
    bits = Tensor(np.arange(MIB, dtype=np.int32))
    shift = seconds_of(lambda: ops.bitwise_right_shift(bits, 3), backend)
    rates["slow_ns"] = 1e9 * shift / MIB
    rounded = {key: float(f"{value:.4g}") for key, value in rates.items()}
    yield ok("rates", ", ".join(f"{key} {own:g}" for key, own in rounded.items()), roofline=rounded)
