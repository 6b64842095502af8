"""Counters in shared memory that one process posts and others wait for.

With the C library the waiter sleeps in the kernel until it is woken; without it, it yields and naps. Counters that are
polled are 8-byte aligned stores in program order. That order is what x86-64 guarantees; on a machine with weaker
ordering the system call in the wait loop is relied upon.
"""

from __future__ import annotations

import ctypes
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from mindgrpo.backend.contract import PeerLost

LINE = 64  # bytes between two counters: a cache line each
YIELDS_BEFORE_SLEEP = 40
NAP_SECONDS = 50e-6
LIFE_CHECK_SECONDS = 0.5

Check = Callable[[], None]
# Hears since when (by the monotonic clock) this process waits, once that is worth telling; 0: no more.
Waits = Callable[[float], None]


def unheard(since: float) -> None:
    """Nobody wants to know."""


class Counters(ABC):
    """`count` counters at the start of `memory`; each is posted by one process only and only grows."""

    # What a segment's members tell each other, so that none of them polls what another puts to sleep on.
    kind: int

    @abstractmethod
    def post(self, index: int, value: int) -> None: ...

    @abstractmethod
    def wait(self, indices: Sequence[int], value: int, check: Check) -> None:
        """Returns when every counter of `indices` has reached `value`."""


def _check(check: Check, reached: Callable[[], bool]) -> None:
    """A process that has ended may have posted as its last deed."""
    try:
        check()
    except PeerLost:
        if not reached():
            raise


class PolledCounters(Counters):
    kind = 1

    def __init__(self, memory: memoryview, waits: Waits = unheard) -> None:
        self._waits = waits
        self._values = memory.cast("q")

    def post(self, index: int, value: int) -> None:
        self._values[index * LINE // 8] = value

    def _reached(self, index: int, value: int) -> bool:
        return self._values[index * LINE // 8] >= value

    def wait(self, indices: Sequence[int], value: int, check: Check) -> None:
        turns, reported = 0, False
        next_check = 0.0
        for index in indices:
            while not self._reached(index, value):
                turns += 1
                if turns <= YIELDS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                time.sleep(NAP_SECONDS)
                now = time.monotonic()
                if not next_check:
                    next_check = now + LIFE_CHECK_SECONDS
                elif now > next_check:
                    self._waits(now)
                    reported = True
                    _check(check, partial(self._reached, index, value))
                    next_check = now + LIFE_CHECK_SECONDS
        if reported:
            self._waits(0.0)


class SleepingCounters(Counters):
    """`spins` turns of a tight loop come before the sleep: worth it only where every process has a core."""

    kind = 2

    def __init__(
        self, library: ctypes.CDLL, address: int, spins: int, waits: Waits = unheard
    ) -> None:
        self._library, self._address, self._spins = library, address, spins
        self._waits = waits
        library.futex_post.argtypes = [ctypes.c_void_p, ctypes.c_uint32]
        library.futex_post.restype = None
        library.futex_wait.argtypes = [
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_int32,
        ]

    def post(self, index: int, value: int) -> None:
        self._library.futex_post(self._address + index * LINE, value)

    def wait(self, indices: Sequence[int], value: int, check: Check) -> None:
        milliseconds, reported = int(LIFE_CHECK_SECONDS * 1000), False
        for index in indices:
            cell = self._address + index * LINE
            while self._library.futex_wait(cell, value, self._spins, milliseconds):
                self._waits(time.monotonic())
                reported = True
                _check(check, partial(self._reached, index, value))
        if reported:
            self._waits(0.0)

    def _reached(self, index: int, value: int) -> bool:
        return not self._library.futex_wait(self._address + index * LINE, value, 0, 0)
