"""Ranks as threads over plain numpy memory, for tests of what ranks do together without a device or a graph.

Refuses to compute: a pool is an array, and of a group there is only its gathering of objects.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, numpy_dtype
from mindgrpo.health.rank_health import RankHealth

WAIT_SECONDS = 60.0


class World:
    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.meeting = threading.Barrier(size)


class ThreadGroup:
    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    def gather_objects(self, value: Any) -> list[Any]:
        self._world.values[self._rank] = value
        self._world.meeting.wait(WAIT_SECONDS)
        gathered = list(self._world.values)
        self._world.meeting.wait(WAIT_SECONDS)
        return gathered

    def barrier(self) -> None:
        self.gather_objects(None)


class ArrayPool:
    is_host_memory = True

    def __init__(self, size: int, dtype: Dtype) -> None:
        self.dtype, self.itemsize = dtype, ITEM_BYTES[dtype]
        self.num_bytes = size * self.itemsize
        self._array = np.zeros(size, numpy_dtype(dtype))

    def view(self, offset: int, shape: Sequence[int]) -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        return self._array[offset : offset + count].reshape(shape)

    def parameter(self, name: str, offset: int, shape: Sequence[int]) -> None:
        """There is no graph to use one."""

    @contextmanager
    def on_host(self, write: bool = False) -> Iterator[ArrayPool]:
        yield self

    def forget(self) -> None:
        """As a peer's pool has it."""

    def release(self) -> None:
        """The array is freed with the pool."""


class ThreadBackend:
    shares_memory = True
    compute_dtype: Dtype = "float32"

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.world_size = rank, world.size
        self.world = ThreadGroup(world, rank)
        self.health = RankHealth(rank, world.size, None)

    def pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> ArrayPool:
        return ArrayPool(size, dtype)

    def host_pool(self, size: int, shared: bool = False, dtype: Dtype = "float32") -> ArrayPool:
        return ArrayPool(size, dtype)

    def peer_pools(self, pool: ArrayPool) -> dict[int, ArrayPool]:
        return dict(enumerate(self.world.gather_objects(pool)))


def run(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(backend, *arguments)` returns on each rank; the first exception is raised."""
    world = World(size)

    def rank(number: int) -> Any:
        try:
            return work(ThreadBackend(world, number), *arguments)
        except BaseException:
            world.meeting.abort()
            raise

    with ThreadPoolExecutor(size) as ranks:
        futures = [ranks.submit(rank, number) for number in range(size)]
    errors = [future.exception() for future in futures]
    real = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if real:
        raise real[0]
    return [future.result() for future in futures]
