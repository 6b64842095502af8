"""A pipeline stage's graphs: forward, backward with accumulation, and on the last stage the loss.

Each is compiled once for one micro-batch shape; between graphs pipeline.py schedules and communicates.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from mindgrpo.models.decoder import LogProbStage, Stage
from mindgrpo.training.loss_cell import PolicyLoss


def _float32(gradient: Any, unscaled: float) -> Any:
    gradient = gradient.astype(ms.float32)
    if unscaled != 1.0:
        gradient = gradient * unscaled
    return gradient


class StageBackward(nn.Cell):
    """(x, positions, spans, dy) -> dx, of a stage that is not the last; adds its gradients to `accumulators`.

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

    def construct(self, x: Any, positions: Any, spans: Any, dy: Any) -> Any:
        grads = self.gradient(self.stage, self.parameters_of_stage)(x, positions, spans, dy)
        dx = positions
        if not self.is_first:
            inputs, grads = grads
            dx = inputs[0]
        for i in range(len(self.accumulators)):
            ops.assign_add(self.accumulators[i], _float32(grads[i], self.unscaled))
        return dx


class LossStep(nn.Cell):
    """The last stage, forward and backward in one graph: -> (loss, log p [M], entropy [M], dx).

    `extras` are what the loss takes after the entropy. Gradients are taken of `scale` times the loss, so that a narrow
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
        self.net = net
        self.loss = loss
        self.only_stage = net.stage.is_first
        self.accumulators = ms.ParameterTuple(accumulators)
        position = None if self.only_stage else 0
        self.gradient = ms.value_and_grad(
            self.forward, position, ms.ParameterTuple(parameters), has_aux=True
        )

    def forward(
        self, x: Any, positions: Any, spans: Any, picks: Any, labels: Any, extras: Any
    ) -> Any:
        logp, entropy = self.net(x, positions, spans, picks, labels)
        loss = self.loss(logp, entropy, *extras)
        if self.scale != 1.0:
            return loss * self.scale, loss, logp, entropy
        return loss, loss, logp, entropy

    def construct(
        self, x: Any, positions: Any, spans: Any, picks: Any, labels: Any, *extras: Any
    ) -> Any:
        # As one tuple: MindSpore never frees a graph, nor its weights, that passes `*extras` on to a gradient.
        values, grads = self.gradient(x, positions, spans, picks, labels, extras)
        dx = values[0]
        if not self.only_stage:
            dx, grads = grads
        for i in range(len(self.accumulators)):
            ops.assign_add(self.accumulators[i], _float32(grads[i], self.unscaled))
        return values[1], values[2], values[3], dx
