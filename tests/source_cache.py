"""Has `inspect` read a source once: MindSpore asks for it again for every cell, which is a tenth of its compiling."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

_read = cache(inspect.getsourcelines)


def _getsourcelines(of: Any) -> tuple[list[str], int]:
    lines, first = _read(getattr(of, "__func__", of))
    return [*lines], first


def cache_sources() -> None:
    inspect.getsourcelines = _getsourcelines
