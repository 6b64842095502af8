"""The optimizer of a rank's trained parameters: gradients summed over ranks, their norm, AdamW, and zeroing.

AdamW has decoupled weight decay (arXiv:1711.05101). Everything happens where the gradients are, in graphs on a device;
only moments that stay on the host bring AdamW there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend, Graph
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWNumbers
from mindgrpo.training.gradient_sync import (
    DeviceGradientSync,
    GradientSync,
    HostGradientSync,
)
from mindgrpo.training.optimizer_shares import (
    DeviceHandOut,
    HostHandOut,
    OwnRows,
    ShardedTensor,
    of_graphs,
    sharded_tensors,
)
from mindgrpo.weights.local_weights import WeightArrays, Weights, round_into


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def at(self, update: int, lr: float, scale: float, decays: bool = True) -> AdamWNumbers:
        """Returns the numbers of one step, of a parameter that decays or does not."""
        decay = self.weight_decay if decays else 0.0
        return AdamWNumbers(lr, self.beta1, self.beta2, self.eps, decay, update, scale)


# Whether the weights decay; weights, gradients and both moments, flat.
_Run = tuple[bool, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]


class HostAdamW:
    """Updates arrays of the host by a kernel; what lies in a device's memory comes to the host and goes back.

    With moments that stay on the host, weights and gradients travel, half as much as the moments would.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        first: Weights,
        second: Weights,
        backend: Backend,
        settings: AdamWSettings,
        rounded: Weights | None = None,
        sharded: Sequence[ShardedTensor] = (),
    ) -> None:
        self._weights, self._gradients, self._rounded = weights, gradients, rounded
        self._moments = first.arrays, second.arrays
        self._settings, self._backend = settings, backend
        self._sharded = sharded
        self._updates_whole = weights.layout == gradients.layout

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        weights, gradients = self._weights.on_host(write=True), self._gradients.on_host(write=True)
        with weights as w, gradients as g:
            runs = self._own_rows(w, g) if self._sharded else self._ranges(w, g)
            for decay, arrays in runs:
                numbers = self._settings.at(update, lr, scale, decay)
                self._backend.kernels.adamw(*arrays, numbers)
            if self._sharded:
                # Of the others' rows they are sums that nobody needs.
                for run in g.flat_buffers:
                    run[...] = 0.0
        if self._rounded is not None:
            round_into(self._rounded, self._weights)
            self._backend.synchronize()

    def _ranges(self, w: WeightArrays, g: WeightArrays) -> Iterator[_Run]:
        first, second = self._moments
        for i, run in enumerate(w.ranges):
            flat = w.flat_buffers[i], g.flat_buffers[i]
            yield run.decay, (*flat, first.flat_buffers[i], second.flat_buffers[i])

    def _own_rows(self, w: WeightArrays, g: WeightArrays) -> Iterator[_Run]:
        for tensor in self._sharded:
            weight, gradient, first, second = (
                role.tensors[tensor.whole.key] for role in (w, g, *self._moments)
            )
            for start, stop, at in tensor.own_rows():
                rows, share = slice(start, stop), slice(at, at + stop - start)
                own = weight[rows if self._updates_whole else share].reshape(-1)
                moments = first[share].reshape(-1), second[share].reshape(-1)
                yield tensor.whole.decay, (own, gradient[rows].reshape(-1), *moments)


class _AdamWCell(nn.Cell):
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


class _RoundCell(nn.Cell):
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


