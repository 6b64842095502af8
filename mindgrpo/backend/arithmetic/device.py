"""Computes with a device's tensors in graphs, so that none passes the host; neighbours share buckets of a transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SplitWithSize, SumExt

from mindgrpo.backend.arithmetic.contract import (
    Arithmetic,
    Columns,
    Operation,
    ShardedTensor,
    Stored,
    Updated,
)
from mindgrpo.backend.contract import Backend, Graph, Group
from mindgrpo.backend.dtypes import mindspore_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWSettings

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


class SumOfTensors(nn.Cell):
    """(ticket) -> ticket; sums whole parameters over a group, in one exchange behind that which gave the ticket."""

    def __init__(self, columns: Sequence[Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.tensor.parameter for own in columns])
        self.sizes = tuple(own.size for own in columns)
        self.total, self.map = group.sum_cell(), ops.HyperMap()

    def construct(self, ticket: Any) -> Any:
        # The calls of all ranks need one order, which independent operations of a graph do not have.
        total = self.total(ops.depend(CONCAT(self.map(flattened, self.parameters)), ticket))
        sums = SPLIT(total, self.sizes, 0)
        return ops.depend(first_of(total), self.map(assigned, self.parameters, sums))


class SumOfColumns(nn.Cell):
    """As SumOfTensors, of ranges of parameters' columns."""

    def __init__(self, columns: Sequence[Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.tensor.parameter for own in columns])
        self.widths = tuple(tuple(width for width, _ in own.widths) for own in columns)
        self.is_summed = tuple(tuple(summed for _, summed in own.widths) for own in columns)
        self.sizes = tuple(
            own.rows_of_all * width for own in columns for width, summed in own.widths if summed
        )
        self.total, self.join = group.sum_cell(), ops.Concat(-1)

    def construct(self, ticket: Any) -> Any:
        flat: tuple[Any, ...] = ()
        for i in range(len(self.parameters)):
            split = SPLIT(self.parameters[i], self.widths[i], -1)
            for number in range(len(split)):
                if self.is_summed[i][number]:
                    flat = (*flat, flattened(split[number]))
        total = self.total(ops.depend(CONCAT(flat), ticket))
        sums, at = SPLIT(total, self.sizes, 0), 0
        ticket = first_of(total)
        for i in range(len(self.parameters)):
            # Read once and written once: a graph does not promise an order between the two of one parameter.
            split = SPLIT(self.parameters[i], self.widths[i], -1)
            columns: tuple[Any, ...] = ()
            for number in range(len(split)):
                own = split[number]
                if self.is_summed[i][number]:
                    own, at = RESHAPE(sums[at], SHAPE(own)), at + 1
                columns = (*columns, own)
            ticket = ops.depend(ticket, ASSIGN(self.parameters[i], self.join(columns)))
        return ticket


class _Square(nn.Cell):
    """x -> the sum of its squares, [1]."""

    def __init__(self, squares: nn.Cell) -> None:
        super().__init__()
        self.squares = squares

    def construct(self, x: Any) -> Any:
        return RESHAPE(self.squares(x), (1,))


class Norm(nn.Cell):
    """The 2-norm over the model: squares of columns, divided by the number of their copies, summed over ranks."""

    def __init__(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group, squares: nn.Cell
    ) -> None:
        super().__init__()
        pairs = sorted(zip(columns, copies, strict=True), key=lambda pair: not pair[0].is_whole)
        self.num_whole = sum(own.is_whole for own, _ in pairs)
        parameters = [own.tensor.parameter for own, _ in pairs]
        self.whole = ms.ParameterTuple(parameters[: self.num_whole])
        self.cut = ms.ParameterTuple(parameters[self.num_whole :])
        self.regions = tuple(own.edges for own, _ in pairs[self.num_whole :])
        self.shares = Tensor([1.0 / number for _, number in pairs] or [1.0], ms.float32)
        self.is_alone = group.size == 1
        self.nothing = Tensor([0.0], ms.float32)
        self.square, self.map = _Square(squares), ops.HyperMap()
        self.total, self.sum = group.sum_cell(), SumExt()

    def construct(self) -> Any:
        squares: tuple[Any, ...] = ()
        if self.num_whole > 0:
            squares = self.map(self.square, self.whole)
        for first in range(0, len(self.regions), TENSORS_OF_LOOP):
            last = min(first + TENSORS_OF_LOOP, len(self.regions))
            squares = squares + self.squares_of(first, last)
        square = self.nothing
        if len(squares) > 0:
            square = RESHAPE(self.sum(CONCAT(squares) * self.shares), (1,))
        if not self.is_alone:
            square = self.total(square)
        return ops.sqrt(square)

    def squares_of(self, first: int, last: int) -> tuple[Any, ...]:
        squares: tuple[Any, ...] = ()
        for i in range(first, last):
            begin, end = self.regions[i]
            own = SLICE(self.cut[i], begin, end, (1,) * len(begin))
            squares = (*squares, self.square(own))
        return squares


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


