"""The losses as graph code; algorithm/losses.py says the same in numpy and a test compares the two.

Only what a loss_config uses is in its graph: the choices are made while it is compiled.
"""

from __future__ import annotations

from typing import Any

from mindspore import nn, ops

from mindgrpo.algorithm.loss_config import LossConfig


class PolicyLoss(nn.Cell):
    """The loss of [N] tokens, float32 but `starts`; where `weights` is 0 a token adds nothing, whatever it holds.

    `rollout_is_weights` multiply the policy's term. `starts` int32 is the index of the first token of a token's sample
    and `shares` one over the sample's tokens that count; both are read at sequence level only, where a sample's tokens
    must all be here. Without `has_old` the ratio is 1 in value.
    """

    def __init__(self, loss_config: LossConfig, has_old: bool) -> None:
        super().__init__()
        self.low, self.high = 1.0 - loss_config.epsilon_low, 1.0 + loss_config.epsilon_high
        self.delta, self.dual_clip = loss_config.delta, loss_config.dual_clip
        self.beta, self.estimator = loss_config.beta, loss_config.kl_estimator
        self.entropy_coef = loss_config.entropy_coef
        self.is_cispo = loss_config.loss_type == "cispo"
        self.by_sequence = loss_config.by_sequence
        self.corrected = loss_config.corrected
        self.has_old = has_old

    def construct(
        self,
        logp: Any,
        entropy: Any,
        old: Any,
        reference: Any,
        advantages: Any,
        weights: Any,
        rollout_is_weights: Any,
        starts: Any,
        shares: Any,
    ) -> Any:
        in_loss = weights > 0
        # 0 * infinity is no zero, so what is not in the loss goes before anything is multiplied.
        zeros = ops.zeros_like(logp)
        advantages = ops.where(in_loss, advantages, zeros)
        if not self.has_old:
            old = ops.stop_gradient(logp)
        difference = ops.where(in_loss, logp - old, zeros)
        if self.by_sequence:
            sums = ops.unsorted_segment_sum(difference * shares, starts, logp.shape[0])
            difference = ops.gather(sums, starts, 0)
        ratio = ops.exp(difference)
        clipped = ops.clamp(ratio, self.low, self.high)
        if self.is_cispo:
            terms = -ops.stop_gradient(clipped) * advantages * ops.where(in_loss, logp, zeros)
        else:
            if self.delta is not None:
                ratio = ops.clamp(ratio, None, self.delta)
            gain = ops.minimum(ratio * advantages, clipped * advantages)
            if self.dual_clip is not None:
                gain = ops.maximum(gain, self.dual_clip * ops.minimum(advantages, zeros))
            terms = -gain
        if self.corrected:
            terms = terms * rollout_is_weights
        if self.beta > 0:
            gap = ops.where(in_loss, reference - logp, zeros)
            if self.estimator == "k1":
                terms = terms - self.beta * gap
            elif self.estimator == "k2":
                terms = terms + 0.5 * self.beta * gap * gap
            else:
                terms = terms + self.beta * (ops.exp(gap) - gap - 1.0)
        if self.entropy_coef > 0:
            terms = terms - self.entropy_coef * ops.where(in_loss, entropy, zeros)
        return (terms * weights).sum()
