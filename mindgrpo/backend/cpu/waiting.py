"""Counters in shared memory that one process posts and others wait for.

With the C library, counters are C11 atomics: a process that has seen a post also sees everything written before it, and
waiters sleep in the kernel (futex). Without it, waiters poll, and counters are plain 8-byte stores, which are ordered
between processes on x86-64 only; other machines are rejected.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from mindgrpo.backend.contract import PeerLost
from mindgrpo.errors import UserError

LINE = 64  # bytes between two counters: a cache line each
YIELDS_BEFORE_SLEEP = 40
NAP_SECONDS = 50e-6
LIFE_CHECK_SECONDS = 0.5

Check = Callable[[], None]
# Called with the monotonic time since which this process waits, for long waits only, and with 0 when the wait is over.
Waits = Callable[[float], None]


def unheard(since: float) -> None:
    """Ignores reports of waits."""


class Counters(ABC):
    """Counters in shared memory, one cache line each. Each is posted by a single process and only grows."""

    # Exchanged by a segment's members, so that polling and sleeping counters are never mixed.
    kind: int

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    @abstractmethod
    def post(self, index: int, value: int) -> None: ...

    @abstractmethod
    def _reached(self, index: int, value: int, seconds: float) -> bool:
        """Returns whether the counter reaches `value` within about `seconds`; 0 checks without waiting."""

    def wait(self, indices: Sequence[int], value: int, check: Check) -> None:
        """Waits until every counter in `indices` has reached `value`.

        Calls `check` every LIFE_CHECK_SECONDS meanwhile, and raises what it raises.
        """
        reported = False
        try:
            for index in indices:
                while not self._reached(index, value, LIFE_CHECK_SECONDS):
                    self._waits(time.monotonic())
                    reported = True
                    _check(check, partial(self._reached, index, value, 0.0))
        finally:
            if reported:
                self._waits(0.0)


def _check(check: Check, reached: Callable[[], bool]) -> None:
    """Calls `check`, but ignores PeerLost if `reached`: a process may post right before it ends."""
    try:
        check()
    except PeerLost:
        if not reached():
            raise


class PolledCounters(Counters):
    """Counters that are polled. Raises UserError on machines where other processes may see stores out of order."""

    kind = 1

    def __init__(self, memory: memoryview, waits: Waits = unheard) -> None:
        super().__init__(waits)
        machine = platform.machine()
        if machine != "x86_64":
            raise UserError(
                f"ranks that share memory on {machine} need the C library, which orders what they write for each "
                "other, and it is not there; install gcc (and unset MINDGRPO_NATIVE), set context.backend: device, or "
                "use 1 rank."
            )
        self._values = memory.cast("q")

    def post(self, index: int, value: int) -> None:
        self._values[index * LINE // 8] = value

    def _reached(self, index: int, value: int, seconds: float) -> bool:
        turns, until = 0, 0.0
        while self._values[index * LINE // 8] < value:
            turns += 1
            if turns <= YIELDS_BEFORE_SLEEP and seconds:
                os.sched_yield()
                continue
            now = time.monotonic()
            until = until or now + seconds
            if now >= until:
                return False
            time.sleep(NAP_SECONDS)
        return True


class SleepingCounters(Counters):
    """Counters whose waiters sleep on a futex, after `spins` turns of a tight loop.

    Spinning pays off only if every process has a core of its own.
    """

    kind = 2

    def __init__(
        self, library: ctypes.CDLL, address: int, spins: int, waits: Waits = unheard
    ) -> None:
        super().__init__(waits)
        self._library, self._address, self._spins = library, address, spins
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

    def _reached(self, index: int, value: int, seconds: float) -> bool:
        cell, milliseconds = self._address + index * LINE, int(seconds * 1000)
        return not self._library.futex_wait(cell, value, self._spins, milliseconds)
