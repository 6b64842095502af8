"""What each of the ranks that train the same parameters has to update: rows of every stored tensor (ZeRO-1).

Which rows follows from two layouts (`sharded_tensors`, pure): the parameters' own, and that of the optimizer's state,
which is cut once more. Gradients arrive at the rows' owners as sums; updated rows go from these to all. Both happen
where the values are: in arrays of the host's, or in graphs on the device, where neighbours share buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Group, Share
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.local_weights import FlatRange, FusedTensor, WeightArrays, Weights, arrange

# Large enough for the links, small beside the gradients.
BUCKET_BYTES = 64 << 20
# Each turn of a loop in a graph nests calls in those of the turns before it, and MindSpore takes 1000 calls in another.
TENSORS_OF_LOOP = 32

T = TypeVar("T")


def of_graphs(tensors: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the tensors, in order, that one graph takes."""
    for first in range(0, len(tensors), TENSORS_OF_LOOP):
        yield tensors[first : first + TENSORS_OF_LOOP]


def buckets(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the indices of neighbours that share a bucket, by their numbers of float32; a larger one is alone."""
    by_bucket: list[list[int]] = [[]]
    room = BUCKET_BYTES // 4
    for index, size in enumerate(sizes):
        if by_bucket[-1] and size > room:
            by_bucket.append([])
            room = BUCKET_BYTES // 4
        by_bucket[-1].append(index)
        room -= size
    return tuple(map(tuple, by_bucket))


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

    whole: FusedTensor
    share: FusedTensor
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


def sharded_tensors(layout: Layout, rank: int) -> tuple[ShardedTensor, ...]:
    """Returns the stored tensors of `rank`, and what it owns of them in `layout.split_over_data()`."""
    boxes = layout.held_by(rank)
    tensors = []
    pairs = zip(arrange(layout, rank), arrange(layout.split_over_data(), rank), strict=True)
    for whole, share in pairs:
        ranks = layout.mesh.group(rank, whole.data_axes)
        blocks = []
        for (spec, start, _), (_, at, _) in zip(whole.columns(), share.columns(), strict=True):
            if spec.name not in boxes:
                continue
            rows, *others = spec.as_stored(boxes[spec.name].shape)
            # Vectors that are kept one after another are apart; matrices side by side have the same rows.
            places = (0, 0) if others else (start, at)
            blocks.append(RowBlock(places[0], rows, -(-rows // len(ranks)), places[1]))
        distinct = tuple(dict.fromkeys(blocks))
        tensors.append(ShardedTensor(whole, share, ranks, ranks.index(rank), distinct))
    return tuple(tensors)


def shares_in(tensors: Sequence[ShardedTensor], run: FlatRange) -> list[Share]:
    """Returns who owns which elements of a range of the pool that has the whole tensors."""
    return [
        share
        for tensor in tensors
        if run.start <= tensor.whole.offset < run.start + run.size
        for share in tensor.shares(run.start)
    ]


class HostHandOut:
    """Gives every rank the updated rows of all; `masters` None: the owners have them where they belong already."""

    def __init__(
        self,
        tensors: Sequence[ShardedTensor],
        trained: Weights,
        masters: Weights | None,
        backend: Backend,
    ) -> None:
        self._tensors, self._arrays = tensors, trained.arrays
        self._masters = None if masters is None else masters.arrays
        mesh, rank = trained.layout.mesh, trained.rank
        self._ranges = [
            (backend.group(mesh.group(rank, run.data_axes)), values, shares_in(tensors, run))
            for run, values in zip(self._arrays.ranges, self._arrays.flat_buffers, strict=True)
        ]

    def run(self) -> None:
        if self._masters is not None:
            self._round(self._masters)
        for group, values, shares in self._ranges:
            group.gather_shares(values, shares)

    def _round(self, masters: WeightArrays) -> None:
        for tensor in self._tensors:
            rounded, exact = (
                self._arrays.tensors[tensor.whole.key],
                masters.tensors[tensor.whole.key],
            )
            for start, stop, at in tensor.own_rows():
                rounded[start:stop] = exact[at : at + stop - start]


class _Rows(nn.Cell):
    """Rows of several tensors of a device, by blocks; sums and gathers of them are subclasses."""

    def __init__(self, tensors: Sequence[ShardedTensor], group: Group) -> None:
        super().__init__()
        self.blocks = tuple(
            tuple((b.start, b.rows, b.share, b.at) for b in tensor.blocks) for tensor in tensors
        )
        self.own = tuple(
            tuple(block.own(tensor.index) for block in tensor.blocks) for tensor in tensors
        )
        self.rest = tuple(tensor.whole.shape[1:] for tensor in tensors)
        self.row_sizes = tuple(tensor.row_size for tensor in tensors)
        self.lengths = tuple(tensor.whole.shape[0] for tensor in tensors)
        self.size = group.size
        self.buckets = buckets([tensor.transferred for tensor in tensors])


class SumOfShares(_Rows):
    """Sums parameters over a group, of which each member gets its own rows, in buckets, one after the other.

    Gives what the last one ends with.
    """

    def __init__(
        self,
        tensors: Sequence[ShardedTensor],
        parameters: Sequence[Any],
        group: Group,
    ) -> None:
        super().__init__(tensors, group)
        self.parameters = ms.ParameterTuple(parameters)
        self.scatter = group.scatter_sum_cell()

    def construct(self, ticket: Any) -> Any:
        for bucket in self.buckets:
            dealt = []
            for i in bucket:
                for start, rows, share, _ in self.blocks[i]:
                    values = self.parameters[i][start : start + rows]
                    missing = share * self.size - rows
                    if missing > 0:
                        values = ops.concat(
                            (values, ops.zeros((missing, *self.rest[i]), ms.float32))
                        )
                    dealt.append(values.reshape(self.size, -1))
            # The calls of all ranks need one order, which independent operations of a graph do not have.
            total = self.scatter(ops.depend(ops.concat(dealt, 1), ticket))
            ticket = ops.depend(ticket, total)
            begin = 0
            for i in bucket:
                # Read once and written once: a graph does not promise an order between the two of one parameter.
                old, cursor, joined = self.parameters[i], 0, []
                for number in range(len(self.blocks[i])):
                    start, stop = self.own[i][number]
                    if start > cursor:
                        joined.append(old[cursor:start])
                    if stop > start:
                        end = begin + (stop - start) * self.row_sizes[i]
                        joined.append(total[begin:end].reshape((stop - start, *self.rest[i])))
                    begin, cursor = begin + self.blocks[i][number][2] * self.row_sizes[i], stop
                if cursor < self.lengths[i]:
                    joined.append(old[cursor:])
                ticket = ops.depend(ticket, ops.assign(old, ops.concat(joined)))
        return ticket


class _GatherOfShares(_Rows):
    """Copies all members' shares to parameters, in their dtype, in buckets, one after the other."""

    def __init__(
        self,
        tensors: Sequence[ShardedTensor],
        masters: Weights,
        trained: Weights,
        group: Group,
    ) -> None:
        super().__init__(tensors, group)
        keys = [tensor.whole.key for tensor in tensors]
        self.masters = ms.ParameterTuple([masters.parameters[key] for key in keys])
        self.trained = ms.ParameterTuple([trained.parameters[key] for key in keys])
        self.gather, self.dtype = group.gather_cell(), mindspore_dtype(trained.dtype)

    def construct(self, ticket: Any) -> Any:
        for bucket in self.buckets:
            own = []
            for i in bucket:
                for _, _, share, at in self.blocks[i]:
                    own.append(ops.cast(self.masters[i][at : at + share], self.dtype).reshape(-1))
            rows = self.gather(ops.depend(ops.concat(own), ticket))
            ticket = ops.depend(ticket, rows)
            begin = 0
            for i in bucket:
                old, cursor, joined = self.trained[i], 0, []
                for start, number, share, _ in self.blocks[i]:
                    if start > cursor:
                        joined.append(old[cursor:start])
                    end = begin + share * self.row_sizes[i]
                    values = rows[:, begin:end].reshape((self.size * share, *self.rest[i]))
                    joined.append(values[:number])
                    begin, cursor = end, start + number
                if cursor < self.lengths[i]:
                    joined.append(old[cursor:])
                ticket = ops.depend(ticket, ops.assign(old, ops.concat(joined)))
        return ticket


def by_group(
    tensors: Sequence[ShardedTensor], backend: Backend
) -> Iterator[tuple[Group, Sequence[ShardedTensor]]]:
    """Yields the groups with the tensors that they share, for one graph, without those of which there is nothing."""
    for ranks, shared in groupby(tensors, lambda tensor: tensor.ranks):
        present = [tensor for tensor in shared if tensor.blocks]
        for taken in of_graphs(present):
            yield backend.group(ranks), taken


class DeviceHandOut:
    """Rounds every rank's updated rows to the dtype of the trained parameters, which get the rows of all, in graphs."""

    def __init__(
        self,
        tensors: Sequence[ShardedTensor],
        trained: Weights,
        masters: Weights,
        backend: Backend,
    ) -> None:
        self._graphs = [
            backend.graph(_GatherOfShares(shared, masters, trained, group), "gathered weights")
            for group, shared in by_group(tensors, backend)
        ]
        self._ticket = Tensor([0.0], ms.float32)

    def run(self) -> None:
        for graph in self._graphs:
            graph(self._ticket).asnumpy()


class OwnRows(nn.Cell):
    """(gradient of a stored tensor, its number) -> this rank's rows, as its share of the weights has them."""

    def __init__(self, tensors: Sequence[ShardedTensor]) -> None:
        super().__init__()
        self.rows = tuple(tuple(tensor.own_rows()) for tensor in tensors)
        self.shapes = tuple(tensor.share.shape for tensor in tensors)

    def construct(self, whole: Any, number: int) -> Any:
        shape, cursor, joined = self.shapes[number], 0, []
        for start, stop, at in self.rows[number]:
            if at > cursor:
                joined.append(ops.zeros((at - cursor, *shape[1:]), ms.float32))
            joined.append(whole[start:stop])
            cursor = at + stop - start
        if cursor < shape[0]:
            joined.append(ops.zeros((shape[0] - cursor, *shape[1:]), ms.float32))
        return ops.concat(joined)