class AdamWCell(nn.Cell):
    """Updates weights and moments and zeroes gradients, one tensor after the other."""

    def __init__(
        self,
        tensors: Sequence[tuple[Any, Any, Any, Any, bool]],
        settings: AdamWSettings,
        kernels: Kernels,
        own_rows: OwnRows | None = None,
    ) -> None:
        """Takes of each tensor (weight, gradient, first moment, second moment, whether the weight decays).

        `own_rows`: weights and moments are of these rows alone, of which it has a gradient's.
        """
        super().__init__()
        self.weights = ms.ParameterTuple([entry[0] for entry in tensors])
        self.grads = ms.ParameterTuple([entry[1] for entry in tensors])
        self.first = ms.ParameterTuple([entry[2] for entry in tensors])
        self.second = ms.ParameterTuple([entry[3] for entry in tensors])
        self.decays = tuple(entry[4] for entry in tensors)
        numbers = settings.beta1, settings.beta2, settings.eps
        self.decaying = kernels.adamw_cell(*numbers, settings.weight_decay)
        self.staying = kernels.adamw_cell(*numbers, 0.0)
        self.zero = Tensor(0.0, ms.float32)
        self.is_sharded = own_rows is not None
        self.own_rows: Any = own_rows

    def construct(self, scale: Any, *numbers: Any) -> Any:
        done = scale
        for i in range(len(self.weights)):
            gradient = self.grads[i]
            if self.is_sharded:
                gradient = self.own_rows(gradient, i)
            gradient = ops.depend(gradient * scale, done)
            tensors = self.weights[i], gradient, self.first[i], self.second[i]
            update = self.decaying if self.decays[i] else self.staying
            updated = update(*tensors, *numbers)
            zero = ops.depend(self.zero, updated)
            done = ops.depend(done, self.grads[i].copy_(zero))
        return done


class RoundCell(nn.Cell):
    """Copies weights to parameters of a narrow dtype.

    In the optimizer's graph, which changes the weights, each would be copied first.
    """

    def __init__(self, weights: Sequence[Any], rounded: Sequence[Any]) -> None:
        super().__init__()
        self.weights, self.rounded = ms.ParameterTuple(weights), ms.ParameterTuple(rounded)

    def construct(self, done: Any) -> Any:
        for i in range(len(self.weights)):
            done = ops.depend(done, self.rounded[i].copy_(self.weights[i]))
        return done


class DeviceArithmetic(Arithmetic):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ticket = Tensor([0.0], ms.float32)

    def _graph(self, cells: Sequence[nn.Cell], name: str) -> Graph:
        return self._backend.graph(InTurn(cells), name)

    def sum_columns(self, columns: Sequence[Columns], group: Group) -> Operation:
        graphs: list[Graph] = []
        summed = [own for own in columns if own.ranges]
        for kind, cut in ((SumOfTensors, False), (SumOfColumns, True)):
            for taken in of_graphs([own for own in summed if own.is_whole != cut]):
                cells = [kind(own, group) for own in buckets(taken, [c.size for c in taken])]
                graphs.append(self._graph(cells, "sum of gradients"))
        return self._in_turn(graphs)

    def sum_tensors(self, tensors: Sequence[Stored], group: Group) -> Operation:
        return self.sum_columns([Columns(one, ((0, one.shape[-1]),)) for one in tensors], group)

    def scatter_sum(
        self, tensors: Sequence[ShardedTensor], gradients: Mapping[str, Stored], group: Group
    ) -> Operation:
        return self._in_turn(
            self._graph(
                [SumOfShares(own, gradients, group) for own in buckets_of(taken)],
                "sum of gradients",
            )
            for taken in of_graphs([tensor for tensor in tensors if tensor.blocks])
        )

    def gather(
        self,
        tensors: Sequence[ShardedTensor],
        trained: Mapping[str, Stored],
        masters: Mapping[str, Stored] | None,
        group: Group,
    ) -> Operation:
        assert masters is not None
        return self._in_turn(
            self._graph(
                [GatherOfShares(own, masters, trained, group) for own in buckets_of(taken)],
                "gathered weights",
            )
            for taken in of_graphs([tensor for tensor in tensors if tensor.blocks])
        )

    def _in_turn(self, graphs: Iterable[Graph]) -> Operation:
        made = list(graphs)

        def run() -> None:
            for graph in made:
                graph(self._ticket)

        return run

    def norm(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group
    ) -> Callable[[], float]:
        cell = Norm(columns, copies, group, self._backend.kernels.squares())
        graph = self._backend.graph(cell, "gradient norm")
        return lambda: float(graph().asnumpy()[0])

    def adamw(
        self, tensors: Sequence[Updated], settings: AdamWSettings
    ) -> Callable[[int, float, float], None]:
        kernels, graphs = self._backend.kernels, list[Graph]()
        for taken in of_graphs(tensors):
            entries = [(*(own.parameter for own in one.tensors), one.decays) for one in taken]
            shares = [one.sharded for one in taken if one.sharded is not None]
            cell = AdamWCell(entries, settings, kernels, OwnRows(shares) if shares else None)
            graphs.append(self._backend.graph(cell, "optimizer"))

        def run(update: int, lr: float, scale: float) -> None:
            inputs = kernels.adamw_inputs(settings.at(update, lr, scale))
            scaling = done = Tensor(scale, ms.float32)
            for graph in graphs:
                done = graph(scaling, *inputs)
            done.asnumpy()

        return run

    def round(self, targets: Sequence[Stored], sources: Sequence[Stored]) -> Operation:
        pairs = [(s.parameter, t.parameter) for s, t in zip(sources, targets, strict=True)]
        graphs = [
            self._backend.graph(RoundCell(*zip(*own, strict=True)), "rounded weights")
            for own in of_graphs(pairs)
        ]
        pools = {id(one.pool): one.pool for one in (*targets, *sources)}.values()

        def run() -> None:
            for pool in pools:
                pool.load()
            done = Tensor(0.0, ms.float32)
            for graph in graphs:
                done = graph(done)
            done.asnumpy()

        return run

    def clear(self, tensors: Sequence[Stored]) -> None:
        for tensor in tensors:
            ops.assign(tensor.parameter, ops.zeros_like(tensor.parameter))
        self._backend.synchronize()
