"""CPU: MindSpore's own kernels, ranks of one host joined by msrun, shared memory between and inside graphs.

`transport: mccl` sums inside graphs with MindSpore's AllReduce instead, the portable reference that the shared
memory is held equal to; between graphs ranks of one host always use shared memory, and where nothing else is
used they never form MindSpore's cluster, which takes seconds to join and to leave. Refuses several hosts.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.backend import Backend, Group, Link, Pool, needs_cluster
from mindgrpo.backend.graph import CompileLog
from mindgrpo.backend.host_pool import HostPool
from mindgrpo.backend.kernels import Kernels
from mindgrpo.backend.native_library import library_path
from mindgrpo.backend.shared_memory import Peers, SharedBuckets, SharedGroup, SharedLink
from mindgrpo.errors import UserError

GROUP_BUFFER_BYTES = 2 << 20


def _same(x: Any) -> Any:
    return x


class _Alone(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x


class _SharedSum(nn.Cell):
    """The group's sum inside a graph, through a Python call on numpy arrays."""

    def __init__(self, group: SharedGroup) -> None:
        super().__init__()

        def call(x: np.ndarray) -> np.ndarray:
            source = np.ascontiguousarray(x)
            out = np.empty_like(source)
            group.sum_into(source.reshape(-1), out.reshape(-1))
            return out

        self.call = ops.Custom(call, out_shape=_same, out_dtype=_same, func_type="pyfunc")

    def construct(self, x: Any) -> Any:
        return self.call(x)


class _MindSporeSum(nn.Cell):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.call = ops.AllReduce(ops.ReduceOp.SUM, name)

    def construct(self, x: Any) -> Any:
        return self.call(x)


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
            return _Alone()
        return _MindSporeSum(self._mccl) if self._mccl else _SharedSum(self._shared)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        if self._shared is not None:
            flat = array.reshape(-1)
            self._shared.sum_into(flat, flat)
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        return [value] if self._shared is None else self._shared.gather_objects(value)

    def barrier(self) -> None:
        if self._shared is not None:
            self._shared.barrier()


class CpuLink(Link):
    def __init__(self, shared: SharedLink) -> None:
        self._shared = shared

    def send(self, array: np.ndarray) -> None:
        self._shared.send(array)

    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return self._shared.receive(shape, dtype)


def _rank_told(environment: dict[str, str]) -> int:
    told = environment.get("RANK_ID", "")
    if not told.isdecimal():
        raise UserError(
            f"RANK_ID is '{told}', but must be this process's number among MS_WORKER_NUM="
            f"{environment['MS_WORKER_NUM']}; start the ranks with msrun, which sets both."
        )
    return int(told)


class CpuBackend(Backend):
    name = "CPU"
    shares_memory = True

    def __init__(self, environment: dict[str, str], transport: str) -> None:
        self._transport = transport
        self.compile_log = CompileLog()
        self.world_size = int(environment.get("MS_WORKER_NUM", "1"))
        self.rank = 0
        ms.set_context(mode=ms.GRAPH_MODE)
        ms.set_device("CPU")
        if self.world_size > 1:
            self._join(environment)
        self.kernels = self._choose_kernels()
        self._peers = Peers()
        self._groups: dict[tuple[int, ...], CpuGroup] = {}
        self._buckets: list[SharedBuckets] = []
        self._num_links: Counter[tuple[int, int]] = Counter()

    @staticmethod
    def _choose_kernels() -> Kernels:
        if library_path() is None:
            from mindgrpo.backend.plain_kernels import PlainKernels

            return PlainKernels()
        from mindgrpo.backend.native_kernels import NativeKernels

        return NativeKernels()

    def _join(self, environment: dict[str, str]) -> None:
        local = int(environment.get("MS_LOCAL_WORKER_NUM", self.world_size))
        if local != self.world_size:
            raise UserError(
                f"msrun was started with --worker_num={self.world_size} and --local_worker_num={local}, but ranks "
                "on this device must share one host; start all of them here."
            )
        if not needs_cluster(self.name, self._transport):
            self.rank = _rank_told(environment)
        else:
            from mindspore.communication import get_rank, init

            init("mccl")
            self.rank = get_rank()
        # Every rank of one msrun has the same parent, and two runs never share parent and port.
        self._job = f"{os.getppid()}-{environment.get('MS_SCHED_PORT', '0')}"

    def group(self, ranks: Sequence[int]) -> CpuGroup:
        key = tuple(ranks)
        if key not in self._groups:
            shared, mccl = None, ""
            if len(key) > 1:
                shared = SharedGroup(self._job, self.rank, key, GROUP_BUFFER_BYTES, self._peers)
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
        shared = SharedLink(self._job, self.rank, source, target, slot_bytes, serial, self._peers)
        return CpuLink(shared)

    def pool(self, num_bytes: int) -> Pool:
        return HostPool(num_bytes)

    def parameter(self, array: np.ndarray, name: str, requires_grad: bool = True) -> Parameter:
        parameter = Parameter(Tensor(np.zeros(1, np.float32)), name, requires_grad=requires_grad)
        parameter.set_data(Tensor.from_numpy(array), slice_shape=True)
        return parameter

    def transfer(
        self,
        bucket_bytes: int,
        fill: Callable[[np.ndarray], None],
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
        serial = len(self._buckets)
        self._buckets.append(
            SharedBuckets(self._job, self.rank, self.world_size, bucket_bytes, serial, self._peers)
        )
        return self._buckets[-1]

    def close(self) -> None:
        self.world.barrier()
