"""The backend interface: process groups, point-to-point links, memory pools and compiled graphs of one rank.

A backend implements these classes. They deal with ranks, arrays and bytes only, never with models, samples or phases.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, MatmulPrecision
from mindgrpo.backend.host_memory import SparePages
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.health.rank_health import RankHealth

# The graph of one decode step, which generates one token for every slot.
DECODE = "decode"
# In both of these phases MindSpore runs the compiled graph named in `phase_cache` instead of looking it up by its
# inputs. Only the phase of decoding may have its kernel launches captured: capture rejects graphs with several streams,
# such as all others.
PHASES = {DECODE: "increment"}
OTHER_PHASE = "prefill"


# (start, stop, member): elements [start, stop) of a flat array belong to the member with this index in the group.
Share = tuple[int, int, int]


class PeerLost(RuntimeError):
    """Raised when a rank that this one waits for has ended."""

    # Never the root cause of a job's failure: see health/failure.py.
    is_consequence = True


class Group(ABC):
    """A communication group: an ordered set of ranks, which all have to make the same calls in the same order."""

    ranks: tuple[int, ...]
    index: int
    # The handle that C kernels look the group up by (native/collective.h); -1 if they do not use it.
    kernel_id: int = -1

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def sum_cell(self) -> nn.Cell:
        """Makes an all-reduce (sum) cell for graphs: [...] -> [...], with bitwise identical results on every member.

        Gradients of replicated weights need this one, since transports may add in a different order on each member.
        """

    def quick_sum_cell(self) -> nn.Cell:
        """Makes an all-reduce (sum) cell in a single transfer if possible; last bits may differ between members."""
        return self.sum_cell()

    @abstractmethod
    def gather_cell(self) -> nn.Cell:
        """Makes an all-gather cell for graphs: floats [...] -> [size, ...], with the tensor of member i at [i]."""

    @abstractmethod
    def scatter_sum_cell(self) -> nn.Cell:
        """Makes a reduce-scatter (sum) cell for graphs: [size, ...] -> [...], the sum of all members' [index].

        Adds in the same order as sum_cell, and transfers half as much.
        """

    @abstractmethod
    def exchange_cell(self) -> nn.Cell:
        """Makes an all-to-all cell for graphs: [size, ...] -> [size, ...], with member i's entry [index] at [i]."""

    @abstractmethod
    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """All-reduces (sums) `array` [...] in place, outside graphs; every member adds in the same order."""

    def sum_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        """Reduce-scatters (sums) `array` [n] in place: each member gets the sums of its own shares only.

        Adds in the same order as sum_array, and leaves all other elements unchanged.
        """
        total = self.sum_array(array.copy())
        for start, stop, member in shares:
            if member == self.index:
                array[start:stop] = total[start:stop]

    def gather_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        """All-gathers `array` [n] in place, outside graphs: overwrites each share with the values of its owner."""
        own = [array[start:stop] for start, stop, member in shares if member == self.index]
        arrived = [iter(arrays) for arrays in self.gather_objects(own)]
        for start, stop, member in shares:
            array[start:stop] = next(arrived[member])

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """All-gathers picklable objects: returns every member's `value`, in the order of `ranks`."""

    def exchange_bytes(self, parcels: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All-to-all of byte arrays, outside graphs: sends `parcels[i]`, uint8 [n], to member i.

        Returns the parcels that the members sent to this one, in the order of `ranks`. This default gathers all parcels
        on all members; transports override it to deliver only what is addressed to a member.
        """
        return [own[self.index] for own in self.gather_objects(list(parcels))]

    @abstractmethod
    def barrier(self) -> None: ...


class _AloneSame(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x


class _AloneGather(nn.Cell):
    def construct(self, x: Any) -> Any:
        return ops.expand_dims(x, 0)


class _AloneScatter(nn.Cell):
    def construct(self, x: Any) -> Any:
        return x[0]


class AloneGroup(Group):
    """A group of one rank, whose collectives do not communicate."""

    def __init__(self, rank: int) -> None:
        self.ranks, self.index = (rank,), 0

    def sum_cell(self) -> nn.Cell:
        return _AloneSame()

    def gather_cell(self) -> nn.Cell:
        return _AloneGather()

    def scatter_sum_cell(self) -> nn.Cell:
        return _AloneScatter()

    def exchange_cell(self) -> nn.Cell:
        return _AloneSame()

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return array

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def barrier(self) -> None:
        """Does nothing: there is nobody to wait for."""


class Link(ABC):
    """A point-to-point channel between two neighbouring pipeline stages, for tensors of one dtype."""

    @abstractmethod
    def exchange(
        self, outgoing: Any | None, receives: Sequence[int] | None
    ) -> Callable[[], Any | None]:
        """Sends the tensor `outgoing`, if any, and starts to receive a tensor of shape `receives`, if any.

        Returns a function that waits for the received tensor and returns it, or None if nothing is received. Both ends
        must make matching calls in the same order, and a call may block until the other end makes its own. Call each
        returned function once, in any order.
        """


class HostArrays(Protocol):
    """Host memory that can be viewed as arrays."""

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        """Returns a view of `shape`, in the memory's dtype, that starts `offset` elements into it."""


class ReleasedMemory(RuntimeError):
    """Raised when a role is used whose pool is not on the device."""


class Pool(ABC):
    """Device memory of one role, which can be offloaded to the host.

    `offload` moves the contents to the host and `load` moves them back. `release` frees the device memory and discards
    its contents, so that the next `load` yields zeros. Graphs must not use parameters of a pool that is not on the
    device.
    """

    num_bytes: int
    dtype: Dtype
    # Whether device memory is host memory, so that reading it on the host needs no copy.
    is_host_memory: bool

    @abstractmethod
    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Any:
        """Makes a Parameter of `shape` and the pool's dtype, stored `offset` elements into the pool.

        Raises ValueError if the range already has a parameter: two parameters on one range could get out of sync.
        """

    @abstractmethod
    def on_host(self, write: bool = False) -> AbstractContextManager[HostArrays]:
        """Yields the pool's contents as host arrays; with `write`, copies changes back to the device on exit."""

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    def require(self, user: str) -> None:
        """Raises ReleasedMemory, naming `user`, unless the pool is on the device. Does nothing for host memory."""
        return None

    @abstractmethod
    def offload(self) -> None: ...

    @abstractmethod
    def load(self) -> None:
        """Moves the pool to the device; does nothing if it is there already."""

    @abstractmethod
    def release(self) -> None: ...

    def take_turns(self, spare: SparePages, is_empty: bool) -> None:
        """Makes the pool take its pages from `spare` and return them to it, shared with pools loaded at other times.

        `is_empty`: nothing has been written to the pool yet.
        """
        return None


class PeerView(HostArrays, Protocol):
    """A read-only view of another rank's pool."""

    num_bytes: int

    def forget(self) -> None:
        """Drops the pages read so far from this process's resident memory."""


class Backend(ABC):
    """Gives a rank access to its device and to the other ranks."""

    name: str
    rank: int
    world_size: int
    compile_log: CompileLog
    # Context manager that marks a named part of a phase in profiles.
    span: Callable[[str], AbstractContextManager[None]]
    # All pools that were created and still exist.
    live_pools: WeakSet[Pool]
    # The progress of this rank and of the others.
    health: RankHealth
    # Notes for the user on how this device computes.
    notices: tuple[str, ...] = ()
    # Whether device memory is host memory that ranks can read from each other.
    shares_memory: bool
    # Bytes of pools and activations copied between device and host since the start; inputs of graphs, such as token
    # ids, do not count.
    host_device_bytes = 0
    # Size of the bucket in which weight sync sends and receives weights.
    bucket_bytes = 256 << 20
    # Capacity of the device; None if it has no limit of its own.
    device_memory_bytes: int | None = None
    kernels: Kernels
    # How float32 GEMMs are computed (dtypes.py).
    matmul_precision: MatmulPrecision = "highest"
    # Of weights in graphs, of the KV cache, and of activations if the device has kernels for it.
    compute_dtype: Dtype = "float32"
    # Whether all-reduces inside graphs add in float32 even if activations are narrower.
    sums_in_float32 = False
    # Requested features that the device lacks, one sentence each.
    unmet: Sequence[str] = ()
    has_device_profile: bool = False

    def _set_up(self, environment: dict[str, str]) -> None:
        """Initializes the attributes common to all backends; call it with `rank` and `world_size` set, device open."""
        self.compile_log, self.live_pools = CompileLog(), WeakSet()
        self.span = lambda name: nullcontext()
        self.health = RankHealth.of_process(self.rank, self.world_size, environment)
        self.compile_log.span = self.health.compiling
        self._groups: dict[tuple[int, ...], Group] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """Returns the group of exactly these ranks. It is created on first use, by all its members together."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._make_group(key) if len(key) > 1 else AloneGroup(self.rank)
        return self._groups[key]

    @abstractmethod
    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        """Creates a group of two or more ranks."""

    @abstractmethod
    def link(self, peer: int, shape: Sequence[int]) -> Link:
        """Makes the link to rank `peer` for tensors of at most `shape`; both ends must make links in the same order."""

    @abstractmethod
    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        """Makes a device pool of `size` elements. `shared`: other ranks may read it (`peer_pools`)."""

    def peer_pools(self, pool: Pool) -> Mapping[int, PeerView]:
        """Collective call: returns the pools that the other ranks passed to it, by rank, for reading in place.

        Raises NotImplementedError unless the backend `shares_memory`.
        """
        raise NotImplementedError

    def exchange(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        """Sends the tensors `sends[rank]` to each rank and receives into the tensors `receives[rank]`, in their order.

        One batch of device-to-device point-to-point transfers. All tensors are contiguous, and the peers make matching
        calls. Raises NotImplementedError if the backend `shares_memory`, since ranks then read each other's pools.
        """
        raise NotImplementedError

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Any:
        """Returns a zero tensor in device memory. Raises NotImplementedError if device memory is host memory."""
        raise NotImplementedError

    @abstractmethod
    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        """Makes a pool of `size` elements in host memory, on any device; graphs do not use it.

        `shared`: other processes can read it, through its file `descriptor`.
        """

    def synchronize(self) -> None:
        """Waits for operations that were launched outside graphs, which the next graph would not wait for.

        Call it after the last operation that writes parameters. Does nothing on devices without such operations.
        """
        return None

    def take_device_peak(self) -> int | None:
        """Returns the peak of allocated device bytes since the last call, or None if the device does not report it."""
        return None

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return Graph(cell, name, self.compile_log)

    def devices_of(self, ranks: Sequence[int]) -> Mapping[str, str]:
        """Returns the environment variables that make only the devices of `ranks` visible to a program on this host.

        Empty on CPU. Raises UserError for ranks on several hosts.
        """
        return {}

    def make_room(self) -> None:
        """Returns cached, unused device memory to the system, for use by other programs."""
        return None

    def computing(self) -> AbstractContextManager[None]:
        """Context manager for a phase of work, or for kernels called outside graphs; can be nested.

        Replaces a RuntimeError by PeerLost if another rank's death is its cause.
        """
        return nullcontext()

    def device_profile(
        self, folder: Path, settings: ProfileSettings
    ) -> AbstractContextManager[None]:
        """Records the enclosed code with the device's profiler and writes to `folder`; no-op without a profiler."""
        return nullcontext()

    def device_mark(self, name: str) -> AbstractContextManager[None]:
        """Marks the enclosed code as a range in the device's profile; no-op without a profiler."""
        return nullcontext()

    @property
    def world(self) -> Group:
        return self.group(range(self.world_size))

    def close(self) -> None:
        """Waits for all ranks, since others may still need this one."""
        self.world.barrier()


@dataclass(frozen=True)
class ProfileSettings:
    """Settings of the device profiler. `level` is none, 0, 1 or 2; without `with_device`, only the host is profiled."""

    level: str
    with_device: bool
    with_host: bool
    with_memory: bool
    with_stack: bool
    analyse: bool
    marks: bool


class CompileLog:
    """Records (graph name, seconds of its first call) for each compilation, in order.

    `listener` is called when a compilation starts and when it ends, and `span` surrounds it. Nothing is reported if
    graphs are not compiled at all (`compiles` False).
    """

    compiles = True

    def __init__(self) -> None:
        self.entries: list[tuple[str, float]] = []
        self.listener: Callable[[str, float | None], None] | None = None
        self.span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        if not self.compiles:
            return call()
        if self.listener:
            self.listener(name, None)
        started = time.perf_counter()
        with self.span(name):
            result = call()
        seconds = time.perf_counter() - started
        self.entries.append((name, seconds))
        if self.listener:
            self.listener(name, seconds)
        return result


class Graph:
    """A cell that is compiled once per combination of input shapes and dtypes.

    Inputs are tensors or mutable numbers. MindSpore would bake any other number, or a tuple of numbers, into the graph
    as a constant of the first call.
    """

    def __init__(self, cell: Callable[..., Any], name: str, log: CompileLog) -> None:
        self._cell, self._name, self._log = cell, name, log
        # By input shapes: MindSpore's names of the compiled graphs, and which inputs are mutable.
        self._compiled: dict[tuple[Any, ...], tuple[dict[str, str], Any]] = {}
        self._names: dict[str, str] = {}
        if isinstance(cell, nn.Cell):
            cell.phase, self._names = PHASES.get(name, OTHER_PHASE), cell.phase_cache

    def __call__(self, *inputs: Any) -> Any:
        shapes = tuple(
            (tuple(x.shape), str(x.dtype)) if isinstance(x, Tensor) else type(x) for x in inputs
        )
        cell: Any = self._cell
        if shapes in self._compiled:
            names, are_mutable = self._compiled[shapes]
            self._names |= names
            if are_mutable is not None:
                # Otherwise the flags are those of the last compilation, and MindSpore drops inputs beyond their number.
                cell._has_mutable_args_list = are_mutable
            return cell(*inputs)
        self._names.clear()
        result = self._log.run(self._name, lambda: cell(*inputs))
        self._compiled[shapes] = dict(self._names), getattr(cell, "_has_mutable_args_list", None)
        return result
