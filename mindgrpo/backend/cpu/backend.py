"""CPU: MindSpore's own kernels, ranks of one host joined by msrun; between and inside graphs shared memory.

`transport: mccl` sums inside graphs with MindSpore's AllReduce instead, the portable reference that the shared
memory is held equal to; between graphs ranks always use shared memory, and where nothing else is used they never form
MindSpore's cluster, which takes seconds to join and to leave.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from mindgrpo.backend import group_cells
from mindgrpo.backend.contract import (
    Backend,
    Group,
    Link,
    Pool,
)
from mindgrpo.backend.cpu.host import Host, job_name, own_rank
from mindgrpo.backend.cpu.shared_group import NativeGroup, SharedGroup, shared_group
from mindgrpo.backend.cpu.shared_memory import SharedBuckets, SharedLink
from mindgrpo.backend.graph import CompileLog, Graph
from mindgrpo.backend.host_pool import HostPool, PeerPool, SharedPool
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.backend.targets import needs_cluster
from mindgrpo.health.rank_health import RankHealth

# Larger ones are no faster: what a group's members add at a time should stay in the caches.
GROUP_BUFFER_BYTES = 512 << 10
# Some 50 us: longer than a message takes where every rank has a core of its own.
SPINS_WITH_A_CORE_EACH = 2000


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


class CpuGroup(Group):
    def __init__(
        self, ranks: Sequence[int], index: int, shared: SharedGroup | None, mccl: str
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self._shared = shared
        self._mccl = mccl

    def sum_cell(self) -> nn.Cell:
        if self._shared is None:
            return group_cells.AloneSum()
        if self._mccl:
            return group_cells.MindSporeSum(self._mccl)
        if isinstance(self._shared, NativeGroup):
            return group_cells.NativeSum(self._shared)
        return group_cells.PythonSum(self._shared)

    def gather_cell(self) -> nn.Cell:
        if self._shared is None:
            return group_cells.AloneGather()
        if isinstance(self._shared, NativeGroup) and not self._mccl:
            return group_cells.NativeGather(self._shared)
        return group_cells.GatherBySum(self.sum_cell(), self.index, self.size)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        if self._shared is not None:
            whole = np.ascontiguousarray(array)
            self._shared.sum_into(whole.reshape(-1), whole.reshape(-1))
            if whole is not array:
                array[...] = whole
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self._shared is None else self._shared.gather_objects(value)

    def barrier(self) -> None:
        if self._shared is not None:
            self._shared.barrier()


class CpuGraph(Graph):
    """Its kernels can only end with a number: raises what `check` knows (a rank is gone), or the kernel kept."""

    def __init__(
        self, cell: Callable[..., Any], name: str, log: CompileLog, check: Callable[[], None]
    ) -> None:
        super().__init__(cell, name, log)
        self._check = check

    def __call__(self, *inputs: Any) -> Any:
        try:
            return super().__call__(*inputs)
        except RuntimeError as error:
            self._check()
            raise native_library.kernel_error() or error from error


class CpuLink(Link):
    def __init__(self, shared: SharedLink) -> None:
        self._shared = shared

    def send(self, array: np.ndarray) -> None:
        self._shared.send(array)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return self._shared.receive(shape, dtype)


def _notices() -> tuple[str, ...]:
    try:
        native_library.build()
    except native_library.Unavailable as why:
        return (f"MindSpore's own, so steps are slow: {why}",)
    return ()


class CpuBackend(Backend):
    name = "CPU"
    shares_memory = True

    def __init__(self, environment: dict[str, str], transport: str, compiled: bool = True) -> None:
        self._transport = transport
        self.compile_log = CompileLog()
        self.live_pools = WeakSet()
        self.world_size = int(environment.get("MS_WORKER_NUM", "1"))
        self.rank = 0
        if self.world_size > 1:
            self.rank = own_rank(environment, self.world_size)
        ms.set_context(mode=ms.GRAPH_MODE if compiled else ms.PYNATIVE_MODE)
        self._share_cores()
        ms.set_device("CPU")
        if self.world_size > 1:
            self._join(environment)
        self.health = RankHealth.of_process(self.rank, self.world_size, environment)
        self.compile_log.span = self.health.compiling
        self.kernels = self._choose_kernels(compiled)
        self.notices = _notices()
        self._host = self._make_host()
        self._groups: dict[tuple[int, ...], CpuGroup] = {}
        self._buckets: list[SharedBuckets] = []
        self._num_links: Counter[tuple[int, int]] = Counter()

    def _share_cores(self) -> None:
        """MindSpore's own threads: one that runs the graph, and others for large operations, which spin in between.

        A rank without a second core to itself has none of the others: they took a third of its time from the ranks
        beside it.
        """
        if self.world_size > 1:
            threads = max(1, num_cores() // self.world_size)
            # The names that replace these two do not accept 0.
            ms.set_context(runtime_num_threads=threads - 1, inter_op_parallel_num=1)

    @staticmethod
    def _choose_kernels(compiled: bool) -> Kernels:
        # Without a graph the gradients of parameters that only a kernel of ours sees would be lost.
        if library_path() is None or not compiled:
            from mindgrpo.backend.kernels.mindspore_ops import PlainKernels

            return PlainKernels()
        from mindgrpo.backend.kernels.native.kernels import NativeKernels

        return NativeKernels()

    def _join(self, environment: dict[str, str]) -> None:
        if needs_cluster(self.name, self._transport):
            from mindspore.communication import get_rank, init

            init("mccl")
            self.rank = get_rank()
        self._job = job_name(environment)

    def _make_host(self) -> Host:
        if self.world_size == 1:
            return Host("alone", self.rank, 1)
        spins = SPINS_WITH_A_CORE_EACH if self.world_size <= num_cores() else 0
        library = native_library.library()
        return Host(self._job, self.rank, self.world_size, library, spins, self.health)

    def group(self, ranks: Sequence[int]) -> CpuGroup:
        key = tuple(ranks)
        if key not in self._groups:
            shared, mccl = None, ""
            if len(key) > 1:
                shared = shared_group(self._host, key, GROUP_BUFFER_BYTES)
                mccl = self._mccl_group(key) if self._transport == "mccl" else ""
            self._groups[key] = CpuGroup(key, key.index(self.rank), shared, mccl)
        return self._groups[key]

    def _mccl_group(self, ranks: tuple[int, ...]) -> str:
        from mindspore.communication import GlobalComm, create_group

        if len(ranks) == self.world_size:
            return GlobalComm.WORLD_COMM_GROUP
        name = "-".join(map(str, ranks))
        create_group(name, list(ranks))
        return name

    def link(self, source: int, target: int, slot_bytes: int) -> CpuLink:
        # Both ends count alike, so that a second link between them has a name of its own.
        serial = self._num_links[source, target]
        self._num_links[source, target] += 1
        return CpuLink(SharedLink(self._host, source, target, slot_bytes, serial))

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return CpuGraph(cell, name, self.compile_log, self._host.check_failure)

    def pool(self, num_bytes: int, shared: bool = False) -> Pool:
        readable = shared and self.world_size > 1
        pool = SharedPool(num_bytes) if readable else HostPool(num_bytes)
        self.live_pools.add(pool)
        return pool

    def peer_pools(self, pool: Pool) -> Mapping[int, PeerPool] | None:
        if not isinstance(pool, SharedPool):
            return None
        addresses = self.world.gather_objects((os.getpid(), pool.descriptor, pool.num_bytes))
        peers: dict[int, PeerPool] = {}
        try:
            for rank, address in enumerate(addresses):
                if rank != self.rank:
                    peers[rank] = PeerPool(*address)
        except OSError:
            peers = {}
        complete = self.world.gather_objects(len(peers) == self.world_size - 1)
        return peers if all(complete) else None

    def host_pool(self, num_bytes: int) -> Pool:
        pool = HostPool(num_bytes)
        self.live_pools.add(pool)
        return pool

    def parameter(self, array: np.ndarray, name: str, requires_grad: bool = True) -> Parameter:
        parameter = Parameter(Tensor(np.zeros(1, np.float32)), name, requires_grad=requires_grad)
        parameter.set_data(Tensor.from_numpy(array), slice_shape=True)
        return parameter

    def transfer(
        self,
        bucket_bytes: int,
        fill: Callable[[np.ndarray], int],
        drain: Callable[[Callable[[int], np.ndarray]], None],
    ) -> None:
        buckets = self._buckets_of(bucket_bytes)
        fill(buckets.of(self.rank))
        self.world.barrier()
        drain(buckets.of)
        self.world.barrier()

    def _buckets_of(self, bucket_bytes: int) -> SharedBuckets:
        for buckets in self._buckets:
            if buckets.bucket_bytes >= bucket_bytes:
                return buckets
        made = SharedBuckets(self._host, self.world_size, bucket_bytes, len(self._buckets))
        self._buckets.append(made)
        return made

    def close(self) -> None:
        self.world.barrier()
