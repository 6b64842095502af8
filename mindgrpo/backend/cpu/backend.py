"""The CPU backend: ranks of one host communicate through shared memory, inside and outside graphs.

They do not form MindSpore's cluster, which takes seconds to join and to leave.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from mindgrpo.backend.contract import Backend, CompileLog, Graph, Group, Link, Pool
from mindgrpo.backend.cpu.host import LocalRanks, SharedLink, job_name, own_rank
from mindgrpo.backend.cpu.shared_group import shared_group
from mindgrpo.backend.dtypes import DTYPE_KEY, PRECISION_KEY, Dtype
from mindgrpo.backend.host_pool import HostPool, PeerPool, SharedPool
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.backend.targets import open_device
from mindgrpo.errors import UserError

# Larger buffers are no faster: the chunk that a group adds at a time should stay in the CPU caches.
GROUP_BUFFER_BYTES = 512 << 10
# About 50 us: longer than a message takes if every rank has a core of its own.
SPINS_WITH_A_CORE_EACH = 2000


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


class CpuGraph(Graph):
    """A graph with C kernels, which return only a status: raises the error that they recorded.

    If a peer's death is the cause, `computing` raises PeerLost instead.
    """

    def __init__(
        self,
        cell: Callable[..., Any],
        name: str,
        log: CompileLog,
        computing: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(cell, name, log)
        self._computing = computing

    def __call__(self, *inputs: Any) -> Any:
        with self._computing():
            try:
                return super().__call__(*inputs)
            except RuntimeError as error:
                raise native_library.kernel_error() or error from error


class CpuLink(Link):
    """A link with one ring buffer per direction, so that a sender can run ahead of its receiver.

    An incoming tensor is read on request, or earlier to free its slot, so that the n-th exchange never waits for a
    later exchange of the other end.
    """

    def __init__(self, outgoing: SharedLink, incoming: SharedLink) -> None:
        self._outgoing, self._incoming = outgoing, incoming
        # (exchange number, shape) of unread tensors, and by exchange number tensors that were read but not requested.
        self._unread: deque[tuple[int, Sequence[int]]] = deque()
        self._read: dict[int, Tensor] = {}
        self._count = 0

    def exchange(
        self, outgoing: Any | None, receives: Sequence[int] | None
    ) -> Callable[[], Tensor | None]:
        take: Callable[[], Tensor | None] = nothing
        # Must come before the send, or both ends could wait for a free slot of the other.
        if receives is not None:
            take = partial(self._take, self._count)
            self._unread.append((self._count, receives))
            self._count += 1
            if len(self._unread) > SharedLink.SLOTS:
                self._read_next()
        if outgoing is not None:
            self._outgoing.send(outgoing.asnumpy())
        return take

    def _read_next(self) -> None:
        number, shape = self._unread.popleft()
        self._read[number] = Tensor.from_numpy(self._incoming.receive(shape, np.float32))

    def _take(self, number: int) -> Tensor:
        while number not in self._read:
            self._read_next()
        return self._read.pop(number)


def nothing() -> None:
    """Stands for the result of an exchange that receives nothing."""


def _notices() -> tuple[str, ...]:
    try:
        native_library.build()
    except native_library.Unavailable as why:
        return (f"MindSpore's own, so steps are slow: {why}",)
    return ()


class CpuBackend(Backend):
    name = "CPU"
    shares_memory = True

    def __init__(
        self,
        environment: dict[str, str],
        compiled: bool = True,
        num_parts: int | None = None,
        is_narrow: bool = False,
    ) -> None:
        """Passes `num_parts` and `is_narrow` on to NativeKernels."""
        self.world_size = int(environment.get("MS_WORKER_NUM", "1"))
        self.rank = own_rank(environment, self.world_size) if self.world_size > 1 else 0
        ms.set_context(mode=ms.GRAPH_MODE if compiled else ms.PYNATIVE_MODE)
        self._cores = os.sched_getaffinity(0)
        self._own_core = self._choose_core()
        self._share_cores()
        open_device("CPU")
        self._set_up(environment)
        self.kernels = self._choose_kernels(compiled, num_parts, is_narrow)
        self.notices = _notices()
        self._host = self._make_host(environment)
        self._num_links: Counter[int] = Counter()

    def _choose_core(self) -> set[int]:
        """Returns the core to pin this rank to if ranks outnumber cores evenly (world size a multiple); else none."""
        cores = sorted(self._cores)
        is_shared = self.world_size > len(cores) and self.world_size % len(cores) == 0
        return {cores[self.rank % len(cores)]} if is_shared else set()

    def _share_cores(self) -> None:
        """Limits MindSpore's thread pool, whose threads spin between operations, to this rank's share of the cores.

        A rank without a second core of its own gets only the thread that runs the graph: spinning threads took a third
        of the time of neighbouring ranks.
        """
        if self.world_size > 1:
            threads = max(1, num_cores() // self.world_size)
            # The names that replace these two do not accept 0.
            ms.set_context(runtime_num_threads=threads - 1, inter_op_parallel_num=1)

    @staticmethod
    def _choose_kernels(compiled: bool, num_parts: int | None, is_narrow: bool) -> Kernels:
        if num_parts is not None and library_path() is None:
            raise UserError(
                f"{PRECISION_KEY} high and medium, and {DTYPE_KEY} bfloat16, need the C kernels: {_notices()[0]}; or "
                "set them to highest and float32."
            )
        # In eager mode, gradients of parameters that only our kernels read would be lost.
        if library_path() is None or not compiled:
            return Kernels()
        from mindgrpo.backend.kernels.native.kernels import NativeKernels

        return NativeKernels(num_parts, is_narrow)

    def _make_host(self, environment: dict[str, str]) -> LocalRanks:
        if self.world_size == 1:
            return LocalRanks("alone", self.rank, 1)
        spins = SPINS_WITH_A_CORE_EACH if self.world_size <= num_cores() else 0
        library = native_library.library()
        return LocalRanks(
            job_name(environment), self.rank, self.world_size, library, spins, self.health
        )

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return shared_group(self._host, ranks, GROUP_BUFFER_BYTES)

    def link(self, peer: int, shape: Sequence[int]) -> CpuLink:
        # Both ends count their links, so that each link between the same two ranks has a unique name.
        serial = self._num_links[peer]
        self._num_links[peer] += 1
        slot_bytes = 4 * int(np.prod(shape))

        def ring(source: int, target: int) -> SharedLink:
            return SharedLink(self._host, source, target, slot_bytes, serial)

        low, high = sorted((self.rank, peer))
        # Both ends must make the two rings in the same order, or they deadlock.
        down, up = ring(low, high), ring(high, low)
        outgoing, incoming = (down, up) if self.rank == low else (up, down)
        return CpuLink(outgoing, incoming)

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return CpuGraph(cell, name, self.compile_log, self.computing)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Pins this process to the rank's own core, if it has one, and restores all cores on exit.

        Ranks that wait for each other in every layer slow down if the scheduler puts three on one core and one on
        another. Outside, this process and programs that it starts may use all cores.
        """
        moves = bool(self._own_core) and os.sched_getaffinity(0) != self._own_core
        if moves:
            os.sched_setaffinity(0, self._own_core)
        try:
            with self._host.naming_the_lost():
                yield
        finally:
            if moves:
                os.sched_setaffinity(0, self._cores)

    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        return self.host_pool(size, shared and self.world_size > 1, dtype)

    def peer_pools(self, pool: Pool) -> Mapping[int, PeerPool]:
        if self.world_size == 1:
            return {}
        if not isinstance(pool, SharedPool):
            raise ValueError("other ranks can only read a pool that was made to be shared")
        own = (os.getpid(), pool.descriptor, pool.num_bytes, pool.dtype)
        addresses = self.world.gather_objects(own)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return {rank: PeerPool(*addresses[rank]) for rank in others}

    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> HostPool:
        pool = SharedPool(size, dtype) if shared else HostPool(size, dtype)
        self.live_pools.add(pool)
        return pool
