"""The optimizer of a rank's trained parameters: gradients summed over ranks, their norm, AdamW, and zeroing.

AdamW has decoupled weight decay (arXiv:1711.05101). Everything happens where the gradients are; only moments that stay
on the host bring AdamW there.
"""

from __future__ import annotations

from mindgrpo.backend.arithmetic.choose import arithmetic_of
from mindgrpo.backend.arithmetic.contract import Operation, Updated
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.training.gradient_sync import GradientSync
from mindgrpo.training.optimizer_shares import sharded_tensors
from mindgrpo.weights.local_weights import Weights


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
        self._backend, self._arithmetic = backend, arithmetic_of(gradients.pool, backend)
        self._sync = GradientSync(gradients, backend, sharded)
        w, g, first, second = (
            role.stored for role in (weights, gradients, self.first, self.second)
        )
        by_key = {tensor.whole.key: tensor for tensor in sharded}
        self._adamw = arithmetic_of(self.first.pool, backend).adamw(
            [
                Updated((w[k], g[k], first[k], second[k]), entry.decay, by_key.get(k))
                for k, entry in ((entry.key, entry) for entry in weights.fused)
            ],
            settings,
        )
        # What follows an update: rows go to all ranks, and are rounded on their way, or weights are rounded.
        self._after: list[Operation] = []
        if is_sharded:
            trained = (weights if rounded is None else rounded).stored
            masters = None if rounded is None else weights.stored
            self._after.append(self._arithmetic.gather(sharded, trained, masters))
        elif rounded is not None:
            pairs = [(rounded.stored[e.key], weights.stored[e.key]) for e in weights.fused]
            self._after.append(self._arithmetic.round(*map(list, zip(*pairs, strict=True))))

    def sum_gradients(self) -> float:
        """Sums the accumulated gradients over the ranks; returns their 2-norm over the model."""
        return self._sync.sum()

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies `scale` times the gradients, which are zero afterwards. `update` counts from 1."""
        self._adamw(update, lr, scale)
        self._hand_on()

    def _hand_on(self) -> None:
        for operation in self._after:
            operation()
        self._backend.synchronize()

    def weights_changed(self) -> None:
        """Rounds the weights into `rounded`; to be called when something else has changed them, by all ranks."""
        if self._rounded is not None:
            for weights in (self._weights, self._rounded):
                weights.pool.load()
            self._hand_on()

    def clear_gradients(self) -> None:
        self._arithmetic.clear([*self._gradients.stored.values()])
