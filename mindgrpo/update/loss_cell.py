"""GRPO's loss as graph code; algorithm/loss.py says the same in numpy and a test holds the two equal."""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops


class GrpoLoss(nn.Cell):
    """All inputs float32 [N]; positions of weight 0 are no completion tokens and add nothing, whatever they hold."""

    def __init__(self, epsilon_low: float, epsilon_high: float, beta: float, has_old: bool) -> None:
        super().__init__()
        self.low, self.high = 1.0 - epsilon_low, 1.0 + epsilon_high
        self.beta = beta
        self.has_old = has_old

    def construct(self, logp: Any, old: Any, reference: Any, advantages: Any, weights: Any) -> Any:
        counted = weights > 0
        # 0 * infinity is no zero, so what is not counted goes before anything is multiplied.
        advantages = ops.where(counted, advantages, ops.zeros_like(advantages))
        if not self.has_old:
            old = ops.stop_gradient(logp)
        ratio = ops.exp(ops.where(counted, logp - old, ops.zeros_like(logp)))
        clipped = ops.clamp(ratio, self.low, self.high)
        terms = -ops.minimum(ratio * advantages, clipped * advantages)
        if self.beta > 0:
            gap = ops.where(counted, reference - logp, ops.zeros_like(logp))
            terms = terms + self.beta * (ops.exp(gap) - gap - 1.0)
        return (terms * weights).sum()
