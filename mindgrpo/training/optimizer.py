"""The optimizer of a rank's trained parameters: reduces gradients, computes their norm, applies AdamW, zeroes them.

AdamW has decoupled weight decay (arXiv:1711.05101). Everything runs where the gradients are, except that AdamW runs on
the host when its moments stay there.
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
    """Allocates AdamW's first and second moments, float32, in the layout of the weights that this rank updates."""
    layout = gradients.layout.split_over_data() if is_sharded else gradients.layout
    first, second = (
        Weights(layout, gradients.rank, backend, name, on_host_only=on_host)
        for name in ("first_moment", "second_moment")
    )
    return first, second


class AdamW:
    """AdamW on one rank: `first` and `second` moments lie like the weights, in host memory with `on_host`.

    `weights` are the float32 master weights; every step rounds them into `rounded`, in the latter's dtype. With
    `is_sharded` (ZeRO-1, optimizer_shares.py) the moments cover only this rank's share of the rows, and so do `weights`
    if there is a `rounded`; without it `weights` are whole and have to be in host memory.
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
        # Run after every update: all-gather the owned rows, rounding them on the way, or only round.
        self._after: list[Operation] = []
        if is_sharded:
            trained = (weights if rounded is None else rounded).stored
            masters = None if rounded is None else weights.stored
            self._after.append(self._arithmetic.gather(sharded, trained, masters))
        elif rounded is not None:
            pairs = [(rounded.stored[e.key], weights.stored[e.key]) for e in weights.fused]
            self._after.append(self._arithmetic.round(*map(list, zip(*pairs, strict=True))))

    def sum_gradients(self) -> float:
        """Reduces the accumulated gradients over the ranks; returns their global 2-norm."""
        return self._sync.sum()

    def step(self, update: int, lr: float, scale: float) -> None:
        """Applies AdamW with the gradients times `scale`, then zeroes them. `update` is AdamW's step, from 1."""
        self._adamw(update, lr, scale)
        self._hand_on()

    def _hand_on(self) -> None:
        for operation in self._after:
            operation()
        self._backend.synchronize()

    def weights_changed(self) -> None:
        """Rounds `weights` into `rounded` again. Collective, after anything but `step` has changed `weights`."""
        if self._rounded is not None:
            for weights in (self._weights, self._rounded):
                weights.pool.load()
            self._hand_on()

    def clear_gradients(self) -> None:
        self._arithmetic.clear([*self._gradients.stored.values()])
