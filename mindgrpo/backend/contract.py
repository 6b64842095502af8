"""What one rank asks of its device and of the other ranks: groups, links, pools of memory, graphs.

A backend implements these classes. They speak of ranks, arrays and bytes only: no model, sample or phase is known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np

from mindgrpo.backend.graph import CompileLog, Graph
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.profile import ProfileSettings
from mindgrpo.health.rank_health import RankHealth

if TYPE_CHECKING:
    from mindspore import nn


class PeerLost(RuntimeError):
    """A rank that this one waits for has ended."""

    # Never why a job ended: see health/failure.py.
    is_consequence = True


class Group(ABC):
    """An ordered set of ranks that act together; every member makes the same calls in the same order."""

    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)

    @abstractmethod
    def sum_cell(self) -> nn.Cell:
        """A cell for use inside graphs: tensor -> the sum over the group, the same bits on every member."""

    @abstractmethod
    def gather_cell(self) -> nn.Cell:
        """A cell for use inside graphs: float32 [...] -> [size, ...], member i's at [i], the same on every member."""

    @abstractmethod
    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """Sum `array` over the group, in place and between graphs; adds in rank order on every member."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Every member's `value`, in the order of `ranks`."""

    @abstractmethod
    def barrier(self) -> None: ...


class Link(ABC):
    """One direction between two ranks, in order; holds a few arrays so that the sender runs ahead."""

    @abstractmethod
    def send(self, array: np.ndarray) -> None: ...

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: Any) -> np.ndarray: ...


class Pool(ABC):
    """One block of device memory that a role's tensors are views of, and its copy on the host.

    `view` gives float32 arrays that parameters share; `offload` moves the bytes to the host, `load` brings them
    back, `release` gives the device bytes up without keeping them.
    """

    num_bytes: int

    @abstractmethod
    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        """float32 [shape] starting `offset` elements into the pool."""

    @abstractmethod
    def pull(self) -> None:
        """Makes the views show what graphs have written; nothing to do where both are one memory."""

    @abstractmethod
    def push(self) -> None:
        """Makes graphs see what was written to the views; nothing to do where both are one memory."""

    @abstractmethod
    def offload(self) -> None: ...

    @abstractmethod
    def load(self) -> None: ...

    @abstractmethod
    def release(self) -> None: ...


class PeerView(Protocol):
    """Another rank's pool, read only."""

    num_bytes: int

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray: ...

    def forget(self) -> None:
        """What was read need not be kept at hand."""


class Backend(ABC):
    """What one rank can ask of its device and of the other ranks."""

    name: str
    rank: int
    world_size: int
    compile_log: CompileLog
    # Every pool that was handed out and still exists.
    live_pools: WeakSet[Pool]
    # Where this rank is, and where the others are.
    health: RankHealth
    # What the user should hear of how this device computes.
    notices: tuple[str, ...] = ()
    # True where parameters that share one pool may also be updated through one flat view of it.
    shares_memory: bool
    kernels: Kernels
    # What was asked of the device that it does not have, a sentence each.
    unmet: Sequence[str] = ()
    has_device_profile: bool = False

    @abstractmethod
    def __init__(
        self, environment: dict[str, str], transport: str, compiled: bool = True
    ) -> None: ...

    @abstractmethod
    def group(self, ranks: Sequence[int]) -> Group:
        """The group of exactly these ranks; made on first use, by all its members alike."""

    @abstractmethod
    def link(self, source: int, target: int, slot_bytes: int) -> Link: ...

    @abstractmethod
    def pool(self, num_bytes: int, shared: bool = False) -> Pool:
        """`shared`: other ranks may want to read it (`peer_pools`)."""

    def peer_pools(self, pool: Pool) -> Mapping[int, PeerView] | None:
        """The pools that other ranks passed to this call, by rank, to be read in place; all ranks together.

        None, on all ranks alike, where ranks cannot read each other's memory.
        """
        return None

    @abstractmethod
    def host_pool(self, num_bytes: int) -> Pool:
        """A pool of the host's memory, on any device, that no graph works on."""

    @abstractmethod
    def parameter(self, array: np.ndarray, name: str, requires_grad: bool = True) -> Any:
        """A Parameter on `array`'s memory (a view of a pool)."""

    @abstractmethod
    def transfer(
        self,
        bucket_bytes: int,
        fill: Callable[[np.ndarray], int],
        drain: Callable[[Callable[[int], np.ndarray]], None],
    ) -> None:
        """One round between graphs, all ranks together.

        `fill` writes this rank's bucket (uint8 [bucket_bytes]) from its start and returns how many bytes; when all
        are filled, `drain` gets a function rank ->
        that rank's bucket and takes out what is its own. Buckets of one size are the same memory every time.
        """

    def graph(self, cell: Callable[..., Any], name: str) -> Graph:
        return Graph(cell, name, self.compile_log)

    def device_profile(
        self, folder: Path, settings: ProfileSettings
    ) -> AbstractContextManager[None]:
        """The device's own profile of what runs inside, written into `folder`, where it has one."""
        return nullcontext()

    def device_mark(self, name: str) -> AbstractContextManager[None]:
        """What runs inside, marked as a range in the device's own profile, where it has one."""
        return nullcontext()

    @property
    def world(self) -> Group:
        return self.group(range(self.world_size))

    @abstractmethod
    def close(self) -> None: ...
