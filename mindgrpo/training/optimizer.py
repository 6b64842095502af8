"""The optimizer of a rank's trained parameters: gradients summed over ranks, their norm, AdamW, and zeroing.

Everything happens where the gradients are; only moments that stay on the host bring AdamW there.
"""

from __future__ import annotations

from mindgrpo.backend.contract import Backend
from mindgrpo.training.adamw import AdamWSettings, HostAdamW
from mindgrpo.training.device_update import DeviceAdamW, DeviceGradientSync, clear
from mindgrpo.training.gradient_sync import GradientSync, HostGradientSync
from mindgrpo.weights.local_weights import Weights

__all__ = ["AdamW", "AdamWSettings"]


class AdamW:
    """`first` and `second` are the moments, arranged like the weights; with `on_host` in the host's memory."""

    def __init__(
        self,
        weights: Weights,
        gradients: Weights,
        backend: Backend,
        settings: AdamWSettings,
        on_host: bool = False,
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
        self._adamw = adamw(weights, gradients, self.first, self.second, backend, settings)

    def sum_gradients(self) -> float:
        """Makes the accumulated gradients those of the whole batch; their 2-norm over the model."""
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
