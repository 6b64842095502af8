"""Ascend: HCCL in and between graphs, parameters on the device, their pools' arrays on the host.

Written from MindSpore 2.9's documentation and NOT run on hardware: no such device was within reach. A pool's array
is the host's copy; `pull` fetches what the device computed and `push` sends what the host wrote, which is what
releasing and bringing back a role does as well.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank, init

from mindgrpo.backend.contract import (
    Backend,
    Group,
    Link,
    Pool,
)
from mindgrpo.backend.graph import CompileLog
from mindgrpo.backend.group_cells import AloneGather, AloneSum, MindSporeSum
from mindgrpo.backend.host_pool import HostPool
from mindgrpo.backend.kernels.mindspore_ops import PlainKernels
from mindgrpo.backend.profile import ProfileSettings
from mindgrpo.health.rank_health import RankHealth


def _result(output: Any) -> np.ndarray:
    """ops.communication's calls give (tensor, handle); the handle is None for synchronous calls."""
    return (output[0] if isinstance(output, tuple) else output).asnumpy()


class _Gather(nn.Cell):
    """AllGather joins along the first dim, which x therefore gets first."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = ops.AllGather(name)

    def construct(self, x: Any) -> Any:
        return self.call(ops.expand_dims(x, 0))


class AscendGroup(Group):
    def __init__(self, ranks: tuple[int, ...], index: int, name: str) -> None:
        self.ranks, self.index, self._name = ranks, index, name

    def sum_cell(self) -> nn.Cell:
        return MindSporeSum(self._name) if self.size > 1 else AloneSum()

    def gather_cell(self) -> nn.Cell:
        return _Gather(self._name) if self.size > 1 else AloneGather()

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        if self.size > 1:
            # The device has no float64 sums; the norms that come in it lose nothing that matters.
            wide = array.astype(np.float32)
            array[...] = _result(ops.communication.all_reduce(Tensor(wide), group=self._name))
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        payload = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = self._gather(np.array([payload.size], np.int32)).reshape(-1)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: payload.size] = payload
        rows = self._gather(padded).reshape(self.size, -1)
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, sizes, strict=True)]

    def _gather(self, array: np.ndarray) -> np.ndarray:
        room = Tensor(np.zeros((self.size * array.shape[0], *array.shape[1:]), array.dtype))
        output = ops.communication.all_gather_into_tensor(room, Tensor(array), group=self._name)
        return _result(output)

    def barrier(self) -> None:
        if self.size > 1:
            ops.communication.barrier(self._name)


class AscendLink(Link):
    def __init__(self, source: int, target: int) -> None:
        self._source, self._target = source, target

    def send(self, array: np.ndarray) -> None:
        ops.communication.send(Tensor(array), dst=self._target)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return _result(ops.communication.recv(Tensor(np.zeros(shape, dtype)), src=self._source))


class AscendPool(Pool):
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._host = np.zeros(num_bytes // 4, np.float32)
        self._parameters: list[tuple[Parameter, np.ndarray]] = []

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return self._host[offset : offset + count].reshape(shape)

    def covers(self, array: np.ndarray) -> bool:
        return np.shares_memory(self._host, array)

    def register(self, parameter: Parameter, array: np.ndarray) -> None:
        self._parameters.append((parameter, array))

    def pull(self) -> None:
        for parameter, array in self._parameters:
            array[...] = parameter.asnumpy()

    def push(self) -> None:
        for parameter, array in self._parameters:
            parameter.set_data(Tensor(array), slice_shape=True)

    def offload(self) -> None:
        self.pull()
        self._empty_device()

    def load(self) -> None:
        self.push()

    def release(self) -> None:
        self._host[...] = 0.0
        self._empty_device()

    def _empty_device(self) -> None:
        for parameter, _ in self._parameters:
            parameter.set_data(Tensor(np.zeros(1, np.float32)), slice_shape=True)
        ms.runtime.empty_cache()


class AscendBackend(Backend):
    name = "Ascend"
    shares_memory = False
    has_device_profile = True
    kernels = PlainKernels()

    def __init__(
        self, environment: dict[str, str], transport: str = "hccl", compiled: bool = True
    ) -> None:
        self.compile_log = CompileLog()
        self.live_pools = WeakSet()
        ms.set_context(mode=ms.GRAPH_MODE if compiled else ms.PYNATIVE_MODE)
        ms.set_device("Ascend")
        self.rank, self.world_size = 0, int(environment.get("MS_WORKER_NUM", "1"))
        if self.world_size > 1:
            init("hccl")
            ops.communication.set_comm_ops_inplace(False)
            self.rank, self.world_size = get_rank(), get_group_size()
        self.health = RankHealth.of_process(self.rank, self.world_size, environment)
        self.compile_log.span = self.health.compiling
        self._groups: dict[tuple[int, ...], AscendGroup] = {}
        self._pools: list[AscendPool] = []

    def group(self, ranks: Sequence[int]) -> AscendGroup:
        key = tuple(ranks)
        if key not in self._groups:
            name = GlobalComm.WORLD_COMM_GROUP
            if 1 < len(key) < self.world_size:
                name = "-".join(map(str, key))
                create_group(name, list(key))
            self._groups[key] = AscendGroup(key, key.index(self.rank), name)
        return self._groups[key]

    def link(self, source: int, target: int, slot_bytes: int) -> AscendLink:
        return AscendLink(source, target)

    def pool(self, num_bytes: int, shared: bool = False) -> Pool:
        pool = AscendPool(num_bytes)
        self._pools.append(pool)
        self.live_pools.add(pool)
        return pool

    def host_pool(self, num_bytes: int) -> Pool:
        pool = HostPool(num_bytes)
        self.live_pools.add(pool)
        return pool

    def parameter(self, array: np.ndarray, name: str, requires_grad: bool = True) -> Parameter:
        parameter = Parameter(Tensor(array), name, requires_grad=requires_grad)
        for pool in self._pools:
            if pool.covers(array):
                pool.register(parameter, array)
        return parameter

    def transfer(
        self,
        bucket_bytes: int,
        fill: Callable[[np.ndarray], int],
        drain: Callable[[Callable[[int], np.ndarray]], None],
    ) -> None:
        bucket = np.zeros(bucket_bytes, np.uint8)
        fill(bucket)
        rows = [bucket] if self.world_size == 1 else self.world.gather_objects(bucket)
        drain(rows.__getitem__)

    def close(self) -> None:
        self.world.barrier()

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
