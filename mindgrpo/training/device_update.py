"""Sums, norm, AdamW and zeroing of gradients in graphs, on the device: no weight or gradient passes the host.

The same steps as gradient_sync.py and adamw.py make on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Group
from mindgrpo.training.adamw import AdamWSettings
from mindgrpo.training.gradient_sync import sums_of
from mindgrpo.weights.local_weights import Weights

# What is summed over ranks in one call: large enough for the links, small beside the gradients.
BUCKET_BYTES = 64 << 20


class _SumOverGroup(nn.Cell):
    """Sums parts of parameters over a group, in buckets, one after the other; gives what the last one ends with.

    `parts` are (parameter, its slices, elements).
    """

    def __init__(self, parts: Sequence[tuple[Any, tuple[slice, ...], int]], group: Group) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([part[0] for part in parts])
        self.slices = tuple(part[1] for part in parts)
        self.buckets = _buckets([part[2] for part in parts])
        self.total = group.sum_cell()

    def construct(self, ticket: Any) -> Any:
        for bucket in self.buckets:
            flat = []
            for i in bucket:
                flat.append(self.parameters[i][self.slices[i]].reshape(-1))
            # The calls of all ranks need one order, which independent operations of a graph do not have.
            total = self.total(ops.depend(ops.concat(flat), ticket))
            start = 0
            for i in bucket:
                part = self.parameters[i][self.slices[i]]
                self.parameters[i][self.slices[i]] = total[start : start + part.size].reshape(
                    part.shape
                )
                start += part.size
            ticket = total[:1]
        return ticket


def _buckets(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Indices of neighbours that share a bucket."""
    buckets: list[list[int]] = [[]]
    room = BUCKET_BYTES // 4
    for index, size in enumerate(sizes):
        if buckets[-1] and size > room:
            buckets.append([])
            room = BUCKET_BYTES // 4
        buckets[-1].append(index)
        room -= size
    return tuple(map(tuple, buckets))


class _Norm(nn.Cell):
    """The 2-norm over the model: squares of `parts`, each divided by the number of its copies, summed over ranks."""

    def __init__(
        self, parts: Sequence[tuple[Any, tuple[slice, ...] | None, int]], group: Group
    ) -> None:
        super().__init__()
        self.parameters = ms.ParameterTuple([part[0] for part in parts])
        self.slices = tuple(part[1] for part in parts)
        self.factors = tuple(1.0 / part[2] for part in parts)
        self.is_alone = group.size == 1
        self.total = group.sum_cell()
        self.zero = Tensor([0.0], ms.float32)

    def construct(self) -> Any:
        square = self.zero
        for i in range(len(self.factors)):
            values = self.parameters[i]
            if self.slices[i] is not None:
                values = values[self.slices[i]]
            square = square + (values * values).sum() * self.factors[i]
        if not self.is_alone:
            square = self.total(square)
        return ops.sqrt(square)


class DeviceGradientSync:
    """A GradientSync in graphs."""

    def __init__(self, gradients: Weights, backend: Backend) -> None:
        sums, parameters = sums_of(gradients), gradients.parameters
        self._totals = []

        def add(ranks: tuple[int, ...], parts: list[tuple[Any, tuple[slice, ...], int]]) -> None:
            if len(ranks) > 1 and parts:
                cell = _SumOverGroup(parts, backend.group(ranks))
                self._totals.append(backend.graph(cell, "sum of gradients"))

        for ranks, names in sums.shared:
            regions = [(gradients.region(name), gradients.boxes[name].size) for name in names]
            add(ranks, [(parameters[r.key], r.slices, size) for r, size in regions])
        whole = [(parameters[e.key], (slice(None),), e.size) for e in gradients.fused]
        add(sums.data, whole)
        terms = [
            (parameters[t.key], gradients.region(t.name).slices if t.name else None, t.copies)
            for t in sums.norm_terms
        ]
        self._norm = backend.graph(_Norm(terms, backend.group(sums.replica)), "gradient norm")
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
