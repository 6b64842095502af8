"""The critic's loss as graph code; algorithm/gae.py computes the same in numpy, and a test compares the two."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops
from mindspore.ops.auto_generate import sum_ext


class ValueLoss(nn.Cell):
    """(values [M], zeros [M], *LossInputs) -> the loss, a float32 scalar summed over the M tokens.

    Of LossInputs, `old` are the values before the step's first update, and `advantages` the returns. Values count as
    moved at most by `clip` from the old ones where that makes the loss larger; None: as they are.
    """

    def __init__(self, clip: float | None) -> None:
        super().__init__()
        self.clip = clip

    def compute(self, values: Any, _: Any, inputs: Any) -> Any:
        """Computes the loss with LossInputs passed as one tuple."""
        old, returns, weights = inputs[0], inputs[2], inputs[3]
        in_loss = weights > 0
        # Masked before any product, because 0 * infinity is NaN.
        zeros = ops.zeros_like(values)
        gap = ops.where(in_loss, values - returns, zeros)
        terms = gap * gap
        if self.clip is not None:
            moved = ops.where(in_loss, values - old, zeros)
            clipped = ops.where(in_loss, old - returns, zeros) + ops.clamp(
                moved, -self.clip, self.clip
            )
            terms = ops.maximum(terms, clipped * clipped)
        return sum_ext(0.5 * terms * weights)
