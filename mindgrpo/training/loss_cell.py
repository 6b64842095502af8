"""The losses as graph code; algorithm/loss.py says the same in numpy and a test holds the two equal.

Only what an objective uses is in its graph: the choices are made while it is compiled.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.algorithm.loss_config import Objective


class PolicyLoss(nn.Cell):
    """All inputs [N], float32 but `starts`; positions of weight 0 are no completion tokens and add nothing, whatever
    they hold.

    `factors` weigh the policy's term. `starts` int32 is the place of the first token of a token's sample and `shares`
    one over the sample's length; both are read at sequence level only, where a sample's tokens must all be here.
    Without `has_old` the ratio is 1 in value.
    """

    def __init__(self, objective: Objective, has_old: bool) -> None:
        super().__init__()
        self.low, self.high = 1.0 - objective.epsilon_low, 1.0 + objective.epsilon_high
        self.delta, self.dual_clip = objective.delta, objective.dual_clip
        self.beta, self.estimator = objective.beta, objective.kl_estimator
        self.entropy_coef = objective.entropy_coef
        self.is_cispo = objective.loss_type == "cispo"
        self.by_sequence = objective.by_sequence
        self.corrected = objective.corrected
        self.has_old = has_old

    def construct(
        self,
        logp: Any,
        entropy: Any,
        old: Any,
        reference: Any,
        advantages: Any,
        weights: Any,
        factors: Any,
        starts: Any,
        shares: Any,
    ) -> Any:
        counted = weights > 0
        # 0 * infinity is no zero, so what is not counted goes before anything is multiplied.
        zeros = ops.zeros_like(logp)
        advantages = ops.where(counted, advantages, zeros)
        if not self.has_old:
            old = ops.stop_gradient(logp)
        difference = ops.where(counted, logp - old, zeros)
        if self.by_sequence:
            sums = ops.unsorted_segment_sum(difference * shares, starts, logp.shape[0])
            difference = ops.gather(sums, starts, 0)
        ratio = ops.exp(difference)
        clipped = ops.clamp(ratio, self.low, self.high)
        if self.is_cispo:
            terms = -ops.stop_gradient(clipped) * advantages * ops.where(counted, logp, zeros)
        else:
            if self.delta is not None:
                ratio = ops.clamp(ratio, None, self.delta)
            gain = ops.minimum(ratio * advantages, clipped * advantages)
            if self.dual_clip is not None:
                gain = ops.maximum(gain, self.dual_clip * ops.minimum(advantages, zeros))
            terms = -gain
        if self.corrected:
            terms = terms * factors
        if self.beta > 0:
            gap = ops.where(counted, reference - logp, zeros)
            if self.estimator == "k1":
                terms = terms - self.beta * gap
            elif self.estimator == "k2":
                terms = terms + 0.5 * self.beta * gap * gap
            else:
                terms = terms + self.beta * (ops.exp(gap) - gap - 1.0)
        if self.entropy_coef > 0:
            terms = terms - self.entropy_coef * ops.where(counted, entropy, zeros)
        return (terms * weights).sum()