class DeviceAdamW:
    """Updates weights and zeroes gradients in graphs; others round the weights to those of a narrower dtype."""

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        first: Weights,
        second: Weights,
        backend: Backend,
        settings: AdamWSettings,
        rounded: Weights | None = None,
        sharded: Sequence[ShardedTensor] = (),
    ) -> None:
        roles = [role.parameters for role in (weights, gradients, first, second)]
        tensors = [(*(role[e.key] for role in roles), e.decay) for e in weights.fused]
        self._settings, self._kernels = settings, backend.kernels
        self._graphs: list[Graph] = []
        for taken, shares in zip_longest(of_graphs(tensors), of_graphs(sharded)):
            own_rows = OwnRows(shares) if sharded else None
            cell = _AdamWCell(taken, settings, self._kernels, own_rows)
            self._graphs.append(backend.graph(cell, "optimizer"))
        self._rounding: list[Graph] = []
        if rounded is not None:
            pairs = [(roles[0][e.key], rounded.parameters[e.key]) for e in weights.fused]
            for own in of_graphs(pairs):
                cell = _RoundCell(*zip(*own, strict=True))
                self._rounding.append(backend.graph(cell, "rounded weights"))

    def step(self, update: int, lr: float, scale: float) -> None:
        numbers = self._settings.at(update, lr, scale)
        inputs = self._kernels.adamw_inputs(numbers)
        scaling = done = Tensor(scale, ms.float32)
        for graph in self._graphs:
            done = graph(scaling, *inputs)
        for graph in self._rounding:
            done = graph(done)
        done.asnumpy()


def clear(gradients: Weights) -> None:
    """Makes all gradients zero, on the device."""
    for parameter in gradients.parameters.values():
        ops.assign(parameter, ops.zeros_like(parameter))


def moments_of(
    gradients: Weights, backend: Backend, on_host: bool, is_sharded: bool
) -> tuple[Weights, Weights]:
    """Makes the memory of both moments, which are arranged like what the rank updates."""
    layout = gradients.layout.split_over_data() if is_sharded else gradients.layout
    first, second = (
        Weights(layout, gradients.rank, backend, name, on_host_only=on_host)
        for name in ("first_moment", "second_moment")
    )
    return first, second


class AdamW:
    """`first` and `second` are the moments, arranged like the weights; with `on_host` in the host's memory.

    `rounded` gets the weights after every step, in its own dtype. `is_sharded`: this rank has the moments of its share
    of the gradients' parameters alone (optimizer_shares.py). Its `weights` are then that share, or all of them where
    there is no `rounded`, which needs memory of the host's.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        backend: Backend,
        settings: AdamWSettings,
        on_host: bool = False,
        rounded: Weights | None = None,
        is_sharded: bool = False,
        moments: tuple[Weights, Weights] | None = None,
    ) -> None:
        layout, rank = gradients.layout, weights.rank
        sharded = sharded_tensors(layout, rank) if is_sharded else ()
        moments = moments or moments_of(gradients, backend, on_host, is_sharded)
        self.first, self.second = moments
        self._weights, self._gradients, self._rounded = weights, gradients, rounded
        self._backend = backend
        in_host_memory = gradients.pool.is_host_memory
        sync = HostGradientSync if in_host_memory else DeviceGradientSync
        self._sync: GradientSync = sync(gradients, backend, sharded)
        self._hand_out: HostHandOut | DeviceHandOut | None = None
        if is_sharded and in_host_memory:
            self._hand_out = HostHandOut(
                sharded, rounded or weights, None if rounded is None else weights, backend
            )
        elif is_sharded:
            assert rounded is not None
            self._hand_out = DeviceHandOut(sharded, rounded, weights, backend)
        adamw = HostAdamW if on_host or in_host_memory else DeviceAdamW
        roles = weights, gradients, self.first, self.second
        # What is handed out is rounded on its way.
        copied = None if is_sharded else rounded
        self._adamw = adamw(*roles, backend, settings, copied, sharded)

    def sum_gradients(self) -> float:
        """Sums the accumulated gradients over the ranks; returns their 2-norm over the model."""
        return self._sync.sum()

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        self._adamw.step(update, lr, scale)
        if self._hand_out is not None:
            self._hand_out.run()

    def weights_changed(self) -> None:
        """Rounds the weights into `rounded`; to be called when something else has changed them, by all ranks."""
        if self._rounded is None:
            return
        if self._hand_out is None:
            round_into(self._rounded, self._weights)
        else:
            for weights in (self._weights, self._rounded):
                weights.pool.load()
            self._hand_out.run()
        self._backend.synchronize()

    def clear_gradients(self) -> None:
        if not self._gradients.pool.is_host_memory:
            clear(self._gradients)
            self._backend.synchronize()
            return
        for run in self._gradients.arrays.flat_buffers:
            run[...] = 0.0
