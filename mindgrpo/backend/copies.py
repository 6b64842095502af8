"""Copies between float32 arrays that are made again and again, as one call of a C kernel where there is one.

Refuses arrays of more than two dims, and copies between different orders of elements in memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from mindgrpo.backend.kernels.native.library import library


class Copies:
    """Pairs (target, source) of equal shapes. The arrays have to outlive this."""

    def __init__(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self._pairs = list(pairs)
        self._library = library()
        jobs = [_job(target, source) for target, source in self._pairs if target.size]
        self._table = np.array(_joined(jobs), np.int64).reshape(-1, 6)

    def run(self) -> None:
        if self._library is None:
            for target, source in self._pairs:
                target[...] = source
            return
        table = ctypes.c_void_p(self._table.ctypes.data)
        self._library.copy_runs(table, ctypes.c_int64(len(self._table)))

    @property
    def num_elements(self) -> int:
        return sum(target.size for target, _ in self._pairs)


_Job = tuple[int, int, int, int, int, int]


def _job(target: np.ndarray, source: np.ndarray) -> _Job:
    """(target, source, runs, bytes a run, bytes between runs of the target, of the source)."""
    if target.shape != source.shape:
        raise ValueError(f"an array of shape {source.shape} does not fit {target.shape}")
    for first, second in ((target, source), (target.T, source.T)):
        pair = [array.reshape(1, -1) if array.ndim < 2 else array for array in (first, second)]
        if all(_has_runs(array) for array in pair):
            to, origin = pair
            runs, length = to.shape
            places = (to.ctypes.data, origin.ctypes.data)
            return *places, runs, length * to.itemsize, to.strides[0], origin.strides[0]
    raise ValueError("the arrays have their elements in different orders")


def _joined(jobs: list[_Job]) -> list[_Job]:
    """Neighbours whose runs continue each other on both sides as one: longer runs are copied faster."""
    result: list[_Job] = []
    for job in jobs:
        if result:
            to, origin, runs, length, *strides = result[-1]
            follows = (to + length, origin + length, runs, *strides)
            if follows == (job[0], job[1], job[2], *job[4:]):
                result[-1] = (to, origin, runs, length + job[3], strides[0], strides[1])
                continue
        result.append(job)
    return result


def _has_runs(array: np.ndarray) -> bool:
    return array.ndim == 2 and (array.shape[1] == 1 or array.strides[1] == array.itemsize)
