"""Arithmetic on device tensors in graphs, without copies to the host; consecutive tensors share transfer buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import SumExt

from mindgrpo.backend.arithmetic.contract import (
    Arithmetic,
    Columns,
    Operation,
    Sharded,
    ShardedTensor,
    Step,
    Stored,
    Tensors,
    Updated,
    neighbours,
)
from mindgrpo.backend.arithmetic.device_rows import (
    ASSIGN,
    CONCAT,
    RESHAPE,
    SHAPE,
    SLICE,
    SPLIT,
    TENSORS_OF_LOOP,
    GatherOfShares,
    InTurn,
    OwnRows,
    SumOfShares,
    assigned,
    buckets,
    buckets_of,
    first_of,
    flattened,
    of_graphs,
)
from mindgrpo.backend.contract import Backend, Graph, Group
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWSettings


class SumOfTensors(nn.Cell):
    """(ticket float32 [1]) -> ticket; all-reduces whole parameters in one bucket.

    The ticket orders it after the collective that returned it.
    """

    def __init__(self, columns: Sequence[Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.tensor.parameter for own in columns])
        self.sizes = tuple(own.size for own in columns)
        self.total, self.map = group.sum_cell(), ops.HyperMap()

    def construct(self, ticket: Any) -> Any:
        # Collectives need the same order on all ranks, which independent operations of a graph do not have.
        total = self.total(ops.depend(CONCAT(self.map(flattened, self.parameters)), ticket))
        sums = SPLIT(total, self.sizes, 0)
        return ops.depend(first_of(total), self.map(assigned, self.parameters, sums))


class SumOfColumns(nn.Cell):
    """Like SumOfTensors, for column ranges of parameters."""

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
            # Each parameter is read once and written once, since a graph does not guarantee their order otherwise.
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
    """x float32 [...] -> the sum of its squares, [1]."""

    def __init__(self, squares: nn.Cell) -> None:
        super().__init__()
        self.squares = squares

    def construct(self, x: Any) -> Any:
        return RESHAPE(self.squares(x), (1,))


class GradientNorm(nn.Cell):
    """() -> the model's 2-norm, float32 [1]: sums the squares of columns, divided by their replicas, over ranks."""

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


class AdamWCell(nn.Cell):
    """Applies AdamW and zeroes gradients, one tensor after the other: (scale [], *adamw_inputs) -> done."""

    def __init__(
        self,
        tensors: Sequence[tuple[Any, Any, Any, Any, bool]],
        settings: AdamWSettings,
        kernels: Kernels,
        own_rows: OwnRows | None = None,
    ) -> None:
        """Takes (weight, gradient, first moment, second moment, whether the weight decays) for each tensor.

        With `own_rows`, weights and moments are shares, and it selects the rows of the whole gradients.
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
    """(done) -> done; copies weights to parameters of a narrower dtype.

    It is a separate graph, since the optimizer's graph, which changes the weights, would make a copy of each first.
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

    def _sums(self, cells: Sequence[nn.Cell]) -> Graph:
        return self._backend.graph(InTurn(cells), "sum of gradients")

    def sum_columns(self, columns: Sequence[Columns], group: Group) -> Operation:
        summed = [own for own in columns if own.ranges]
        return self._in_turn(
            self._sums([kind(own, group) for own in buckets(taken, [c.size for c in taken])])
            for kind, cut in ((SumOfTensors, False), (SumOfColumns, True))
            for taken in of_graphs([own for own in summed if own.is_whole != cut])
        )

    def sum_tensors(self, tensors: Sequence[Stored], group: Group) -> Operation:
        return self.sum_columns([Columns(one, ((0, one.shape[-1]),)) for one in tensors], group)

    def _shared(self, tensors: Sharded) -> Iterator[tuple[Group, list[list[ShardedTensor]]]]:
        """Yields (group, buckets of the tensors that it shards) for each graph, without tensors that have no rows."""
        for ranks, own in neighbours(tensors):
            for taken in of_graphs([tensor for tensor in own if tensor.blocks]):
                yield self._backend.group(ranks), buckets_of(taken)

    def scatter_sum(self, tensors: Sharded, gradients: Tensors) -> Operation:
        return self._in_turn(
            self._sums([SumOfShares(own, gradients, group) for own in shared])
            for group, shared in self._shared(tensors)
        )

    def gather(self, tensors: Sharded, trained: Tensors, masters: Tensors | None) -> Operation:
        assert masters is not None, "a graph updates whole parameters, never rows of one"
        graphs = [
            self._backend.graph(
                InTurn([GatherOfShares(own, masters, trained, group) for own in shared]),
                "gathered weights",
            )
            for group, shared in self._shared(tensors)
        ]

        def run() -> None:
            for graph in graphs:
                graph(self._ticket).asnumpy()

        return run

    def _in_turn(self, graphs: Iterable[Graph]) -> Operation:
        made = list(graphs)

        def run() -> None:
            for graph in made:
                graph(self._ticket)

        return run

    def norm(
        self, columns: Sequence[Columns], copies: Sequence[int], group: Group
    ) -> Callable[[], float]:
        cell = GradientNorm(columns, copies, group, self._backend.kernels.squares())
        graph = self._backend.graph(cell, "gradient norm")
        return lambda: float(graph().asnumpy()[0])

    def adamw(self, tensors: Sequence[Updated], settings: AdamWSettings) -> Step:
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
