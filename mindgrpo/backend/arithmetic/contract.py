"""Declares what training does with stored tensors between passes: sums over ranks, a norm, AdamW, rows for all.

Arrays of the host's memory are computed by host.py, tensors of a device in graphs by device.py
(choose.py). Tensors are known by where they lie in their pools.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np

from mindgrpo.backend.contract import Group, Pool, Share
from mindgrpo.backend.kernels.shapes import AdamWSettings


@dataclass(frozen=True)
class Stored:
    """A tensor [shape] that begins `offset` elements into its pool; graphs know it as `parameter`, if any does."""

    pool: Pool
    offset: int
    shape: tuple[int, ...]
    parameter: Any = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Columns:
    """Ranges [start, stop) of a tensor's columns (its last dim), in order; `rows`: of these alone (its first dim).

    They may end in padding, whose gradient is zero. `region` is what they hold without it, in the order of the file's
    tensor if `is_transposed`.
    """

    tensor: Stored
    ranges: tuple[tuple[int, int], ...]
    rows: tuple[int, int] | None = None
    region: tuple[Any, ...] = (...,)
    is_transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def rows_of_all(self) -> int:
        return int(np.prod(self.shape[:-1]))

    @property
    def size(self) -> int:
        """Counts the elements in the ranges."""
        return self.rows_of_all * sum(stop - start for start, stop in self.ranges)

    @property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns where the rows of the first range begin and end, in every dim."""
        begin, end = [0] * len(self.shape), [*self.shape]
        begin[-1], end[-1] = self.ranges[0]
        if self.rows is not None:
            begin[0], end[0] = self.rows
        return tuple(begin), tuple(end)

    @property
    def is_whole(self) -> bool:
        """Whether the first range, of these rows, is all of the parameter."""
        return self.edges == ((0,) * len(self.shape), self.shape)

    @property
    def widths(self) -> tuple[tuple[int, bool], ...]:
        """Returns the widths of the ranges and of what is between them, in order, and which are ranges."""
        edges = (0, *(edge for one in self.ranges for edge in one), self.shape[-1])
        widths = [stop - start for start, stop in pairwise(edges)]
        return tuple((width, i % 2 == 1) for i, width in enumerate(widths) if width > 0)


class Arranged(Protocol):
    """A tensor as a rank stores it, `offset` elements into a pool."""

    @property
    def key(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...


@dataclass(frozen=True)
class RowBlock:
    """Rows [start, start + rows) of a stored tensor, of which each rank in turn owns the next `share`.

    The last ranks own fewer, or none. In the tensor that has a rank's own rows these begin `at`, with room for `share`;
    what it has beyond them is zero.
    """

    start: int
    rows: int
    share: int
    at: int

    def own(self, index: int) -> tuple[int, int]:
        """Returns the rows [start, stop) of the rank at `index`."""
        first, last = (min(self.rows, i * self.share) for i in (index, index + 1))
        return self.start + first, self.start + last


@dataclass(frozen=True)
class ShardedTensor:
    """A stored tensor, `whole`, and the one that has a rank's share of it; `ranks` own the blocks' rows in turn."""

    whole: Arranged
    share: Arranged
    ranks: tuple[int, ...]
    index: int
    blocks: tuple[RowBlock, ...]

    @property
    def row_size(self) -> int:
        return int(np.prod(self.whole.shape[1:]))

    @property
    def transferred(self) -> int:
        """Counts the elements of all ranks' shares, as they are transferred."""
        return sum(block.share for block in self.blocks) * len(self.ranks) * self.row_size

    def own_rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields, of each block of which this rank owns rows: their [start, stop), and where the share has them."""
        for block in self.blocks:
            start, stop = block.own(self.index)
            if start < stop:
                yield start, stop, block.at

    def shares(self, offset: int) -> Iterator[Share]:
        """Yields what each rank owns, of elements counted from `offset` of the pool."""
        for block in self.blocks:
            for member in range(len(self.ranks)):
                edges = block.own(member)
                if edges[0] < edges[1]:
                    start, stop = (
                        self.whole.offset - offset + row * self.row_size for row in edges
                    )
                    yield start, stop, member


@dataclass(frozen=True)
class Updated:
    """What AdamW works on: `tensors` are a weight, its gradient, the first and the second moment, of one shape.

    But for the gradient of a `sharded` tensor, of which this rank has its own rows to update: the moments are that
    share, and the weight is the share or the whole tensor.
    """

    tensors: tuple[Stored, Stored, Stored, Stored]
    decays: bool
    sharded: ShardedTensor | None = None

    @property
    def gradient(self) -> Stored:
        return self.tensors[1]


# Prepared once, called in every update, by all members of its group alike.
Operation = Callable[[], None]
# (number of the update from 1, learning rate, factor of the gradients) -> None.
Step = Callable[[int, float, float], None]
Tensors = Mapping[str, Stored]
Sharded = Sequence[ShardedTensor]


def neighbours(tensors: Sharded) -> Iterator[tuple[tuple[int, ...], list[ShardedTensor]]]:
    """Yields ranks and the tensors, one after another in their pools, that these share."""
    for ranks, own in groupby(tensors, lambda tensor: tensor.ranks):
        yield ranks, list(own)


class Arithmetic(ABC):
    """Makes operations on tensors of float32, in place; what they are made for stays where it is.

    Tensors are in the order of their pools.
    """

    @abstractmethod
    def sum_columns(self, columns: Sequence[Columns], group: Group) -> Operation:
        """Sums columns over the group, whose members have as many of them, wherever these lie."""

    @abstractmethod
    def sum_tensors(self, tensors: Sequence[Stored], group: Group) -> Operation:
        """Sums tensors over the group, whose members have them at the same places of their pools."""

    @abstractmethod
    def scatter_sum(self, tensors: Sharded, gradients: Tensors) -> Operation:
        """Sums tensors over the ranks of each, of which a rank gets the sums of its own rows."""

    @abstractmethod
    def gather(self, tensors: Sharded, trained: Tensors, masters: Tensors | None) -> Operation:
        """Gives the ranks of each tensor the rows of all, in the dtype of `trained`.

        `masters` are the shares that have the values; None: the owners' rows have them already.
        """

    @abstractmethod
    def norm(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group
    ) -> Callable[[], float]:
        """Returns the 2-norm over the group of columns of which `copies` members have the same."""

    @abstractmethod
    def adamw(self, tensors: Sequence[Updated], settings: AdamWSettings) -> Step:
        """Updates weights and moments; gradients are zero afterwards."""

    @abstractmethod
    def round(self, targets: Sequence[Stored], sources: Sequence[Stored]) -> Operation:
        """Copies tensors to those of a narrower dtype."""

    @abstractmethod
    def clear(self, tensors: Sequence[Stored]) -> None:
        """Makes tensors zero."""
