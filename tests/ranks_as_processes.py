"""Ranks of one host as plain forked processes, for tests of what they share.

Refuses to start msrun: what needs graphs of several ranks is in distributed/.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mindgrpo.backend.cpu.host import LocalRanks
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.targets import BOARD_FOLDERS

Work = Callable[..., Any]


def native() -> ctypes.CDLL:
    library = native_library.library()
    if library is None:
        pytest.skip("no C compiler")
    return library


def _rank(
    work: Work, host: LocalRanks, size: int, results: Any, arguments: tuple[Any, ...]
) -> None:
    try:
        outcome = work(host, size, *arguments)
    except BaseException as error:
        outcome = error
    results.put((host.rank, outcome))


def run(
    library: ctypes.CDLL | None, size: int, work: Work, *arguments: Any, silent: int = 0
) -> dict[int, Any]:
    """What `work(host, size, *arguments)` returns or raises on each rank; `silent` ranks say nothing."""
    job = f"test-{uuid.uuid4().hex[:12]}"
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(
            target=_rank,
            args=(work, LocalRanks(job, rank, size, library), size, results, arguments),
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        outcomes: dict[int, Any] = {}
        while len(outcomes) < size - silent:
            # Asked first: the last one says its outcome before it ends.
            are_alive = any(process.is_alive() for process in processes)
            if results.empty():
                assert are_alive, f"only ranks {sorted(outcomes)} said how they ended"
                time.sleep(0.005)
                continue
            rank, outcome = results.get()
            outcomes[rank] = outcome
        for rank in outcomes:
            processes[rank].join()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not [path for folder in BOARD_FOLDERS for path in folder.glob(f"*{job}*")]
    return outcomes


def numbers(rank: int, count: int, dtype: str) -> np.ndarray:
    return (np.random.RandomState(rank).standard_normal(count) * 100).astype(dtype)
