"""Refuses functions of `signal` in a thread, where they fail, or interrupt the main program: Python has them for the
main thread alone."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REFUSED = (signal.signal, signal.alarm, signal.setitimer)


class _Noted(threading.local):
    """`calls` are those of the present thread; None where all are allowed."""

    calls: list[str] | None = None


_noted = _Noted()


@functools.cache
def watch_signals() -> None:
    """Lets `signals_refused` see calls, for as long as this process lives; elsewhere they do what they did.

    Also of a main program that has imported them by name.
    """
    watched = {function: _watched(function) for function in REFUSED}
    for names in (vars(signal), vars(sys.modules["__main__"])):
        for name, value in [*names.items()]:
            if any(value is function for function in REFUSED):
                names[name] = watched[value]


@contextmanager
def signals_refused() -> Iterator[list[str]]:
    """Yields a list that gets "signal.alarm at FILE:LINE" for each call inside, in this thread alone."""
    calls: list[str] = []
    _noted.calls = calls
    try:
        yield calls
    finally:
        _noted.calls = None


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if _noted.calls is None:
            return function(*arguments, **named)
        caller = sys._getframe(1)
        where = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        _noted.calls.append(f"signal.{function.__name__} at {where}")
        raise ValueError("signal only works in main thread of the main interpreter")

    return call
