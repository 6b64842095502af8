"""Cells that exchange rows of tensors between ranks of a device, and what graphs over many tensors need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from mindgrpo.backend.arithmetic.contract import ShardedTensor, Stored
from mindgrpo.backend.contract import Group
from mindgrpo.backend.dtypes import mindspore_dtype

# Large enough for the links, small beside the gradients.
BUCKET_BYTES = 64 << 20
# Each turn of a loop in a graph nests calls in those of the turns before it, and MindSpore takes 1000 calls in another.
TENSORS_OF_LOOP = 32

# Graphs over many tensors are written in operations, and in a map over all tensors where that is possible: slices by
# indices take MindSpore ten times as long to compile as the operation that they are, `ops.split` fifty times, and a
# turn of a loop twice as long as a map's.
ASSIGN, CONCAT, RESHAPE, SHAPE = ops.Assign(), ops.Concat(), ops.Reshape(), ops.Shape()
SLICE, SPLIT = ops.StridedSlice(), SplitWithSize()

T = TypeVar("T")


def flattened(tensor: Any) -> Any:
    return RESHAPE(tensor, (-1,))


def assigned(parameter: Any, flat: Any) -> Any:
    """Gives a parameter the values of a flat tensor."""
    return ASSIGN(parameter, RESHAPE(flat, SHAPE(parameter)))


def first_of(flat: Any) -> Any:
    """Returns the first element, [1], for which an operation behind can wait."""
    return SLICE(flat, (0,), (1,), (1,))


class Cut(NamedTuple):
    """Rows [start, stop) of a tensor, of which they are all where `is_whole`; `number` says of which tensor."""

    number: int
    start: int
    stop: int
    is_whole: bool


def rows_of(tensor: Any, cut: Any) -> Any:
    """Returns the rows of a Cut."""
    _, start, stop, is_whole = cut
    if is_whole:
        return tensor
    return SLICE(tensor, (start,), (stop,), (1,))


class InTurn(nn.Cell):
    """(ticket) -> ticket; runs cells that wait for a ticket, each behind the one before it."""

    def __init__(self, cells: Sequence[nn.Cell]) -> None:
        super().__init__()
        self.in_turn = nn.CellList(cells)

    def construct(self, ticket: Any) -> Any:
        for cell in self.in_turn:
            ticket = cell(ticket)
        return ticket


def of_graphs(tensors: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yields the tensors, in order, that one graph takes."""
    for first in range(0, len(tensors), TENSORS_OF_LOOP):
        yield tensors[first : first + TENSORS_OF_LOOP]


