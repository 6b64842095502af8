"""What the distributed job asks of groups and links, between graphs and in one.

Judges nothing: tests/test_distributed.py does. Refuses to know a model.
"""

from __future__ import annotations

import os
import time
import zlib
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Group
from mindgrpo.models.parallel_cells import GatherTokens, ScatterTokens


def communication(backend: Backend) -> dict[str, Any]:
    """What groups and links carry, more than one buffer of it where that is possible."""
    rank, size = backend.rank, backend.world_size
    half = range(0, size // 2) if rank < size // 2 else range(size // 2, size)
    whole = np.arange(700_000, dtype=np.float32) % 1000 * (rank + 1)
    noise = np.random.RandomState(rank).standard_normal(100_003).astype(np.float32)
    sent = ("x" * (3 << 20)) if rank == size - 1 else rank
    gathered = backend.world.gather_objects(sent)
    return {
        "sum": bool(
            (
                backend.world.sum_array(whole)
                == np.arange(700_000, dtype=np.float32) % 1000 * (size * (size + 1) // 2)
            ).all()
        ),
        "half": float(backend.group(half).sum_array(np.array([float(rank)]))[0]),
        "half_expected": float(sum(half)),
        "noise": zlib.crc32(backend.world.sum_array(noise).tobytes()),
        "gathered": gathered[:-1] == list(range(size - 1)) and gathered[-1] == "x" * (3 << 20),
        "exchanged": _exchanged(backend),
        "link": _through_link(backend),
    }


def _exchanged(backend: Backend) -> bool:
    """Whether bytes came from every rank, of lengths of their own and none from some; for one more than a buffer."""
    size, rank = backend.world_size, backend.rank

    def parcel(source: int, target: int) -> np.ndarray:
        count = (5_000_001 if target == 1 else 1 + source + 3 * target) * (
            (source + target) % 3 > 0
        )
        return (np.arange(count) % 251 + source + 2 * target).astype(np.uint8)

    arrived = backend.world.exchange_bytes([parcel(rank, other) for other in range(size)])
    wanted = [parcel(other, rank) for other in range(size)]
    return all(np.array_equal(own, one) for own, one in zip(arrived, wanted, strict=True))


def _through_link(backend: Backend) -> list[int]:
    """Twenty tensors from rank 0 to rank 1, which begins late and answers each; what either gets, in order."""
    if backend.rank > 1:
        return []
    link = backend.link(1 - backend.rank, (5, 3))
    marks = []
    for i in range(20):
        shape = (1 + i % 5, 3)
        if backend.rank == 1 and i == 0:
            time.sleep(0.2)
        # One way alone, then both at once.
        if backend.rank == 0:
            link.exchange(Tensor(np.full(shape, i, np.float32)), receives=None)
            arrived = link.exchange(Tensor(np.full(shape, 100 + i, np.float32)), receives=shape)
        else:
            arrived = link.exchange(None, receives=shape)
            back = link.exchange(Tensor(np.full(shape, 200 + i, np.float32)), receives=shape)
            marks += _marks(back)
        marks += _marks(arrived)
    return marks


def _marks(arrived: Any) -> list[int]:
    array = arrived().asnumpy()
    return [int(array[0, 0]) if (array == array[0, 0]).all() else -1]


def cores_of(backend: Backend) -> dict[str, list[int]]:
    """The cores that the rank may use before, inside of one `computing` and of another in it, and after."""
    cores = {"before": os.sched_getaffinity(0)}
    with backend.computing():
        with backend.computing():
            cores["inner"] = os.sched_getaffinity(0)
        cores["outer"] = os.sched_getaffinity(0)
    cores["after"] = os.sched_getaffinity(0)
    return {name: sorted(each) for name, each in cores.items()}


class Summed(nn.Cell):
    def __init__(self, world: nn.Cell, half: nn.Cell, gather: nn.Cell) -> None:
        super().__init__()
        self.world = world
        self.half = half
        self.gather = gather

    def construct(self, x: Any) -> Any:
        total = self.world(x * 2.0) + x
        return self.half(total), self.gather(x), self.gather(total[0])


def sum_in_graph(backend: Backend) -> dict[str, Any]:
    """A small graph with sums over the world and over half of it, where it also gathers."""
    size, index = backend.world_size, backend.rank
    half = range(0, size // 2) if index < size // 2 else range(size // 2, size)
    draws = [
        np.random.RandomState(rank).standard_normal((37, 11)).astype(np.float32)
        for rank in range(size)
    ]
    group = backend.group(half)
    cell = Summed(backend.world.sum_cell(), group.sum_cell(), group.gather_cell())
    outputs = backend.graph(cell, "summed")(Tensor(draws[index]))
    found, gathered, rows = [output.asnumpy() for output in outputs]
    everyone = np.sum(draws, axis=0, dtype=np.float64)
    mine = np.sum([draws[rank] for rank in half], axis=0, dtype=np.float64)
    exact = len(half) * 2.0 * everyone + mine
    # The sums of shared memory are float32.
    dtypes = [np.float32] if backend.shares_memory else [np.float32, np.float16]
    sums = [pair for dtype in dtypes for pair in _sums_of_noise(backend, dtype)]
    exact_rows = np.stack([2.0 * everyone[0] + draws[rank][0] for rank in half])
    return {
        "error": float(np.abs(found - exact).max()),
        "largest": float(np.abs(exact).max()),
        "bits": [zlib.crc32(total.tobytes()) for total, _ in sums],
        "noise_errors": [float(np.abs(total - wanted).max()) for total, wanted in sums],
        "gathered": bool((gathered == np.stack([draws[rank] for rank in half])).all()),
        "rows_error": float(np.abs(rows - exact_rows).max()),
    }


class Conjugates(nn.Cell):
    """Own tokens and all of them -> the group's own tokens, own tokens of the group's sum, and the sum."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.gather = GatherTokens(group, False)
        self.scatter = ScatterTokens(group, False)
        self.total = group.sum_cell()

    def construct(self, own: Any, whole: Any) -> Any:
        gathered = self.gather(own)
        # In one order on all ranks.
        scattered = self.scatter(whole + 0.0 * gathered[0, 0], gathered)
        return gathered, scattered, self.total(ops.stop_gradient(whole + 0.0 * scattered[0, 0]))


def tokens_in_graph(backend: Backend) -> dict[str, Any]:
    """What hidden states pass through between tokens that ranks share out and those that all have, there and back."""
    rank, size = backend.rank, backend.world_size
    n = 61
    own_shape, whole_shape = (n, 40), (n * size, 40)
    draws = [np.random.RandomState(r).standard_normal for r in range(size)]
    own, whole, d_gathered, d_scattered = (
        np.stack([draw(shape).astype(np.float32) for draw in draws])
        for shape in (own_shape, whole_shape, whole_shape, own_shape)
    )
    cell = Conjugates(backend.world)
    mine = slice(n * rank, n * (rank + 1))
    outputs = backend.graph(cell, "conjugates")(Tensor(own[rank]), Tensor(whole[rank]))
    gathered, scattered, total = [output.asnumpy() for output in outputs]
    back = ops.GradOperation(get_all=True, sens_param=True)(cell)
    sens = d_gathered[rank], d_scattered[rank], np.zeros(whole_shape, np.float32)
    arrays = own[rank], whole[rank]
    d_own, d_whole = back(*map(Tensor, arrays), tuple(map(Tensor, sens)))
    error = np.abs(scattered - whole.sum(0, np.float64)[mine]).max()
    d_error = np.abs(d_own.asnumpy() - d_gathered.sum(0, np.float64)[mine]).max()
    return {
        "gathered": gathered.tobytes() == own.tobytes(),
        "d_whole": d_whole.asnumpy().tobytes() == d_scattered.tobytes(),
        "errors": [float(error), float(d_error)],
        "same_as_a_sum": scattered.tobytes() == total[mine].tobytes(),
    }


class Both(nn.Cell):
    def __init__(self, world: nn.Cell) -> None:
        super().__init__()
        self.world = world

    def construct(self, few: Any, many: Any) -> Any:
        total = self.world(few)
        # In one order on all ranks.
        return total, self.world(many + 0.0 * total[0, 0])


def _sums_of_noise(backend: Backend, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of few elements and of many, a number that no group's size divides; and what the sums should be."""

    def drawn(rank: int) -> list[np.ndarray]:
        draw = np.random.RandomState(rank).standard_normal
        return [draw(shape).astype(dtype) for shape in ((31, 7), (100_003,))]

    wanted = [
        np.sum(each, axis=0, dtype=np.float64)
        for each in zip(*map(drawn, range(backend.world_size)), strict=True)
    ]
    own = [Tensor(array) for array in drawn(backend.rank)]
    outputs = backend.graph(Both(backend.world.sum_cell()), "both")(*own)
    assert all(output.dtype == own[0].dtype for output in outputs)
    return [(output.asnumpy(), exact) for output, exact in zip(outputs, wanted, strict=True)]
