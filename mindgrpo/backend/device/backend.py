"""The backend of one rank on a device with separate memory, shared by Ascend with HCCL and the CPU with MCCL.

Each parameter has its own device memory; while it is offloaded, its values are in a host array.
"""

from __future__ import annotations

import pickle
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.communication import GlobalComm, create_group, get_group_size, get_rank, init

from mindgrpo.backend.contract import Backend, CompileLog, Graph, Group, Link, Pool, ReleasedMemory
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, mindspore_dtype, numpy_dtype
from mindgrpo.backend.group_cells import AgreedSum, MindSporeSum
from mindgrpo.backend.host_pool import HostPool, SharedPool
from mindgrpo.backend.targets import ranks_per_host
from mindgrpo.errors import UserError
from mindgrpo.health.rank_health import RankHealth


class DeviceGroup(Group):
    """A communication group of several ranks; `name` is MindSpore's name of it."""

    def __init__(self, ranks: tuple[int, ...], name: str, backend: DeviceBackend) -> None:
        self.ranks, self.index = ranks, ranks.index(backend.rank)
        self._name, self._backend, self._health = name, backend, backend.health

    def sum_cell(self) -> nn.Cell:
        return AgreedSum(self.scatter_sum_cell(), self.gather_cell(), self.size)

    def quick_sum_cell(self) -> nn.Cell:
        return self._backend.sum_cell(self._name)

    def gather_cell(self) -> nn.Cell:
        return self._backend.gather_cell(self._name, self.index, self.size)

    def scatter_sum_cell(self) -> nn.Cell:
        return self._backend.scatter_sum_cell(self._name, self.index, self.size)

    def exchange_cell(self) -> nn.Cell:
        return self._backend.exchange_cell(self._name, self.index, self.size)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        # Gathers all arrays to add in rank order and in the array's own dtype.
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

    def exchange_bytes(self, parcels: Sequence[np.ndarray]) -> list[np.ndarray]:
        sizes = self.gather_objects([parcel.size for parcel in parcels])
        sends, receives = dict[int, list[Any]](), dict[int, list[Any]]()
        for member, (rank, parcel) in enumerate(zip(self.ranks, parcels, strict=True)):
            size = sizes[member][self.index]
            if member != self.index and parcel.size:
                # Transfers preserve the bits, and float32 is the one dtype that all devices can send.
                words = np.pad(parcel, (0, -parcel.size % 4)).view(np.float32)
                sends[rank] = [self._backend.copied(words, "float32")]
            if member != self.index and size:
                receives[rank] = [self._backend.zeros((-(-size // 4),), "float32")]
        self._backend.exchange(sends, receives)
        arrived = {rank: words.asnumpy().view(np.uint8) for rank, (words,) in receives.items()}
        arrived[self.ranks[self.index]] = parcels[self.index]
        nothing = np.zeros(0, np.uint8)
        own_sizes = (of_rank[self.index] for of_rank in sizes)
        pairs = zip(self.ranks, own_sizes, strict=True)
        return [arrived.get(rank, nothing)[:size] for rank, size in pairs]

    def barrier(self) -> None:
        self._sum(np.zeros(1, np.int32))

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """All-reduces (sums) int32 [...]. Used to gather: each element is non-zero on at most one member."""
        with waiting(self._health):
            total = Tensor(array)
            ops.communication.all_reduce(total, group=self._name)
            result: np.ndarray = total.asnumpy()
        return result


class DeviceLink(Link):
    def __init__(self, peer: int, backend: DeviceBackend) -> None:
        self._peer, self._backend = peer, backend

    def exchange(
        self, outgoing: Any | None, receives: Sequence[int] | None
    ) -> Callable[[], Any | None]:
        backend = self._backend
        sends = {} if outgoing is None else {self._peer: [outgoing]}
        arrived = None if receives is None else backend.zeros(receives, backend.compute_dtype)
        backend.exchange(sends, {} if arrived is None else {self._peer: [arrived]})
        return lambda: arrived


@contextmanager
def waiting(health: RankHealth) -> Iterator[None]:
    """Context manager that reports this rank as waiting for other ranks in its health record."""
    health.waits(time.monotonic())
    try:
        yield
    finally:
        health.waits(0.0)


class DeviceGraph(Graph):
    """A graph that raises ReleasedMemory if its parameters are not on the device, instead of reading stale memory."""

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
    """Base of device backends; tensors are MindSpore's, in device memory. Subclasses set `kernels` before __init__."""

    shares_memory = False
    # MindSpore's name of its communication.
    communication: str
    # The environment variable that limits which of the host's devices another program sees.
    devices_variable: str | None = None

    def __init__(self, environment: dict[str, str], compiled: bool = True) -> None:
        self.rank, self.world_size = 0, int(environment.get("MS_WORKER_NUM", "1"))
        ms.set_context(mode=ms.GRAPH_MODE if compiled else ms.PYNATIVE_MODE)
        self._open()
        if self.world_size > 1:
            init(self.communication)
            self.rank, self.world_size = get_rank(), get_group_size()
        # Only now has the device been opened.
        self.device_memory_bytes = self._memory_bytes()
        self._set_up(environment)
        self._environment = environment
        self._names: dict[tuple[int, ...], str] = {}

    def _open(self) -> None:
        """Configures this process, after the device was selected and before the first allocation on it."""

    def _memory_bytes(self) -> int | None:
        """Returns the capacity of the device in bytes; None if it has no limit of its own."""
        return None

    @abstractmethod
    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Any:
        """Allocates a zero tensor in device memory."""

    @abstractmethod
    def copied(self, array: np.ndarray, dtype: Dtype) -> Any:
        """Copies `array` [...], which is of `dtype`, to device memory that does not alias it."""

    def give_up(self, parameter: Any) -> None:
        """Frees the device memory of a parameter whose data is about to be replaced.

        It has to be freed explicitly: compiled graphs that used the parameter hold references until they run again.
        """
        # Through `data`, a fresh tensor: Parameter.untyped_storage() keeps returning the first storage it returned.
        parameter.data.untyped_storage().resize_(0)

    def sum_cell(self, group: str) -> nn.Cell:
        """Makes an all-reduce (sum) cell for graphs, [...] -> [...]; last bits may differ between members."""
        return MindSporeSum(group)

    @abstractmethod
    def gather_cell(self, group: str, index: int, size: int) -> nn.Cell:
        """Implements contract.Group.gather_cell for the member at `index` of `size`."""

    @abstractmethod
    def scatter_sum_cell(self, group: str, index: int, size: int) -> nn.Cell:
        """Implements contract.Group.scatter_sum_cell for the member at `index` of `size`; adds in any order."""

    @abstractmethod
    def exchange_cell(self, group: str, index: int, size: int) -> nn.Cell:
        """Implements contract.Group.exchange_cell for the member at `index` of `size`."""

    @abstractmethod
    def _transfer(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        """Implements contract.Backend.exchange."""

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return DeviceGroup(ranks, self._name_of(ranks), self)

    def _name_of(self, ranks: tuple[int, ...]) -> str:
        """Returns MindSpore's name of the group of `ranks`, which is created at the first call."""
        if len(ranks) == self.world_size:
            return str(GlobalComm.WORLD_COMM_GROUP)
        if ranks not in self._names:
            self._names[ranks] = "-".join(map(str, ranks))
            create_group(self._names[ranks], list(ranks))
        return self._names[ranks]

    def link(self, peer: int, shape: Sequence[int]) -> DeviceLink:
        return DeviceLink(peer, self)

    def exchange(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        with waiting(self.health):
            self._transfer(sends, receives)

    def devices_of(self, ranks: Sequence[int]) -> Mapping[str, str]:
        variable = self.devices_variable
        if variable is None:
            return {}
        per_host = ranks_per_host(self._environment, self.world_size)
        if len({rank // per_host for rank in ranks}) > 1:
            raise UserError(
                f"generate_config.parallel_config.model_parallel is {len(ranks)}, and so ranks {ranks[0]} to "
                f"{ranks[-1]}, of several hosts, share a vLLM engine, which uses the devices of one; set it to "
                f"{per_host} or less."
            )
        # Ranks of this host use the devices visible to this process, in this order.
        listed = self._environment.get(variable, "").split(",")
        visible = [word.strip() for word in listed if word.strip()]
        numbers = [rank % per_host for rank in ranks]
        return {variable: ",".join(visible[i] if visible else str(i) for i in numbers)}

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return DeviceGraph(cell, name, self.compile_log, self._pools_of)

    def _pools_of(self, cell: nn.Cell) -> list[DevicePool]:
        used = {id(parameter) for parameter in cell.get_parameters()}
        pools = [pool for pool in self.live_pools if isinstance(pool, DevicePool)]
        return [pool for pool in pools if any(id(own) in used for own in pool.parameters)]

    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        pool = DevicePool(size, self, dtype)
        self.live_pools.add(pool)
        return pool

    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> HostPool:
        pool = SharedPool(size, dtype) if shared else HostPool(size, dtype)
        self.live_pools.add(pool)
        return pool


class _State(Enum):
    RELEASED = "released"
    DEVICE = "on the device"
    HOST = "on the host"


class _Flat:
    """Implements contract.HostArrays on a flat array [size]."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return self.array[offset : offset + count].reshape(shape)


class DevicePool(Pool):
    """A pool whose parameters have separate device memory, allocated by `load` or the first host write."""

    is_host_memory = False

    def __init__(self, size: int, backend: DeviceBackend, dtype: Dtype = "float32") -> None:
        """Sets the pool's `size` in elements; allocates nothing yet."""
        self.num_bytes, self.dtype = size * ITEM_BYTES[dtype], dtype
        self._size = size
        self._backend = backend
        self._parameters: list[tuple[Parameter, int, tuple[int, ...]]] = []
        self._state = _State.RELEASED
        self._host: np.ndarray | None = None

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Parameter:
        end = offset + int(np.prod(shape, dtype=np.int64))
        for other, start, taken in self._parameters:
            if offset < start + int(np.prod(taken, dtype=np.int64)) and start < end:
                raise ValueError(f"{name} would lie on {other.name}: a range has one parameter")
        if self._state is not _State.RELEASED:
            raise ValueError(f"{name} comes too late: its pool is {self._state.value}")
        parameter = Parameter(Tensor([0.0], mindspore_dtype(self.dtype)), name)
        self._parameters.append((parameter, offset, tuple(shape)))
        return parameter

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for parameter, _, _ in self._parameters]

    def require(self, user: str) -> None:
        if self._state is not _State.DEVICE:
            name = self._parameters[0][0].name if self._parameters else "a pool"
            raise ReleasedMemory(
                f"{user} uses {name}, whose memory is {self._state.value}: its role is not active in this phase"
            )

    def load(self) -> None:
        if self._state is _State.DEVICE:
            return
        if self._host is not None:
            self._upload(self._host)
        else:
            for parameter, _, shape in self._parameters:
                self._replace(parameter, self._backend.zeros(shape, self.dtype))
        self._host = None
        self._state = _State.DEVICE

    def offload(self) -> None:
        if self._state is _State.DEVICE:
            self._host = self._download()
            self._give_up(_State.HOST)

    def release(self) -> None:
        self._host = None
        self._give_up(_State.RELEASED)

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[_Flat]:
        if self._state is _State.HOST and self._host is not None:
            yield _Flat(self._host)
            return
        if not write:
            self.require("reading on the host")
        self.load()
        array = self._download()
        yield _Flat(array)
        if write:
            self._upload(array)

    def _download(self) -> np.ndarray:
        array = np.zeros(self._size, numpy_dtype(self.dtype))
        flat = _Flat(array)
        for parameter, offset, shape in self._parameters:
            values = parameter.asnumpy()
            flat.view(offset, shape)[...] = values
            self._backend.host_device_bytes += values.nbytes
        return array

    def _upload(self, array: np.ndarray) -> None:
        flat = _Flat(array)
        for parameter, offset, shape in self._parameters:
            values = flat.view(offset, shape)
            self._replace(parameter, self._backend.copied(values, self.dtype))
            self._backend.host_device_bytes += values.nbytes

    def _give_up(self, state: _State) -> None:
        # Operations in flight may still use the memory.
        self._backend.synchronize()
        for parameter, _, _ in self._parameters:
            self._replace(parameter, Tensor([np.nan], mindspore_dtype(self.dtype)))
        self._state = state

    def _replace(self, parameter: Parameter, tensor: Tensor) -> None:
        """Makes the parameter use the memory of `tensor`, and frees its old memory."""
        if self._state is _State.DEVICE:
            self._backend.give_up(parameter)
        parameter.set_data(tensor, slice_shape=True)
