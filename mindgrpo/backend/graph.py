"""Counts what is compiled: a call of a graph with shapes it has not seen is a compile, and is timed and told."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mindspore import nn


class CompileLog:
    """(graph's name, seconds of its first call) in order; `listener` hears of each when it starts and ends.

    `span` surrounds each. Where graphs are not compiled at all (`compiles` False), there is nothing to tell.
    """

    compiles = True

    def __init__(self) -> None:
        self.entries: list[tuple[str, float]] = []
        self.listener: Callable[[str, float | None], None] | None = None
        self.span: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()

    def run(self, name: str, call: Callable[[], Any]) -> Any:
        if not self.compiles:
            return call()
        if self.listener:
            self.listener(name, None)
        started = time.perf_counter()
        with self.span(name):
            result = call()
        seconds = time.perf_counter() - started
        self.entries.append((name, seconds))
        if self.listener:
            self.listener(name, seconds)
        return result


# The graph that makes a token of every slot.
DECODE = "decode"
# In both phases MindSpore runs the compiled graph that `phase_cache` names, and does not look for it by the inputs. In
# that of decoding a device may launch kernels in other ways, and then refuses graphs of several streams, as others are.
PHASES = {DECODE: "increment"}
OTHER_PHASE = "prefill"


class Graph:
    """A cell that is compiled once a shape."""

    def __init__(self, cell: Callable[..., Any], name: str, log: CompileLog) -> None:
        self._cell, self._name, self._log = cell, name, log
        # MindSpore's names of the graphs by their inputs' shapes.
        self._compiled: dict[tuple[Any, ...], dict[str, str]] = {}
        self._names: dict[str, str] = {}
        if isinstance(cell, nn.Cell):
            cell.phase, self._names = PHASES.get(name, OTHER_PHASE), cell.phase_cache

    def __call__(self, *inputs: Any) -> Any:
        shapes = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
        if shapes in self._compiled:
            self._names |= self._compiled[shapes]
            return self._cell(*inputs)
        self._names.clear()
        result = self._log.run(self._name, lambda: self._cell(*inputs))
        self._compiled[shapes] = dict(self._names)
        return result
