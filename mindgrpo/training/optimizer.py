"""The optimizer of a rank's trained parameters: gradients summed over ranks, their norm, AdamW, and zeroing.

AdamW has decoupled weight decay (arXiv:1711.05101). Everything happens where the gradients are, in graphs on a device;
only moments that stay on the host bring AdamW there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWNumbers
from mindgrpo.training.gradient_sync import DeviceGradientSync, GradientSync, HostGradientSync
from mindgrpo.weights.local_weights import Weights, round_into


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


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
        settings = self._settings
        weights, gradients = self._weights.on_host(write=True), self._gradients.on_host(write=True)
        with weights as w, gradients as g:
            first, second = self._moments
            for i, run in enumerate(w.ranges):
                beta1, beta2, eps = settings.beta1, settings.beta2, settings.eps
                decay = settings.weight_decay if run.decay else 0.0
                self._backend.kernels.adamw(
                    w.flat_buffers[i],
                    g.flat_buffers[i],
                    first.flat_buffers[i],
                    second.flat_buffers[i],
                    AdamWNumbers(lr, beta1, beta2, eps, decay, update, scale),
                )
        if self._rounded is not None:
            round_into(self._rounded, self._weights)
            self._backend.synchronize()


class _AdamWCell(nn.Cell):
    """Adam's fused kernel adds eps to sqrt(v) before the bias correction, so eps arrives already corrected.

    `tensors` are (weight, gradient, first moment, second moment, whether the weight decays).
    """

    def __init__(
        self,
        tensors: Sequence[tuple[Any, Any, Any, Any, bool]],
        settings: AdamWSettings,
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


class _RoundCell(nn.Cell):
    """Assigns weights to parameters of a narrow dtype.

    In the optimizer's graph, which also reads the weights before it changes them, each would be copied first.
    """

    def __init__(self, weights: Sequence[Any], rounded: Sequence[Any]) -> None:
        super().__init__()
        self.weights, self.rounded = ms.ParameterTuple(weights), ms.ParameterTuple(rounded)

    def construct(self, done: Any) -> Any:
        for i in range(len(self.weights)):
            narrow = self.weights[i].astype(self.rounded[i].dtype)
            done = ops.depend(done, ops.assign(self.rounded[i], narrow))
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
        self._settings = settings
        self._graph = backend.graph(_AdamWCell(tensors, settings), "optimizer")
        self._round = None
        if rounded is not None:
            narrow = [rounded.parameters[e.key] for e in weights.fused]
            cell = _RoundCell([tensor[0] for tensor in tensors], narrow)
            self._round = backend.graph(cell, "rounded weights")

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
        done = self._graph(*(Tensor(number, ms.float32) for number in numbers))
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
