"""Limits time and memory of code that processes what a user supplied: a template, a damaged file."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

PAGE_BYTES = resource.getpagesize()


class OutOfTime(BaseException):
    """Not an Exception: jinja's compiler swallows those where it computes constants."""


@contextmanager
def limits(seconds: float, num_bytes: int) -> Iterator[None]:
    """Ends the code inside after `seconds` of the process's own time, and lets it allocate `num_bytes`.

    Raises OutOfTime or MemoryError. Both limits are the process's, so they are set in its main thread alone, in which
    runs prepare their prompts; other threads go without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _out_of_time)
    limit_memory(num_bytes)
    # Again every second, in case the first one met code that no exception leaves.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGVTALRM, handler or signal.SIG_DFL)


def limit_memory(num_bytes: int) -> None:
    """Limits what this process may allocate from now on to `num_bytes`, unless it has a lower limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    in_use = int(os.read(statm, 64).split()[0]) * PAGE_BYTES
    os.close(statm)
    bounds = [size for size in (in_use + num_bytes, soft, hard) if size != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))


def _out_of_time(*_: object) -> NoReturn:
    raise OutOfTime
