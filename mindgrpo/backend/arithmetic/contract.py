"""The interface of training's operations on stored tensors between passes: collectives, gradient norm and AdamW.

host.py implements it for host memory, and device.py in graphs for device memory (choose.py). Tensors are identified by
their pools and offsets.
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
    """A tensor of `shape` that starts `offset` elements into its pool; `parameter` is its graph Parameter, if any."""

    pool: Pool
    offset: int
    shape: tuple[int, ...]
    parameter: Any = None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Columns:
    """Column ranges [start, stop) of a tensor's last dim, in order; `rows` restricts them to rows of its first dim.

    The last columns may be padding, whose gradient is zero. `region` indexes the elements without padding;
    `is_transposed` tells that the Hugging Face tensor has the last two dims swapped.
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
        """Returns the number of elements in the ranges."""
        return self.rows_of_all * sum(stop - start for start, stop in self.ranges)

    @property
    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the start and the stop of the first range, restricted to `rows`, in every dim."""
        begin, end = [0] * len(self.shape), [*self.shape]
        begin[-1], end[-1] = self.ranges[0]
        if self.rows is not None:
            begin[0], end[0] = self.rows
        return tuple(begin), tuple(end)

    @property
    def is_whole(self) -> bool:
        """Returns whether the first range, restricted to `rows`, covers the whole tensor."""
        return self.edges == ((0,) * len(self.shape), self.shape)

    @property
    def widths(self) -> tuple[tuple[int, bool], ...]:
        """Returns (width, whether it is a range) for the ranges and the gaps between them, in order."""
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
    """Rows [start, start + rows) of a stored tensor, sharded over ranks in consecutive shares of `share` rows.

    The last ranks may own fewer rows, or none. In the tensor that stores a rank's share, the block's rows start at row
    `at`, padded with zeros to `share` rows.
    """

    start: int
    rows: int
    share: int
    at: int

    def own(self, index: int) -> tuple[int, int]:
        """Returns the rows [start, stop) that the rank at `index` owns."""
        first, last = (min(self.rows, i * self.share) for i in (index, index + 1))
        return self.start + first, self.start + last


@dataclass(frozen=True)
class ShardedTensor:
    """A stored tensor, `whole`, and the tensor with this rank's `share` of its rows; `ranks` share the blocks' rows.

    `index` is this rank's position in `ranks`.
    """

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
        """Returns the number of elements of all ranks' shares, padded as they are transferred."""
        return sum(block.share for block in self.blocks) * len(self.ranks) * self.row_size

    def own_rows(self) -> Iterator[tuple[int, int, int]]:
        """Yields (start, stop, at) of the rows that this rank owns: rows of `whole`, and their first row in `share`."""
        for block in self.blocks:
            start, stop = block.own(self.index)
            if start < stop:
                yield start, stop, block.at

    def shares(self, offset: int) -> Iterator[Share]:
        """Yields the elements (start, stop, member) that each rank owns, counted from `offset` in the pool."""
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
    """A tensor to update with AdamW: `tensors` are (weight, gradient, first moment, second moment), of equal shapes.

    With ZeRO-1 (`sharded`), the gradient is the whole tensor, the moments are this rank's share, and the weight is the
    share or the whole tensor; only the rank's own rows are updated.
    """

    tensors: tuple[Stored, Stored, Stored, Stored]
    decays: bool
    sharded: ShardedTensor | None = None

    @property
    def gradient(self) -> Stored:
        return self.tensors[1]


# Prepared once and called in every update, as a collective call of its group.
Operation = Callable[[], None]
# (number of the update from 1, learning rate, gradient scale) -> None.
Step = Callable[[int, float, float], None]
Tensors = Mapping[str, Stored]
Sharded = Sequence[ShardedTensor]


def neighbours(tensors: Sharded) -> Iterator[tuple[tuple[int, ...], list[ShardedTensor]]]:
    """Yields runs of consecutive tensors that are sharded over the same ranks: (ranks, tensors)."""
    for ranks, own in groupby(tensors, lambda tensor: tensor.ranks):
        yield ranks, list(own)


class Arithmetic(ABC):
    """Prepares in-place operations on float32 tensors, which must not move in memory afterwards.

    Tensors are passed in the order of their pools.
    """

    @abstractmethod
    def sum_columns(self, columns: Sequence[Columns], group: Group) -> Operation:
        """All-reduces (sums) columns over the group; members have equally many columns, at any offsets."""

    @abstractmethod
    def sum_tensors(self, tensors: Sequence[Stored], group: Group) -> Operation:
        """All-reduces (sums) tensors over the group; members have them at the same offsets of their pools."""

    @abstractmethod
    def scatter_sum(self, tensors: Sharded, gradients: Tensors) -> Operation:
        """Reduce-scatters (sums) the gradients of tensors over their ranks; each rank gets the sums of its own rows."""

    @abstractmethod
    def gather(self, tensors: Sharded, trained: Tensors, masters: Tensors | None) -> Operation:
        """All-gathers the rows of each tensor into `trained`, in its dtype.

        `masters` are the shares to take the values from; None if the owners' rows of `trained` are up to date.
        """

    @abstractmethod
    def norm(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group
    ) -> Callable[[], float]:
        """Prepares the 2-norm of columns over the group, where `copies[i]` members hold replicas of columns[i]."""

    @abstractmethod
    def adamw(self, tensors: Sequence[Updated], settings: AdamWSettings) -> Step:
        """Prepares an AdamW step, which updates weights and moments and zeroes gradients."""

    @abstractmethod
    def round(self, targets: Sequence[Stored], sources: Sequence[Stored]) -> Operation:
        """Prepares the copy of float32 `sources` to `targets` of a narrower dtype."""

    @abstractmethod
    def clear(self, tensors: Sequence[Stored]) -> None:
        """Zeroes tensors at once."""
