"""Cells that reduce-scatter and all-gather rows of device tensors, and tools for graphs over many tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.auto_generate import SplitWithSize

from mindgrpo.backend.arithmetic.contract import ShardedTensor, Stored
from mindgrpo.backend.contract import Group
from mindgrpo.backend.dtypes import mindspore_dtype

# Large enough to saturate the links, small compared with the gradients.
BUCKET_BYTES = 64 << 20
# Each iteration of a loop in a graph nests calls in the previous ones, and MindSpore allows 1000 nested calls.
TENSORS_OF_LOOP = 32

# Graphs over many tensors use operators, and HyperMap over all tensors where possible, to compile fast: MindSpore takes
# ten times as long for indexing as for the operator behind it, fifty times for `ops.split`, and twice for an iteration
# of a loop.
ASSIGN, CONCAT, RESHAPE, SHAPE = ops.Assign(), ops.Concat(), ops.Reshape(), ops.Shape()
SLICE, SPLIT = ops.StridedSlice(), SplitWithSize()

T = TypeVar("T")


def flattened(tensor: Any) -> Any:
    return RESHAPE(tensor, (-1,))


def assigned(parameter: Any, flat: Any) -> Any:
    """Assigns a flat tensor [n] to a parameter."""
    return ASSIGN(parameter, RESHAPE(flat, SHAPE(parameter)))


def first_of(flat: Any) -> Any:
    """Returns the first element [1] of a flat tensor [n], as a ticket that later operations can depend on."""
    return SLICE(flat, (0,), (1,), (1,))


class Cut(NamedTuple):
    """Rows [start, stop) of tensor `number`; `is_whole` if these are all of its rows."""

    number: int
    start: int
    stop: int
    is_whole: bool


def rows_of(tensor: Any, cut: Any) -> Any:
    """Returns the rows of `cut`, [stop - start, ...], of a tensor [rows, ...]."""
    _, start, stop, is_whole = cut
    if is_whole:
        return tensor
    return SLICE(tensor, (start,), (stop,), (1,))


class InTurn(nn.Cell):
    """(ticket) -> ticket; runs cells one after the other, each with the ticket of the previous one."""

    def __init__(self, cells: Sequence[nn.Cell]) -> None:
        super().__init__()
        self.in_turn = nn.CellList(cells)

    def construct(self, ticket: Any) -> Any:
        for cell in self.in_turn:
            ticket = cell(ticket)
        return ticket


def of_graphs(tensors: Sequence[T]) -> Iterator[Sequence[T]]:
    """Splits tensors into consecutive chunks, one for each graph."""
    for first in range(0, len(tensors), TENSORS_OF_LOOP):
        yield tensors[first : first + TENSORS_OF_LOOP]


def buckets(tensors: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Groups consecutive tensors into buckets of BUCKET_BYTES, given their sizes in float32 elements.

    A tensor that is larger than a bucket gets one of its own.
    """
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
    """Base class of collectives on the row blocks of a bucket's tensors."""

    def __init__(self, tensors: Sequence[ShardedTensor], group: Group, gets_all: bool) -> None:
        """`gets_all`: each rank receives the rows of all ranks (all-gather) instead of its own only."""
        super().__init__()
        self.size, members = group.size, group.size if gets_all else 1
        # For each block, the number of elements of a rank's share, and the shape that a rank receives.
        self.sizes = tuple(b.share * tensor.row_size for tensor in tensors for b in tensor.blocks)
        self.shapes = tuple(
            (members * b.share, *tensor.whole.shape[1:])
            for tensor in tensors
            for b in tensor.blocks
        )
        self.cuts = tuple(_cuts(tensors, members))

    def assigned(self, parameters: Any, shares: Any, ticket: Any) -> Any:
        """Writes the received shares to their rows of the parameters; returns a ticket.

        Each parameter is read once and written once, since a graph does not guarantee their order otherwise.
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
    """Yields the cuts that make up each tensor after a collective.

    A cut's number is that of the block whose received share has the rows, or -1 for rows of the tensor itself.
    """
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
    """(ticket) -> ticket; reduce-scatters (sums) the parameters of a bucket: each member gets its own rows."""

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
        # Padding with zeros after each block, so that all ranks' shares have equal sizes.
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
        # Collectives need the same order on all ranks, which independent operations of a graph do not have.
        total = self.scatter(ops.depend(self.beside(dealt), ticket))
        return self.assigned(self.parameters, SPLIT(total, self.sizes, 0), first_of(total))


class GatherOfShares(_Rows):
    """(ticket) -> ticket; all-gathers the shares of a bucket into parameters, in their dtype."""

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
    """Groups consecutive tensors into buckets by the size of their transfers."""
    return buckets(tensors, [tensor.transferred for tensor in tensors])


class OwnRows(nn.Cell):
    """(gradient of a stored tensor [rows, ...], its number) -> this rank's rows, laid out like its share."""

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
    """Yields the cuts that make up a rank's share: rows of the whole tensor, or with number -1, rows of zeros."""
    cursor, length = 0, tensor.share.shape[0]
    for start, stop, at in tensor.own_rows():
        if at > cursor:
            yield Cut(-1, 0, at - cursor, False)
        yield Cut(0, start, stop, stop - start == tensor.whole.shape[0])
        cursor = at + stop - start
    if cursor < length:
        yield Cut(-1, 0, length - cursor, False)
