"""AdamW with decoupled weight decay (arXiv:1711.05101) over a rank's runs of parameters: a kernel, or one graph.

Gradients arrive summed over ranks; the factor that clipping asks for is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.graph import Graph
from mindgrpo.backend.kernels.contract import AdamWNumbers
from mindgrpo.weights.local_weights import Weights


@dataclass(frozen=True)
class AdamWSettings:
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class _AdamWGraph(nn.Cell):
    """Adam's fused kernel adds eps to sqrt(v) before the bias correction, so eps arrives already corrected."""

    def __init__(
        self, runs: list[tuple[Any, Any, Any, Any, bool]], settings: AdamWSettings
    ) -> None:
        super().__init__()
        self.weights = ms.ParameterTuple([run[0] for run in runs])
        self.grads = ms.ParameterTuple([run[1] for run in runs])
        self.first = ms.ParameterTuple([run[2] for run in runs])
        self.second = ms.ParameterTuple([run[3] for run in runs])
        self.decays = tuple(run[4] and settings.weight_decay > 0 for run in runs)
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
        return done


class AdamW:
    """`first` and `second` are the moments, arranged like the weights. `update` counts from 1.

    `on_host`: they stay in the host's memory and the weights are updated there, whatever the device; what travels
    then is weights and gradients, half as much as the moments would, and the device has room for other things.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        backend: Backend,
        settings: AdamWSettings,
        on_host: bool = False,
    ) -> None:
        self.first = Weights(weights.layout, weights.rank, backend, on_host=on_host)
        self.second = Weights(weights.layout, weights.rank, backend, on_host=on_host)
        self._weights = weights
        self._settings, self._kernels = settings, backend.kernels
        self._gradients = gradients
        self._graph: Graph | None = None
        self._runs: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        if on_host or (backend.kernels.has_adamw and backend.shares_memory):
            roles_runs = zip(
                weights.flat_buffers,
                gradients.flat_buffers,
                self.first.flat_buffers,
                self.second.flat_buffers,
                strict=True,
            )
            self._runs = list(roles_runs)
            return
        roles = {"weight": weights, "grad": gradients, "m": self.first, "v": self.second}
        runs = []
        for name, decays in self._names(weights, backend):
            tensors = [
                backend.parameter(self._array(role, name), f"{label}.{name}", False)
                for label, role in roles.items()
            ]
            runs.append((*tensors, decays))
        self._graph = backend.graph(_AdamWGraph(runs, settings), "optimizer")

    @staticmethod
    def _names(weights: Weights, backend: Backend) -> list[tuple[str | int, bool]]:
        """What one operation updates at once: a whole run where memory is shared, else each tensor."""
        if backend.shares_memory:
            return [(i, i == 0) for i, run in enumerate(weights.flat_buffers) if run.size]
        return [(entry.key, entry.decay) for entry in weights.fused]

    @staticmethod
    def _array(weights: Weights, name: str | int) -> np.ndarray:
        return weights.flat_buffers[name] if isinstance(name, int) else weights.tensors[name]

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards."""
        settings = self._settings
        if self._graph is None:
            self._weights.pool.pull()
            for decays, arrays in zip((True, False), self._runs, strict=True):
                decay = settings.weight_decay if decays else 0.0
                beta1, beta2, eps = settings.beta1, settings.beta2, settings.eps
                self._kernels.adamw(
                    *arrays, AdamWNumbers(lr, beta1, beta2, eps, decay, update, scale)
                )
            self._weights.pool.push()
            self._gradients.pool.push()
            return
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
        for gradients in self._gradients.flat_buffers:
            gradients[...] = 0.0
        self._gradients.pool.push()
