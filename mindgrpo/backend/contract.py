"""Declares what one rank asks of its device and of the other ranks: groups, links, pools of memory, graphs.

A backend implements these classes. They speak of ranks, arrays and bytes only: no model, sample or phase is known here.
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

# The graph that makes a token of every slot.
DECODE = "decode"
# In both phases MindSpore runs the compiled graph that `phase_cache` names, and does not look for it by the inputs. In
# that of decoding a device may launch kernels in other ways, and then refuses graphs of several streams, as others are.
PHASES = {DECODE: "increment"}
OTHER_PHASE = "prefill"


# Elements [start, stop) of an array, and whose they are: an index in a group.
Share = tuple[int, int, int]


class PeerLost(RuntimeError):
    """A rank that this one waits for has ended."""

    # Never why a job ended: see health/failure.py.
    is_consequence = True


class Group(ABC):
    """An ordered set of ranks that act together; every member makes the same calls in the same order."""

    ranks: tuple[int, ...]
    index: int
    # By which C kernels find it (native/collective.h); -1 where they have no need to, or cannot.
    kernel_id: int = -1

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def sum_cell(self) -> nn.Cell:
        """Makes a cell for graphs: tensor -> the sum over the group, the same bits on every member.

        What reaches weights that several members hold has to be such a sum, in whatever order a transport adds.
        """

    def quick_sum_cell(self) -> nn.Cell:
        """Makes a cell as sum_cell, in one transfer where that is possible; last bits may differ between members."""
        return self.sum_cell()

    @abstractmethod
    def gather_cell(self) -> nn.Cell:
        """Makes a cell for graphs: floats [...] -> [size, ...], member i's at [i], the same on every member."""

    @abstractmethod
    def scatter_sum_cell(self) -> nn.Cell:
        """Makes a cell for graphs: [size, ...] -> [...], the sum over the group of what each has for this member.

        Adds in the order of sum_cell, of whose transfer it is half.
        """

    @abstractmethod
    def exchange_cell(self) -> nn.Cell:
        """Makes a cell for graphs: [size, ...] -> [size, ...], what member i has at this one's index at [i]."""

    @abstractmethod
    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Sums `array` over the group, in place and between graphs; adds in rank order on every member."""

    def sum_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        """Sums `array` [n] as sum_array does, of which each member gets its own shares; elsewhere it stays as it is."""
        total = self.sum_array(array.copy())
        for start, stop, member in shares:
            if member == self.index:
                array[start:stop] = total[start:stop]

    def gather_shares(self, array: np.ndarray, shares: Sequence[Share]) -> None:
        """Gives every member each share as the one has it whose own it is, in place and between graphs."""
        own = [array[start:stop] for start, stop, member in shares if member == self.index]
        arrived = [iter(arrays) for arrays in self.gather_objects(own)]
        for start, stop, member in shares:
            array[start:stop] = next(arrived[member])

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every member's `value`, in the order of `ranks`."""

    def exchange_bytes(self, parcels: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives member i the bytes `parcels[i]` uint8 [n], and returns what each member has for this one.

        Between graphs. Transports bring a member nothing that is for another; here all get all.
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
    """One rank, which communicates with nobody."""

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
    """Two neighbours of a pipeline, which hand tensors of one dtype to each other."""

    @abstractmethod
    def exchange(
        self, outgoing: Any | None, receives: Sequence[int] | None
    ) -> Callable[[], Any | None]:
        """Sends the tensor `outgoing`, and returns what waits for the neighbour's, of shape `receives`, and returns it.

        Each where there is one. Both ends make the matching calls in one order: a call may block until the other end
        makes its own. What is returned is called once, in any order.
        """


class HostArrays(Protocol):
    """Host memory as arrays."""

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        """Returns an array [shape], in the memory's dtype, starting `offset` elements into it."""


class ReleasedMemory(RuntimeError):
    """A role was used whose pool is not on the device."""


class Pool(ABC):
    """One role's memory on the device, and its copy on the host.

    `offload` moves the bytes to the host; `load` brings them back, or gives zeros after `release`, which gives the
    device's bytes up without keeping them. A graph must not use parameters of a pool that is not on the device.
    """

    num_bytes: int
    dtype: Dtype
    # Whether the device's memory is the host's own, so that reading it on the host copies nothing.
    is_host_memory: bool

    @abstractmethod
    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> Any:
        """Makes a Parameter [shape] of the pool's dtype, `offset` elements into the pool; one for each range.

        Raises ValueError for a range that has a parameter already: with two, each could hold other values.
        """

    @abstractmethod
    def on_host(self, write: bool = False) -> AbstractContextManager[HostArrays]:
        """Yields the pool's bytes as arrays of the host; with `write`, what was written then goes to the device."""

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    def require(self, user: str) -> None:
        """Raises ReleasedMemory unless the pool is on the device; nothing to do where that is the host's memory."""
        return None

    @abstractmethod
    def offload(self) -> None: ...

    @abstractmethod
    def load(self) -> None:
        """Brings the pool to the device; does nothing if it is there already."""

    @abstractmethod
    def release(self) -> None: ...

    def take_turns(self, spare: SparePages, is_empty: bool) -> None:
        """Lets pools that are on the device at other times reuse the memory that this one gives up.

        `is_empty` says that nothing has been written to it yet.
        """
        return None


class PeerView(HostArrays, Protocol):
    """Another rank's pool, read only."""

    num_bytes: int

    def forget(self) -> None:
        """Drops what was read from this process's memory."""


class Backend(ABC):
    """Offers one rank its device and the other ranks."""

    name: str
    rank: int
    world_size: int
    compile_log: CompileLog
    # Surrounds parts of a phase, by name, that a profile shows.
    span: Callable[[str], AbstractContextManager[None]]
    # Every pool that was handed out and still exists.
    live_pools: WeakSet[Pool]
    # Where this rank is, and where the others are.
    health: RankHealth
    # Notes for the user on how this device computes.
    notices: tuple[str, ...] = ()
    # True where the device's memory is the host's own, and ranks read each other's.
    shares_memory: bool
    # Bytes of pools and activations that passed between device and host since the start; inputs of graphs, such as
    # token ids, are left out.
    host_device_bytes = 0
    # Of weights that a rank sends to others, and receives, at a time.
    bucket_bytes = 256 << 20
    # Of the device; None where it has no limit of its own.
    device_memory_bytes: int | None = None
    kernels: Kernels
    # In what products of float32 matrices are computed (dtypes.py).
    matmul_precision: MatmulPrecision = "highest"
    # Of weights in graphs, of activations where the device has kernels for it, and of the generator's cache.
    compute_dtype: Dtype = "float32"
    # Whether sums over ranks inside graphs are float32 where activations are narrower.
    sums_in_float32 = False
    # What was asked of the device that it does not have, a sentence each.
    unmet: Sequence[str] = ()
    has_device_profile: bool = False

    def _set_up(self, environment: dict[str, str]) -> None:
        """Sets up what all backends have, once `rank` and `world_size` are known and the device is open."""
        self.compile_log, self.live_pools = CompileLog(), WeakSet()
        self.span = lambda name: nullcontext()
        self.health = RankHealth.of_process(self.rank, self.world_size, environment)
        self.compile_log.span = self.health.compiling
        self._groups: dict[tuple[int, ...], Group] = {}

    def group(self, ranks: Sequence[int]) -> Group:
        """Returns the group of exactly these ranks; made on first use, by all its members alike."""
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._make_group(key) if len(key) > 1 else AloneGroup(self.rank)
        return self._groups[key]

    @abstractmethod
    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        """Makes the group of several ranks."""

    @abstractmethod
    def link(self, peer: int, shape: Sequence[int]) -> Link:
        """Makes the link to neighbour `peer`, for tensors of at most `shape`; both ends make links in one order."""

    @abstractmethod
    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        """Makes a pool of `size` elements. `shared`: other ranks may want to read it (`peer_pools`)."""

    def peer_pools(self, pool: Pool) -> Mapping[int, PeerView]:
        """Returns the pools that other ranks passed to this call, by rank, to be read in place; all ranks together.

        Raises NotImplementedError unless the backend `shares_memory`.
        """
        raise NotImplementedError

    def exchange(
        self, sends: Mapping[int, Sequence[Any]], receives: Mapping[int, Sequence[Any]]
    ) -> None:
        """Sends tensors to ranks, and fills those of the ranks in `receives` with what these send, in their order.

        Device to device, as one; all are contiguous, and the ranks named make matching calls. Raises
        NotImplementedError where the backend `shares_memory`: there ranks read each other's pools.
        """
        raise NotImplementedError

    def zeros(self, shape: Sequence[int], dtype: Dtype) -> Any:
        """Returns a tensor in memory of the device. Raises NotImplementedError where that is the host's."""
        raise NotImplementedError

    @abstractmethod
    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> Pool:
        """Makes a pool of the host's memory, of `size` elements, on any device, that no graph works on.

        `shared`: other processes can read it, through its `descriptor`.
        """

    def synchronize(self) -> None:
        """Waits for single operations on the device, made outside of graphs: the next graph does not wait for them.

        Who writes parameters with them calls this after the last. Nothing to do where there are none.
        """
        return None

    def take_device_peak(self) -> int | None:
        """Returns the most bytes allocated on the device at a time since the last call; None if it does not count."""
        return None

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return Graph(cell, name, self.compile_log)

    def devices_of(self, ranks: Sequence[int]) -> Mapping[str, str]:
        """Returns the variables with which another program of this host sees the devices of `ranks` alone.

        None where processors compute. Raises UserError for ranks of several hosts.
        """
        return {}

    def make_room(self) -> None:
        """Gives memory of the device that is kept for later use to other programs."""
        return None

    def computing(self) -> AbstractContextManager[None]:
        """Surrounds a phase of work, or kernels that are called outside of graphs; may be nested.

        Raises PeerLost in place of a RuntimeError where the end of a rank is why something failed.
        """
        return nullcontext()

    def device_profile(
        self, folder: Path, settings: ProfileSettings
    ) -> AbstractContextManager[None]:
        """Writes the device's own profile of what runs inside into `folder`, where it has one."""
        return nullcontext()

    def device_mark(self, name: str) -> AbstractContextManager[None]:
        """Marks what runs inside as a range in the device's own profile, where it has one."""
        return nullcontext()

    @property
    def world(self) -> Group:
        return self.group(range(self.world_size))

    def close(self) -> None:
        """Waits for all ranks: until then, others may need this one."""
        self.world.barrier()


@dataclass(frozen=True)
class ProfileSettings:
    """`level` is none, 0, 1 or 2; `with_device` off leaves the host's part alone."""

    level: str
    with_device: bool
    with_host: bool
    with_memory: bool
    with_stack: bool
    analyse: bool
    marks: bool


class CompileLog:
    """(graph's name, seconds of its first call) in order; `listener` hears of each when it starts and ends.

    `span` surrounds each. Where graphs are not compiled at all (`compiles` False), nothing is reported.
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
    """A cell that is compiled once a shape.

    Inputs are tensors, or numbers that are mutable: with others, and with those in a tuple, MindSpore would compute for
    ever as in the first call.
    """

    def __init__(self, cell: Callable[..., Any], name: str, log: CompileLog) -> None:
        self._cell, self._name, self._log = cell, name, log
        # MindSpore's names of the graphs by their inputs' shapes, and which of these inputs are mutable.
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
                # Of the last compilation otherwise, and of more inputs than it had MindSpore drops the rest.
                cell._has_mutable_args_list = are_mutable
            return cell(*inputs)
        self._names.clear()
        result = self._log.run(self._name, lambda: cell(*inputs))
        self._compiled[shapes] = dict(self._names), getattr(cell, "_has_mutable_args_list", None)
        return result
