"""One rank on a device with memory of its own: the same classes on Ascend with HCCL and on CPU with MCCL."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank, init

from mindgrpo.backend.contract import Backend, CompileLog, Graph, Group, Link, Pool, ProfileSettings
from mindgrpo.backend.device.hardware import Hardware
from mindgrpo.backend.device.pool import DevicePool
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.group_cells import AgreedSum, MindSporeSum
from mindgrpo.backend.host_pool import HostPool, SharedPool
from mindgrpo.backend.targets import ranks_per_host
from mindgrpo.errors import UserError
from mindgrpo.health.rank_health import RankHealth


class DeviceGroup(Group):
    """Several ranks; `name` is MindSpore's of the group."""

    def __init__(
        self, ranks: Sequence[int], index: int, name: str, hardware: Hardware, health: RankHealth
    ) -> None:
        self.ranks, self.index = tuple(ranks), index
        self._name, self._hardware, self._health = name, hardware, health

    def sum_cell(self) -> nn.Cell:
        scatter = self._hardware.scatter_sum_cell(self._name, self.index, self.size)
        return AgreedSum(scatter, self.gather_cell(), self.size)

    def quick_sum_cell(self) -> nn.Cell:
        return MindSporeSum(self._name)

    def gather_cell(self) -> nn.Cell:
        return self._hardware.gather_cell(self._name, self.index, self.size)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        # By way of all members' arrays: in rank order, and in the dtype that they have.
        arrays = self.gather_objects(array)
        array[...] = arrays[0]
        for other in arrays[1:]:
            array += other
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        payload = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
        sizes = np.zeros(self.size, np.int32)
        sizes[self.index] = payload.size
        sizes = self._sum(sizes)
        words = np.zeros((self.size, -(-int(sizes.max()) // 4)), np.int32)
        words[self.index].view(np.uint8)[: payload.size] = payload
        rows = self._sum(words).view(np.uint8)
        return [pickle.loads(row[:n].data) for row, n in zip(rows, sizes, strict=True)]

    def barrier(self) -> None:
        self._sum(np.zeros(1, np.int32))

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """Sums int32 over the group; every member has zeros where the others have theirs."""
        with waiting(self._health):
            total = Tensor(array)
            ops.communication.all_reduce(total, group=self._name)
            result: np.ndarray = total.asnumpy()
        return result


class DeviceLink(Link):
    def __init__(
        self,
        peer: int,
        shape: Sequence[int],
        exchange: Callable[[Mapping[int, Any], Mapping[int, Sequence[int]], Dtype], dict[int, Any]],
        dtype: Dtype,
    ) -> None:
        self._peer, self._shape = peer, tuple(shape)
        self._exchange, self._dtype = exchange, dtype

    def exchange(self, outgoing: Any | None, receives: bool) -> Any | None:
        sends = {} if outgoing is None else {self._peer: outgoing}
        wanted = {self._peer: self._shape} if receives else {}
        return self._exchange(sends, wanted, self._dtype).get(self._peer)


@contextmanager
def waiting(health: RankHealth) -> Iterator[None]:
    """The health of this rank knows since when it waits for others."""
    health.waits(time.monotonic())
    try:
        yield
    finally:
        health.waits(0.0)


class DeviceGraph(Graph):
    """Refuses to run on parameters whose memory was released: the device would compute with what is there now."""

    def __init__(
        self,
        cell: Callable[..., Any],
        name: str,
        log: CompileLog,
        pools_of: Callable[[nn.Cell], list[DevicePool]],
    ) -> None:
        super().__init__(cell, name, log)
        self._pools_of = pools_of
        self._pools: list[DevicePool] | None = None

    def __call__(self, *inputs: Any) -> Any:
        if self._pools is None:
            is_cell = isinstance(self._cell, nn.Cell)
            self._pools = self._pools_of(self._cell) if is_cell else []
        for pool in self._pools:
            pool.require(f"graph '{self._name}'")
        return super().__call__(*inputs)


class DeviceBackend(Backend):
    shares_memory = False

    def __init__(
        self, hardware: Hardware, environment: dict[str, str], compiled: bool = True
    ) -> None:
        self._hardware = hardware
        self.name = f"{hardware.name}, {hardware.communication}"
        self.kernels = hardware.kernels
        self.has_device_profile = hardware.has_profile
        self.rank, self.world_size = 0, int(environment.get("MS_WORKER_NUM", "1"))
        ms.set_context(mode=ms.GRAPH_MODE if compiled else ms.PYNATIVE_MODE)
        hardware.open(self.world_size)
        if self.world_size > 1:
            init(hardware.communication)
            self.rank, self.world_size = get_rank(), get_group_size()
        # Not earlier: the device is opened by then.
        self.device_memory_bytes = hardware.memory_bytes
        self._join(environment)
        self._environment = environment
        self._names: dict[tuple[int, ...], str] = {}

    def _several(self, ranks: tuple[int, ...]) -> Group:
        index, name = ranks.index(self.rank), self._name_of(ranks)
        return DeviceGroup(ranks, index, name, self._hardware, self.health)

    def _name_of(self, ranks: tuple[int, ...]) -> str:
        """MindSpore's name of the group of these ranks, which is made at the first call."""
        if len(ranks) == self.world_size:
            return str(GlobalComm.WORLD_COMM_GROUP)
        if ranks not in self._names:
            self._names[ranks] = "-".join(map(str, ranks))
            create_group(self._names[ranks], list(ranks))
        return self._names[ranks]

    def link(self, peer: int, shape: Sequence[int]) -> DeviceLink:
        return DeviceLink(peer, shape, self.exchange, self.compute_dtype)

    def exchange(
        self, sends: Mapping[int, Any], receives: Mapping[int, Sequence[int]], dtype: Dtype
    ) -> dict[int, Any]:
        with waiting(self.health):
            return self._hardware.exchange(
                self.rank, sends, receives, lambda low, high: self._name_of((low, high)), dtype
            )

    def synchronize(self) -> None:
        self._hardware.synchronize()

    def take_device_peak(self) -> int | None:
        return self._hardware.take_peak()

    def devices_of(self, ranks: Sequence[int]) -> Mapping[str, str]:
        variable = self._hardware.devices_variable
        if variable is None:
            return {}
        per_host = ranks_per_host(self._environment, self.world_size)
        if len({rank // per_host for rank in ranks}) > 1:
            raise UserError(
                f"generate_config.parallel_config.model_parallel is {len(ranks)}, and so ranks {ranks[0]} to "
                f"{ranks[-1]}, of several hosts, share a vLLM engine, which uses the devices of one; set it to "
                f"{per_host} or less."
            )
        # Those of this process, in whose order its host's ranks have them.
        listed = self._environment.get(variable, "").split(",")
        visible = [word.strip() for word in listed if word.strip()]
        numbers = [rank % per_host for rank in ranks]
        return {variable: ",".join(visible[i] if visible else str(i) for i in numbers)}

    def make_room(self) -> None:
        self._hardware.empty_cache()

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return DeviceGraph(cell, name, self.compile_log, self._pools_of)

    def _pools_of(self, cell: nn.Cell) -> list[DevicePool]:
        used = {id(parameter) for parameter in cell.get_parameters()}
        pools = [pool for pool in self.live_pools if isinstance(pool, DevicePool)]
        return [pool for pool in pools if any(id(own) in used for own in pool.parameters)]

    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        pool = DevicePool(size, self._hardware, self._count, dtype)
        self.live_pools.add(pool)
        return pool

    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> HostPool:
        pool = SharedPool(size, dtype) if shared else HostPool(size, dtype)
        self.live_pools.add(pool)
        return pool

    def _count(self, num_bytes: int) -> None:
        self.host_device_bytes += num_bytes

    def device_profile(
        self, folder: Path, settings: ProfileSettings
    ) -> AbstractContextManager[None]:
        return self._hardware.profile(folder, settings)

    def device_mark(self, name: str) -> AbstractContextManager[None]:
        return self._hardware.mark(name)
