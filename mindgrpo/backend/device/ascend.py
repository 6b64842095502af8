"""The backend of Ascend NPUs, with everything that cannot be tested on CPU: HCCL, device memory, kernels, profiler.

Written from the documentation of MindSpore 2.9 (the calls are unchanged in 2.10) and never run on hardware, since no
NPU was available. All other code that NPUs run is in backend.py and its neighbours, which tests run on CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from mindgrpo.backend.contract import ProfileSettings
from mindgrpo.backend.device.backend import DeviceBackend
from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.backend.kernels.ascend import AscendKernels, AttentionDtype
from mindgrpo.backend.targets import VISIBLE_DEVICES


class _Gather(nn.Cell):
    """[...] -> [size, ...]: adds the first dim, along which AllGather concatenates."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call, self.expand = ops.AllGather(name), ops.ExpandDims()

    def construct(self, x: Any) -> Any:
        return self.call(self.expand(x, 0))


class _ScatterSum(nn.Cell):
    """[size, ...] -> [...]: removes the first dim, which ReduceScatter splits but keeps with size 1."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = ops.ReduceScatter(ops.ReduceOp.SUM, name)

    def construct(self, x: Any) -> Any:
        return self.call(x).reshape(x.shape[1:])


class _Exchange(nn.Cell):
    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.call = ops.AlltoAll(split_count=size, split_dim=0, concat_dim=0, group=name)

    def construct(self, x: Any) -> Any:
        return self.call(x)


class AscendBackend(DeviceBackend):
    name = "Ascend, hccl"
    communication = "hccl"
    has_device_profile = True
    devices_variable = VISIBLE_DEVICES

    def __init__(
        self,
        environment: dict[str, str],
        compiled: bool = True,
        fused: AttentionDtype | None = None,
    ) -> None:
        """Sets the dtype of fused attention to `fused`; None uses plain MindSpore operations instead."""
        self.kernels = AscendKernels(attention_dtype=fused)
        super().__init__(environment, compiled)

    def _memory_bytes(self) -> int | None:
        # Runs an operation to open the device, without which this is 0 unless collectives have been set up. `hal` is
        # deprecated, but up to 2.10 MindSpore has no alternative.
        self.zeros((1,), "float32").asnumpy()
        return int(ms.hal.get_device_properties(0).total_memory) or None

    def take_device_peak(self) -> int | None:
        # A reset sets the peak to 0, and existing allocations count again only after the next allocation.
        peak = max(ms.runtime.max_memory_allocated(), ms.runtime.memory_allocated())
        ms.runtime.reset_max_memory_allocated()
        return peak

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Tensor:
        return mint.zeros(tuple(shape), dtype=mindspore_dtype(dtype))

    def copied(self, array: np.ndarray, dtype: Dtype) -> Tensor:
        return Tensor(array, mindspore_dtype(dtype))

    def synchronize(self) -> None:
        ms.runtime.synchronize()

    def make_room(self) -> None:
        ms.runtime.synchronize()
        ms.runtime.empty_cache()

    def gather_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return _Gather(group)

    def scatter_sum_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return _ScatterSum(group)

    def exchange_cell(self, group: str, index: int, size: int) -> nn.Cell:
        return _Exchange(group, size)

    def _transfer(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        operation = ops.communication.P2POp
        transfers = [
            operation(kind, tensor, peer)
            for kind, by_peer in (("isend", sends), ("irecv", receives))
            for peer, tensors in by_peer.items()
            for tensor in tensors
        ]
        if transfers:
            for handle in ops.communication.batch_isend_irecv(transfers):
                handle.wait()

    @contextmanager
    def device_profile(self, folder: Path, settings: ProfileSettings) -> Iterator[None]:
        from mindspore import profiler

        levels = profiler.ProfilerLevel
        level = {"none": levels.LevelNone, "0": levels.Level0, "2": levels.Level2}
        activities = [profiler.ProfilerActivity.NPU] if settings.with_device else []
        if settings.with_host or settings.with_memory or settings.with_stack:
            activities.append(profiler.ProfilerActivity.CPU)
        running = profiler.profile(
            activities=activities,
            with_stack=settings.with_stack,
            profile_memory=settings.with_memory,
            start_profile=False,
            on_trace_ready=profiler.tensorboard_trace_handler(
                str(folder), analyse_flag=settings.analyse
            ),
            experimental_config=profiler._ExperimentalConfig(
                profiler_level=level.get(settings.level, levels.Level1), mstx=settings.marks
            ),
        )
        running.start()
        try:
            yield
        finally:
            running.stop()

    @contextmanager
    def device_mark(self, name: str) -> Iterator[None]:
        from mindspore.profiler import mstx

        mark = mstx.range_start(name)
        try:
            yield
        finally:
            mstx.range_end(mark)