def buckets(tensors: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Returns neighbours that share a bucket, by their numbers of float32; a larger one is alone."""
    by_bucket: list[list[T]] = [[]]
    room = BUCKET_BYTES // 4
    for tensor, size in zip(tensors, sizes, strict=True):
        if by_bucket[-1] and size > room:
            by_bucket.append([])
            room = BUCKET_BYTES // 4
        by_bucket[-1].append(tensor)
        room -= size
    return by_bucket


class _Rows(nn.Cell):
    """Rows of the tensors of a bucket on a device, by blocks; sums and gathers of them are subclasses."""

    def __init__(self, tensors: Sequence[ShardedTensor], group: Group, gets_all: bool) -> None:
        """`gets_all`: each rank gets all ranks' rows of a block, not its own alone."""
        super().__init__()
        self.size, members = group.size, group.size if gets_all else 1
        # Of a rank's share of each block its elements, and the shape of what a rank gets.
        self.sizes = tuple(b.share * tensor.row_size for tensor in tensors for b in tensor.blocks)
        self.shapes = tuple(
            (members * b.share, *tensor.whole.shape[1:])
            for tensor in tensors
            for b in tensor.blocks
        )
        self.cuts = tuple(_cuts(tensors, members))

    def assigned(self, parameters: Any, shares: Any, ticket: Any) -> Any:
        """Puts exchanged shares where they belong; each parameter is read once and written once.

        A graph does not promise an order between the two of one parameter.
        """
        for i in range(len(self.cuts)):
            joined: tuple[Any, ...] = ()
            for cut in self.cuts[i]:
                rows = parameters[i]
                if cut[0] >= 0:
                    rows = RESHAPE(shares[cut[0]], self.shapes[cut[0]])
                joined = (*joined, rows_of(rows, cut))
            ticket = ops.depend(ticket, ASSIGN(parameters[i], CONCAT(joined)))
        return ticket


def _cuts(tensors: Sequence[ShardedTensor], members: int) -> Iterator[tuple[Cut, ...]]:
    """Yields what each tensor consists of behind an exchange: rows of blocks' shares by number, its own with -1."""
    number = 0
    for tensor in tensors:
        cursor, length, cuts = 0, tensor.whole.shape[0], []
        for block in tensor.blocks:
            start, stop = block.own(tensor.index)
            if members > 1:
                start, stop = block.start, block.start + block.rows
            if start > cursor:
                cuts.append(Cut(-1, cursor, start, False))
            if stop > start:
                is_whole = stop - start == members * block.share
                cuts.append(Cut(number, 0, stop - start, is_whole))
            number, cursor = number + 1, stop
        if cursor < length:
            cuts.append(Cut(-1, cursor, length, cursor == 0))
        yield tuple(cuts)


class SumOfShares(_Rows):
    """(ticket) -> ticket; sums parameters over a group, of which each member gets its own rows, in one exchange."""

    def __init__(
        self, tensors: Sequence[ShardedTensor], gradients: Mapping[str, Stored], group: Group
    ) -> None:
        super().__init__(tensors, group, gets_all=False)
        parameters = [gradients[tensor.whole.key].parameter for tensor in tensors]
        self.parameters = ms.ParameterTuple(parameters)
        self.dealt = tuple(
            Cut(i, b.start, b.start + b.rows, b.rows == tensor.whole.shape[0])
            for i, tensor in enumerate(tensors)
            for b in tensor.blocks
        )
        # Rows of zeros behind each block, so that all ranks' shares have as many.
        self.missing = tuple(
            (b.share * group.size - b.rows, *tensor.whole.shape[1:])
            for tensor in tensors
            for b in tensor.blocks
        )
        self.scatter, self.beside = group.scatter_sum_cell(), ops.Concat(1)

    def construct(self, ticket: Any) -> Any:
        dealt: tuple[Any, ...] = ()
        for number in range(len(self.dealt)):
            cut = self.dealt[number]
            values = rows_of(self.parameters[cut[0]], cut)
            if self.missing[number][0] > 0:
                values = CONCAT((values, ops.zeros(self.missing[number], ms.float32)))
            dealt = (*dealt, RESHAPE(values, (self.size, -1)))
        # The calls of all ranks need one order, which independent operations of a graph do not have.
        total = self.scatter(ops.depend(self.beside(dealt), ticket))
        return self.assigned(self.parameters, SPLIT(total, self.sizes, 0), first_of(total))


class GatherOfShares(_Rows):
    """(ticket) -> ticket; copies all members' shares to parameters, in their dtype, in one exchange."""

    def __init__(
        self,
        tensors: Sequence[ShardedTensor],
        masters: Mapping[str, Stored],
        trained: Mapping[str, Stored],
        group: Group,
    ) -> None:
        super().__init__(tensors, group, gets_all=True)
        keys = [tensor.whole.key for tensor in tensors]
        self.masters = ms.ParameterTuple([masters[key].parameter for key in keys])
        self.trained = ms.ParameterTuple([trained[key].parameter for key in keys])
        self.own = tuple(
            Cut(i, b.at, b.at + b.share, b.share == tensor.share.shape[0])
            for i, tensor in enumerate(tensors)
            for b in tensor.blocks
        )
        self.gather, self.dtype = group.gather_cell(), mindspore_dtype(trained[keys[0]].pool.dtype)

    def construct(self, ticket: Any) -> Any:
        own: tuple[Any, ...] = ()
        for cut in self.own:
            own = (*own, flattened(ops.cast(rows_of(self.masters[cut[0]], cut), self.dtype)))
        gathered = self.gather(ops.depend(CONCAT(own), ticket))
        shares = SPLIT(gathered, self.sizes, 1)
        return self.assigned(self.trained, shares, ops.depend(ticket, gathered))


def buckets_of(tensors: Sequence[ShardedTensor]) -> list[list[ShardedTensor]]:
    """Returns neighbours that share a bucket."""
    return buckets(tensors, [tensor.transferred for tensor in tensors])


class OwnRows(nn.Cell):
    """(gradient of a stored tensor, its number) -> this rank's rows, as its share of the weights has them."""

    def __init__(self, tensors: Sequence[ShardedTensor]) -> None:
        super().__init__()
        self.cuts = tuple(tuple(_own_cuts(tensor)) for tensor in tensors)
        self.rest = tuple(tensor.share.shape[1:] for tensor in tensors)

    def construct(self, whole: Any, number: int) -> Any:
        joined: tuple[Any, ...] = ()
        for cut in self.cuts[number]:
            if cut[0] < 0:
                joined = (*joined, ops.zeros((cut[2], *self.rest[number]), ms.float32))
            else:
                joined = (*joined, rows_of(whole, cut))
        return CONCAT(joined)


def _own_cuts(tensor: ShardedTensor) -> Iterator[Cut]:
    """Yields what a rank's share consists of: rows of the whole tensor, and with number -1 so many zeros."""
    cursor, length = 0, tensor.share.shape[0]
    for start, stop, at in tensor.own_rows():
        if at > cursor:
            yield Cut(-1, 0, at - cursor, False)
        yield Cut(0, start, stop, stop - start == tensor.whole.shape[0])
        cursor = at + stop - start
    if cursor < length:
        yield Cut(-1, 0, length - cursor, False)
