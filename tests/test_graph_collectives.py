"""The collectives that graphs call into, called as MindSpore calls them, between plain processes.

Does not prove that MindSpore makes these calls (distributed/ does) nor anything about speed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor
from ranks_as_processes import native, numbers, run

from mindgrpo.backend.contract import CompileLog, PeerLost
from mindgrpo.backend.cpu.backend import CpuBackend, CpuGraph
from mindgrpo.backend.cpu.host import LocalRanks
from mindgrpo.backend.cpu.shared_group import (
    KINDS,
    NativeGroup,
    PythonSum,
    SharedGroup,
    shared_group,
)

SMALL_BUFFER = 1000


def _group(host: LocalRanks, size: int) -> SharedGroup:
    return shared_group(host, range(size), SMALL_BUFFER)


def _as_a_graph_calls(symbol: str, group: SharedGroup, x: np.ndarray, out: np.ndarray) -> int:
    """Kernel `symbol` with the arguments that MindSpore gives to an operation compiled ahead of time."""
    assert isinstance(group, NativeGroup)
    arrays = [x, np.array([group.kernel_id], np.int32), out]
    shapes = [np.array(array.shape, np.int64) for array in arrays]
    pointers = ctypes.c_void_p * len(arrays)
    kernel = getattr(native(), symbol)
    return int(
        kernel(
            len(arrays),
            pointers(*[array.ctypes.data for array in arrays]),
            (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays]),
            pointers(*[shape.ctypes.data for shape in shapes]),
            (ctypes.c_char_p * len(arrays))(*[array.dtype.name.encode() for array in arrays]),
            None,
            None,
        )
    )


def _die_before_a_graphs_sum(host: LocalRanks, size: int) -> None:
    group = _group(host, size)
    x = np.ones(5, np.float32)
    assert _as_a_graph_calls("shared_sum", group, x, x) == 0 and (x == size).all()
    if host.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    graph = CpuGraph(
        lambda: _fail_as_a_graph_does(group, x), "sum", CompileLog(), host.naming_the_lost
    )
    graph()


def _fail_as_a_graph_does(group: SharedGroup, x: np.ndarray) -> None:
    status = _as_a_graph_calls("shared_sum", group, x, x)
    if status:
        raise RuntimeError(f"Return value from CPU AOT kernel is {status}.")


def test_a_graph_that_waits_for_a_killed_rank_ends_with_its_name() -> None:
    outcomes = run(native(), 4, _die_before_a_graphs_sum, silent=1)
    assert sorted(outcomes) == [0, 1, 3]
    for outcome in outcomes.values():
        assert isinstance(outcome, PeerLost) and "rank 2 " in str(outcome)


def _sum_and_gather_in_kernels(host: LocalRanks, size: int, count: int) -> Any:
    group = _group(host, size)
    x = numbers(host.rank, count, "float32")
    blocks = numbers(host.rank, size * count, "float32").reshape(size, count)
    total, stacked, own = np.empty_like(x), np.empty((size, count), np.float32), np.empty_like(x)
    exchanged = np.empty_like(blocks)
    return [
        _as_a_graph_calls("shared_sum", group, x, total),
        _as_a_graph_calls("shared_gather", group, x, stacked),
        _as_a_graph_calls("shared_scatter_sum", group, blocks, own),
        _as_a_graph_calls("shared_exchange", group, blocks, exchanged),
        total,
        stacked,
        own,
        exchanged,
    ]


def _in_a_tree(parts: list[np.ndarray]) -> np.ndarray:
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return parts[0]


@pytest.mark.parametrize(
    ("size", "count"), [(1, 9), (2, 250), (3, 1), (3, 60_001), (5, 33), (7, 250), (8, 60_001)]
)
def test_the_kernels_of_graphs_sum_in_a_tree_and_gather_in_place(size: int, count: int) -> None:
    everyone = [numbers(rank, count, "float32") for rank in range(size)]
    blocks = [numbers(rank, size * count, "float32") for rank in range(size)]
    of_blocks = _in_a_tree(blocks).reshape(size, count)
    for rank, outcome in run(native(), size, _sum_and_gather_in_kernels, count).items():
        assert outcome[:4] == [0, 0, 0, 0]
        assert outcome[4].tobytes() == _in_a_tree(everyone).tobytes()
        assert outcome[5].tobytes() == np.stack(everyone).tobytes()
        assert outcome[6].tobytes() == of_blocks[rank].tobytes()
        sent = [block.reshape(size, count)[rank] for block in blocks]
        assert outcome[7].tobytes() == np.stack(sent).tobytes()


def _halves(host: LocalRanks, size: int) -> int:
    group = _group(host, size)
    x = np.ones(5, np.float16)
    return _as_a_graph_calls("shared_sum", group, x, x)


def test_a_type_that_the_kernels_do_not_add_is_an_error_and_not_a_wrong_sum() -> None:
    assert "float16" not in KINDS
    assert all(run(native(), 2, _halves).values())


def _different_calls(host: LocalRanks, size: int) -> None:
    group = _group(host, size)
    x = np.ones(5 + host.rank, np.float32)
    group.sum_into(x, x)


def test_members_that_make_different_calls_are_told_and_do_not_get_garbage() -> None:
    for outcome in run(native(), 2, _different_calls).values():
        assert "did not make the same calls" in str(outcome)


def test_without_the_library_a_graph_sums_through_python() -> None:
    class Doubling(SharedGroup):
        def __init__(self) -> None:
            super().__init__(LocalRanks("alone", 0, 1), [0])

        def sum_into(self, source: np.ndarray, out: np.ndarray) -> None:
            np.add(source, source, out=out)

        def barrier(self) -> None: ...

        def _take_bytes(
            self, mine: np.ndarray, sizes: np.ndarray, begins: np.ndarray, ends: np.ndarray
        ) -> list[np.ndarray]:
            return [mine[begins[0] : ends[0]]]

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = CpuBackend({}).graph(PythonSum(Doubling()), "sum")(Tensor(x))
    assert np.array_equal(found.asnumpy(), 2 * x)
