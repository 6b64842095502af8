"""Sums, norm, AdamW and zeroing of gradients in graphs, on the device: no weight or gradient passes the host.

The same steps as gradient_sync.py and adamw.py make on arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Graph, Group
from mindgrpo.training.adamw import AdamWSettings
from mindgrpo.training.buckets import buckets
from mindgrpo.training.gradient_sync import sums_of
from mindgrpo.weights.local_weights import StoredTensor, Weights


@dataclass(frozen=True)
class _Columns:
    """Ranges [start, stop) of a parameter's columns, in order; `shape` is the parameter's on the device."""

    parameter: Any
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def size(self, start: int, stop: int) -> int:
        return int(np.prod(self.shape[:-1])) * (stop - start)


class _SumOverGroup(nn.Cell):
    """Sums columns of parameters over a group, in buckets, one after the other; gives what the last one ends with."""

    def __init__(self, columns: Sequence[_Columns], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.ranges = tuple(own.ranges for own in columns)
        self.outer = tuple(own.shape[:-1] for own in columns)
        self.widths = tuple(own.shape[-1] for own in columns)
        self.sizes = tuple(tuple(own.size(*one) for one in own.ranges) for own in columns)
        self.buckets = buckets([sum(sizes) for sizes in self.sizes])
        self.total = group.sum_cell()

    def construct(self, ticket: Any) -> Any:
        for bucket in self.buckets:
            flat = []
            for i in bucket:
                for start, stop in self.ranges[i]:
                    flat.append(self.parameters[i][..., start:stop].reshape(-1))
            # The calls of all ranks need one order, which independent operations of a graph do not have.
            total = self.total(ops.depend(ops.concat(flat), ticket))
            ticket = total[:1]
            begin = 0
            for i in bucket:
                # Read once and written once: a graph does not promise an order between the two of one parameter.
                old, cursor, columns = self.parameters[i], 0, []
                for number in range(len(self.ranges[i])):
                    start, stop = self.ranges[i][number]
                    if start > cursor:
                        columns.append(old[..., cursor:start])
                    end = begin + self.sizes[i][number]
                    columns.append(total[begin:end].reshape((*self.outer[i], stop - start)))
                    begin, cursor = end, stop
                if cursor < self.widths[i]:
                    columns.append(old[..., cursor:])
                ticket = ops.depend(ticket, ops.assign(old, ops.concat(columns, -1)))
        return ticket


class _Norm(nn.Cell):
    """The 2-norm over the model: squares of columns, divided by the number of their copies, summed over ranks."""

    def __init__(self, columns: Sequence[_Columns], copies: Sequence[int], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([own.parameter for own in columns])
        self.columns = tuple(own.ranges[0] for own in columns)
        self.factors = tuple(1.0 / number for number in copies)
        self.is_alone = group.size == 1
        self.total = group.sum_cell()
        self.zero = Tensor([0.0], ms.float32)

    def construct(self) -> Any:
        square = self.zero
        for i in range(len(self.factors)):
            start, stop = self.columns[i]
            values = self.parameters[i][..., start:stop]
            square = square + (values * values).sum() * self.factors[i]
        if not self.is_alone:
            square = self.total(square)
        return ops.sqrt(square)


def _columns_of(gradients: Weights, entry: StoredTensor, names: Collection[str] | None) -> _Columns:
    """Those of the parameters `names`, neighbours as one; all of them where it is None."""
    ranges: list[tuple[int, int]] = []
    for spec, start, width in entry.columns():
        if names is not None and spec.name not in names:
            continue
        stop = start + width
        if ranges and ranges[-1][1] == start:
            start, _ = ranges.pop()
        ranges.append((start, stop))
    return _Columns(gradients.parameters[entry.key], entry.shape, tuple(ranges))


class DeviceGradientSync:
    """A GradientSync in graphs. What a tensor holds beside its parameters' parts is padding, with no gradient."""

    def __init__(self, gradients: Weights, backend: Backend) -> None:
        sums = sums_of(gradients)
        self._totals: list[Graph] = []

        def add(ranks: tuple[int, ...], columns: list[_Columns]) -> None:
            summed = [own for own in columns if own.ranges]
            if len(ranks) > 1 and summed:
                cell = _SumOverGroup(summed, backend.group(ranks))
                self._totals.append(backend.graph(cell, "sum of gradients"))

        for ranks, names in sums.shared:
            add(ranks, [_columns_of(gradients, entry, names) for entry in gradients.fused])
        for axes, ranks in sums.data.items():
            tensors = [entry for entry in gradients.fused if entry.data_axes == axes]
            add(ranks, [_columns_of(gradients, entry, None) for entry in tensors])
        entries = {entry.key: entry for entry in gradients.fused}
        terms = [
            _columns_of(gradients, entries[term.key], term.name and (term.name,))
            for term in sums.norm_terms
        ]
        copies = [term.copies for term in sums.norm_terms]
        cell = _Norm(terms, copies, backend.group(sums.norm_ranks))
        self._norm = backend.graph(cell, "gradient norm")
        self._ticket = Tensor([0.0], ms.float32)

    def sum(self) -> float:
        for total in self._totals:
            total(self._ticket)
        return float(self._norm().asnumpy()[0])


