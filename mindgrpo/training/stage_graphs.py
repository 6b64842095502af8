"""A pipeline stage's graphs: forward, backward with accumulation, and on the last stage the loss.

Each is compiled once for one micro-batch shape; between graphs pipeline.py schedules and communicates.
algorithm/losses.py computes the same losses in numpy, and a test compares the two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn, ops

from mindgrpo.algorithm.loss_config import LossConfig
from mindgrpo.models.decoder import HeadInputs, LogProbStage, Stage, StageInputs


class LossInputs(NamedTuple):
    """Holds what the loss of [M] tokens reads beside log-probs and entropies, float32 but `starts`.

    Where `weights` is 0 a token adds nothing, whatever it holds. `rollout_is_weights` multiply the policy's term.
    `starts` int32 is the index of the first token of a token's sample and `shares` one over the sample's tokens that
    count; both are read at sequence level only, where a sample's tokens must all be here.
    """

    old: Any
    reference: Any
    advantages: Any
    weights: Any
    rollout_is_weights: Any
    starts: Any
    shares: Any


class PolicyLoss(nn.Cell):
    """(log p [M], entropy [M], *LossInputs) -> the loss. Without `has_old` the ratio is 1 in value."""

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

    def construct(self, logp: Any, entropy: Any, *inputs: Any) -> Any:
        return self.compute(logp, entropy, inputs)

    def compute(self, logp: Any, entropy: Any, inputs: Any) -> Any:
        """Computes the same from LossInputs as one tuple, as Stage takes its inputs."""
        old, reference, advantages, weights, rollout_is_weights, starts, shares = inputs
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


def _float32(gradient: Any, unscaled: float) -> Any:
    gradient = gradient.astype(ms.float32)
    if unscaled != 1.0:
        gradient = gradient * unscaled
    return gradient


class StageBackward(nn.Cell):
    """(x, dy, *StageInputs) -> dx, of a stage that is not the last; adds its gradients to `accumulators`.

    The forward pass is done again inside, so nothing but x is kept between the two. The first stage's x is token ids
    and has no gradient: what it returns is of no use. dy and dx are `scale` times the gradients, as in LossStep.
    """

    def __init__(
        self, stage: Stage, parameters: list[Any], accumulators: list[Any], scale: float = 1.0
    ) -> None:
        super().__init__()
        self.unscaled = 1.0 / scale
        self.stage = stage
        self.is_first = stage.is_first
        self.parameters_of_stage = ms.ParameterTuple(parameters)
        self.accumulators = ms.ParameterTuple(accumulators)
        self.gradient = ops.GradOperation(
            get_all=not stage.is_first, get_by_list=True, sens_param=True
        )

    def forward(self, x: Any, inputs: Any) -> Any:
        return self.stage.compute(x, inputs)

    def construct(self, x: Any, dy: Any, *inputs: Any) -> Any:
        # As one tuple: MindSpore never frees a graph, nor its weights, that passes `*inputs` on to a gradient.
        grads = self.gradient(self.forward, self.parameters_of_stage)(x, inputs, dy)
        dx = x
        if not self.is_first:
            of_inputs, grads = grads
            dx = of_inputs[0]
        for i in range(len(self.accumulators)):
            ops.assign_add(self.accumulators[i], _float32(grads[i], self.unscaled))
        return dx


class LossStep(nn.Cell):
    """The last stage, forward and backward: (x, *StageInputs, *HeadInputs, *LossInputs) -> (loss, log p, entropy, dx).

    Gradients are taken of `scale` times the loss, so that a narrow
    dtype holds them, and accumulated without it.
    """

    def __init__(
        self,
        net: LogProbStage,
        loss: PolicyLoss,
        parameters: list[Any],
        accumulators: list[Any],
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.scale, self.unscaled = scale, 1.0 / scale
        self.net, self.of_net = net, len(StageInputs._fields) + len(HeadInputs._fields)
        self.loss = loss
        self.only_stage = net.stage.is_first
        self.accumulators = ms.ParameterTuple(accumulators)
        position = None if self.only_stage else 0
        self.gradient = ms.value_and_grad(
            self.forward, position, ms.ParameterTuple(parameters), has_aux=True
        )

    def forward(self, x: Any, inputs: Any) -> Any:
        logp, entropy = self.net.compute(x, inputs[: self.of_net])
        loss = self.loss.compute(logp, entropy, inputs[self.of_net :])
        if self.scale != 1.0:
            return loss * self.scale, loss, logp, entropy
        return loss, loss, logp, entropy

    def construct(self, x: Any, *inputs: Any) -> Any:
        values, grads = self.gradient(x, inputs)
        dx = values[0]
        if not self.only_stage:
            dx, grads = grads
        for i in range(len(self.accumulators)):
            ops.assign_add(self.accumulators[i], _float32(grads[i], self.unscaled))
        return values[1], values[2], values[3], dx
