"""The optimizer of a rank's trained parameters: gradients summed over ranks, their norm, AdamW, and zeroing.

AdamW has decoupled weight decay (arXiv:1711.05101). Everything happens where the gradients are, in graphs on a device;
only moments that stay on the host bring AdamW there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWNumbers
from mindgrpo.training.gradient_sync import DeviceGradientSync, GradientSync, HostGradientSync
from mindgrpo.weights.local_weights import Weights, round_into


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
    ) -> None:
        self._weights, self._gradients, self._rounded = weights, gradients, rounded
        self._moments = first.arrays, second.arrays
        self._settings, self._backend = settings, backend

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        weights, gradients = self._weights.on_host(write=True), self._gradients.on_host(write=True)
        with weights as w, gradients as g:
            first, second = self._moments
            for i, run in enumerate(w.ranges):
                self._backend.kernels.adamw(
                    w.flat_buffers[i],
                    g.flat_buffers[i],
                    first.flat_buffers[i],
                    second.flat_buffers[i],
                    self._settings.at(update, lr, scale, run.decay),
                )
        if self._rounded is not None:
            round_into(self._rounded, self._weights)
            self._backend.synchronize()


class _AdamWCell(nn.Cell):
    """Updates weights and moments and zeroes gradients, one tensor after the other."""

    def __init__(
        self,
        tensors: Sequence[tuple[Any, Any, Any, Any, bool]],
        settings: AdamWSettings,
        kernels: Kernels,
    ) -> None:
        """Takes of each tensor (weight, gradient, first moment, second moment, whether the weight decays)."""
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

    def construct(self, scale: Any, *numbers: Any) -> Any:
        done = scale
        for i in range(len(self.weights)):
            gradient = ops.depend(self.grads[i] * scale, done)
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
    """Updates weights and zeroes gradients in a graph; another rounds the weights to those of a narrower dtype."""

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        first: Weights,
        second: Weights,
        backend: Backend,
        settings: AdamWSettings,
        rounded: Weights | None = None,
    ) -> None:
        roles = [role.parameters for role in (weights, gradients, first, second)]
        tensors = [(*(role[e.key] for role in roles), e.decay) for e in weights.fused]
        self._settings, self._kernels = settings, backend.kernels
        self._graph = backend.graph(_AdamWCell(tensors, settings, self._kernels), "optimizer")
        self._round = None
        if rounded is not None:
            narrow = [rounded.parameters[e.key] for e in weights.fused]
            cell = _RoundCell([tensor[0] for tensor in tensors], narrow)
            self._round = backend.graph(cell, "rounded weights")

    def step(self, update: int, lr: float, scale: float) -> None:
        numbers = self._settings.at(update, lr, scale)
        inputs = self._kernels.adamw_inputs(numbers)
        done = self._graph(Tensor(scale, ms.float32), *inputs)
        if self._round is not None:
            done = self._round(done)
        done.asnumpy()


def clear(gradients: Weights) -> None:
    """Makes all gradients zero, on the device."""
    for parameter in gradients.parameters.values():
        ops.assign(parameter, ops.zeros_like(parameter))


class AdamW:
    """`first` and `second` are the moments, arranged like the weights; with `on_host` in the host's memory.

    `rounded` gets the weights after every step, in its own dtype.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        backend: Backend,
        settings: AdamWSettings,
        on_host: bool = False,
        rounded: Weights | None = None,
    ) -> None:
        layout, rank = weights.layout, weights.rank
        self.first = Weights(layout, rank, backend, "first_moment", on_host_only=on_host)
        self.second = Weights(layout, rank, backend, "second_moment", on_host_only=on_host)
        self._gradients, self._backend = gradients, backend
        in_host_memory = gradients.pool.is_host_memory
        self._sync: GradientSync = (
            HostGradientSync(gradients, backend)
            if in_host_memory
            else DeviceGradientSync(gradients, backend)
        )
        adamw = HostAdamW if on_host or in_host_memory else DeviceAdamW
        roles = weights, gradients, self.first, self.second
        self._adamw = adamw(*roles, backend, settings, rounded)

    def sum_gradients(self) -> float:
        """Sums the accumulated gradients over the ranks; returns their 2-norm over the model."""
        return self._sync.sum()

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        self._adamw.step(update, lr, scale)

    def clear_gradients(self) -> None:
        if not self._gradients.pool.is_host_memory:
            clear(self._gradients)
            self._backend.synchronize()
            return
        for run in self._gradients.arrays.flat_buffers:
            run[...] = 0.0