class _AdamWCell(nn.Cell):
    """Adam's fused kernel adds eps to sqrt(v) before the bias correction, so eps arrives already corrected.

    `tensors` are (weight, gradient, first moment, second moment, whether the weight decays).
    """

    def __init__(
        self, tensors: Sequence[tuple[Any, Any, Any, Any, bool]], settings: AdamWSettings
    ) -> None:
        super().__init__()
        self.weights = ms.ParameterTuple([entry[0] for entry in tensors])
        self.grads = ms.ParameterTuple([entry[1] for entry in tensors])
        self.first = ms.ParameterTuple([entry[2] for entry in tensors])
        self.second = ms.ParameterTuple([entry[3] for entry in tensors])
        self.decays = tuple(entry[4] and settings.weight_decay > 0 for entry in tensors)
        self.beta1 = Tensor(settings.beta1, ms.float32)
        self.beta2 = Tensor(settings.beta2, ms.float32)
        self.adam = ops.Adam()

    def construct(self, lr: Any, power1: Any, power2: Any, eps: Any, keep: Any, scale: Any) -> Any:
        done = lr
        for i in range(len(self.weights)):
            weight = self.weights[i]
            if self.decays[i]:
                done = ops.depend(done, ops.assign(weight, weight * keep))
            gradient = ops.depend(self.grads[i] * scale, done)
            updated = self.adam(
                weight,
                self.first[i],
                self.second[i],
                power1,
                power2,
                lr,
                self.beta1,
                self.beta2,
                eps,
                gradient,
            )
            done = ops.depend(done, updated)
            zero = ops.depend(ops.zeros_like(self.grads[i]), done)
            done = ops.depend(done, ops.assign(self.grads[i], zero))
        return done


class DeviceAdamW:
    """One graph that updates a rank's weights and empties its gradients; see adamw.py."""

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        first: Weights,
        second: Weights,
        backend: Backend,
        settings: AdamWSettings,
    ) -> None:
        roles = [role.parameters for role in (weights, gradients, first, second)]
        tensors = [(*(role[e.key] for role in roles), e.decay) for e in weights.fused]
        self._settings = settings
        self._graph = backend.graph(_AdamWCell(tensors, settings), "optimizer")

    def step(self, update: int, lr: float, scale: float) -> None:
        settings = self._settings
        power1, power2 = settings.beta1**update, settings.beta2**update
        numbers = (
            lr,
            power1,
            power2,
            settings.eps * float(np.sqrt(1.0 - power2)),
            1.0 - lr * settings.weight_decay,
            scale,
        )
        self._graph(*(Tensor(number, ms.float32) for number in numbers)).asnumpy()


def clear(gradients: Weights) -> None:
    """Makes all gradients zero, on the device."""
    for parameter in gradients.parameters.values():
        ops.assign(parameter, ops.zeros_like(parameter))
