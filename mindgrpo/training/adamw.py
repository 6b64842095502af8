"""AdamW with decoupled weight decay (arXiv:1711.05101) on arrays of the host.

Gradients arrive summed over ranks; the factor that clipping asks for is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWNumbers
from mindgrpo.weights.local_weights import Weights


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
    ) -> None:
        self._weights, self._gradients = weights, gradients
        self._moments = first.arrays, second.arrays
        self._settings, self._adamw = settings, backend.kernels.adamw

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        settings = self._settings
        weights, gradients = self._weights.on_host(write=True), self._gradients.on_host(write=True)
        with weights as w, gradients as g:
            first, second = self._moments
            for i, run in enumerate(w.ranges):
                beta1, beta2, eps = settings.beta1, settings.beta2, settings.eps
                decay = settings.weight_decay if run.decay else 0.0
                self._adamw(
                    w.flat_buffers[i],
                    g.flat_buffers[i],
                    first.flat_buffers[i],
                    second.flat_buffers[i],
                    AdamWNumbers(lr, beta1, beta2, eps, decay, update, scale),
                )
