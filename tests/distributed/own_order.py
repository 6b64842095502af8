"""Stands in for a communication that adds in an order of its own on every rank, as HCCL's one-shot sums do.

Such a sum ends with the rank's own values, so that its last bits differ between ranks. Judges nothing.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.backend import group_cells


def add_in_own_order() -> None:
    """From now on every sum of MindSpore's inside a graph does."""
    group_cells.MindSporeSum.__init__ = _begin
    group_cells.MindSporeSum.construct = _construct


def _begin(self: Any, name: str) -> None:
    nn.Cell.__init__(self)
    self.call = ops.AllReduce(ops.ReduceOp.SUM, name)


def _construct(self: Any, x: Any) -> Any:
    # Exact where all but one have zeros, or all have whole numbers. Two operations: what compiles of them counts, as
    # there are hundreds of sums.
    return (self.call(x) - x) + x
