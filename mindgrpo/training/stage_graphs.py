"""A pipeline stage's graphs: forward, backward with accumulation, and on the last stage the loss.

Each is compiled once for one micro-batch shape; between graphs pipeline.py schedules and communicates.
algorithm/losses.py computes the same losses in numpy, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops.auto_generate import sum_ext

from mindgrpo.algorithm.surrogates import LOSS_TYPES, LossConfig
from mindgrpo.backend.contract import Group
from mindgrpo.models.decoder import HeadInputs, HeadStage, Stage, SummedLayer
from mindgrpo.training.surrogates import CELLS, SampleMean


class LossInputs(NamedTuple):
    """Inputs of the loss beside log-probs and entropies, [M] each; float32, `segments` int32.

    A token with `weights` 0 adds nothing to the loss, whatever its other fields hold. `rollout_is_weights` multiply the
    policy term, including its part `penalties` * |log rho|. `segments` is the index of a token's sample and `shares`
    1 / the sample's number of tokens in the loss; only losses of whole samples read them, and then all tokens of a
    sample have to be in this micro-batch on this rank or on its cp group.
    """

    old: Any
    reference: Any
    advantages: Any
    weights: Any
    rollout_is_weights: Any
    segments: Any
    shares: Any
    penalties: Any


class PolicyLoss(nn.Cell):
    """(log p [M], entropy [M], *LossInputs) -> the loss, a float32 scalar summed over the M tokens.

    Without `has_old` the importance ratio has the value 1 and the gradient of log p. `group` are the cp ranks that
    share rows, and so samples; None where each rank has its own.
    """

    def __init__(self, loss_config: LossConfig, has_old: bool, group: Group | None = None) -> None:
        super().__init__()
        self.mean = SampleMean(group)
        self.surrogate = CELLS[LOSS_TYPES[loss_config.loss_type].surrogate](loss_config, self.mean)
        self.beta, self.estimator = loss_config.loss_beta, loss_config.kl_estimator
        self.entropy_coef = loss_config.entropy_coef
        self.by_sequence = loss_config.by_sequence
        self.has_factors = loss_config.is_corrected or loss_config.leaves_out
        self.penalises = loss_config.penalises
        self.most_drift = loss_config.off_policy_mask_threshold
        self.unbiased_kl = loss_config.unbiased_kl
        self.has_old = has_old

    def construct(self, logp: Any, entropy: Any, *inputs: Any) -> Any:
        return self.compute(logp, entropy, inputs)

    def compute(self, logp: Any, entropy: Any, inputs: Any) -> Any:
        """Computes the loss with LossInputs passed as one tuple."""
        old, reference, advantages, weights, rollout_is_weights, segments, shares, penalties = (
            inputs
        )
        in_loss = weights > 0
        # Masked before any product, because 0 * infinity is NaN.
        zeros = ops.zeros_like(logp)
        advantages = ops.where(in_loss, advantages, zeros)
        if not self.has_old:
            old = ops.stop_gradient(logp)
        difference = ops.where(in_loss, logp - old, zeros)
        if self.by_sequence:
            difference = self.mean(difference, segments, shares)
        terms = -self.surrogate(
            ops.where(in_loss, logp, zeros),
            difference,
            advantages,
            ops.where(in_loss, old, zeros),
            segments,
            shares,
        )
        if self.penalises:
            terms = terms + penalties * ops.abs(difference)
        if self.most_drift is not None:
            drift = -ops.stop_gradient(difference)
            if not self.by_sequence:
                drift = self.mean(drift, segments, shares)
            keeps = ops.logical_or(advantages >= 0, drift <= self.most_drift)
            terms = ops.where(keeps, terms, zeros)
        if self.has_factors:
            terms = terms * rollout_is_weights
        if self.beta > 0:
            gap = ops.where(in_loss, reference - logp, zeros)
            if self.estimator == "k1":
                kl = -gap
            elif self.estimator == "k2":
                kl = 0.5 * gap * gap
            else:
                kl = ops.exp(gap) - gap - 1.0
            if self.unbiased_kl:
                kl = kl * ops.exp(difference)
            terms = terms + self.beta * kl
        if self.entropy_coef > 0:
            terms = terms - self.entropy_coef * ops.where(in_loss, entropy, zeros)
        return sum_ext(terms * weights)


@dataclass(frozen=True)
class Trained:
    """Trained parameters and their gradient accumulators by stored key; gradients arrive multiplied by `scale`."""

    parameters: Mapping[str, Any]
    accumulators: Mapping[str, Any]
    scale: float = 1.0

    def among(self, belongs: Callable[[str], bool]) -> Trained:
        """Returns the subset whose keys satisfy `belongs`."""
        keys = [key for key in self.parameters if belongs(key)]
        parameters, accumulators = (
            {key: each[key] for key in keys} for each in (self.parameters, self.accumulators)
        )
        return Trained(parameters, accumulators, self.scale)

    def of_layer(self, index: int) -> Trained:
        return self.among(lambda key: key.startswith(f"model.layers.{index}."))

    def of_embedding(self) -> Trained:
        return self.among(lambda key: key.startswith("model.embed_tokens."))

    def of_head(self, table: str) -> Trained:
        """Returns the parameters of the final norm and of the head, whose matrix is stored under key `table`."""
        return self.among(lambda key: key == table or key.startswith("model.norm."))


def _add(accumulator: Any, gradient: Any) -> Any:
    return ops.assign_add(accumulator, ops.cast(gradient, ms.float32))


def _add_unscaled(unscaled: float, accumulator: Any, gradient: Any) -> Any:
    return ops.assign_add(accumulator, ops.cast(gradient, ms.float32) * unscaled)


class _Add(nn.Cell):
    """(x, gradients) -> x, which depends on the accumulation of `gradients`, so that their memory is freed first."""

    def __init__(self, trained: Trained) -> None:
        super().__init__()
        self.accumulators = ms.ParameterTuple(list(trained.accumulators.values()))
        self.is_scaled, self.unscaled = trained.scale != 1.0, 1.0 / trained.scale
        self.map = ops.HyperMap()

    def construct(self, x: Any, gradients: Any) -> Any:
        if self.is_scaled:
            add = ops.partial(_add_unscaled, self.unscaled)
            return ops.depend(x, self.map(add, self.accumulators, gradients))
        return ops.depend(x, self.map(_add, self.accumulators, gradients))


class _LayerBackward(nn.Cell):
    """(x_NH, context, dy_NH) -> dx_NH of one layer; accumulates its parameters' gradients."""

    def __init__(self, layer: SummedLayer, trained: Trained) -> None:
        super().__init__()
        self.layer, self.add = layer, _Add(trained)
        self.parameters_of_layer = ms.ParameterTuple(list(trained.parameters.values()))
        self.gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def construct(self, x: Any, context: Any, dy: Any) -> Any:
        of_inputs, gradients = self.gradient(self.layer, self.parameters_of_layer)(x, context, dy)
        return self.add(of_inputs[0], gradients)


class LayersBackward(nn.Cell):
    """(x, flows, contexts, dy_NH) -> dx_NH: backward through a stage's layers, last to first.

    `flows[i]` is layer i's input, x_NH, as Stage.flows returns it. A layer's forward pass is in the graph already, or,
    if `recomputed[i]`, is recomputed after the backward pass of the layer above. On the first stage x is token ids,
    which have no gradient: dx is meaningless there.
    """

    def __init__(
        self, stage: Stage, layers: range, trained: Trained, recomputed: Sequence[bool]
    ) -> None:
        super().__init__()
        self.recomputed = tuple(recomputed)
        pairs = zip(stage.layers, layers, strict=True)
        self.layers = nn.CellList(
            [_LayerBackward(layer, trained.of_layer(index)) for layer, index in pairs]
        )
        embedding = trained.of_embedding()
        self.trains_embedding = stage.is_first and bool(embedding.parameters)
        if self.trains_embedding:
            self.embed, self.add = stage.embed, _Add(embedding)
            self.table = ms.ParameterTuple(list(embedding.parameters.values()))
            self.gradient = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, x: Any, flows: Any, contexts: Any, dy: Any) -> Any:
        for reverse in range(len(self.layers)):
            i = len(self.layers) - 1 - reverse
            flow = flows[i]
            if self.recomputed[i]:
                flow = ops.depend(flow, dy)
            dy = self.layers[i](flow, contexts[i], dy)
        if self.trains_embedding:
            dy = self.add(dy, self.gradient(self.embed, self.table)(x.reshape(-1), dy))
        return dy


class StageBackward(nn.Cell):
    """(x, dy_NH, *inputs, *flows) -> dx_NH: the backward pass of any stage but the last.

    `flows` are the layer inputs that the stage's forward graph returned behind its output; every layer is recomputed
    from its own. Accumulates the gradients of `trained`; dy and dx are multiplied by `trained.scale`, as in LossStep.
    """

    def __init__(self, stage: Stage, layers: range, trained: Trained) -> None:
        super().__init__()
        self.stage, self.of_stage = stage, stage.num_inputs
        self.is_first = stage.is_first
        self.backward = LayersBackward(stage, layers, trained, [True] * len(layers))

    def construct(self, x: Any, dy: Any, *inputs: Any) -> Any:
        flows = inputs[self.of_stage :]
        if not self.is_first:
            flows = (x, *flows)
        contexts = self.stage.contexts(inputs[: self.of_stage])
        return self.backward(x, flows, contexts, dy)


class LossStep(nn.Cell):
    """Runs the last stage forward and backward.

    (x, *inputs, *HeadInputs, *LossInputs, *flows) -> (loss scalar, log p [M], entropy [M], dx_NH), or the two results
    of another head; `loss` is a PolicyLoss, or a ValueLoss for a scalar head. `flows` are the
    layer inputs x_NH of an earlier forward graph, given if the stage's `hands_inputs_on`: then only the last layer runs
    forward here, and the others are recomputed. The backward pass starts from `scale` times the loss, so that narrow
    dtypes do not underflow; accumulation divides by `scale` again.
    """

    def __init__(
        self, net: HeadStage, layers: range, head_table: str, loss: Any, trained: Trained
    ) -> None:
        super().__init__()
        self.scale = trained.scale
        self.net, self.loss = net, loss
        self.of_stage, self.of_head = net.stage.num_inputs, len(HeadInputs._fields)
        self.of_step = self.of_stage + self.of_head + len(LossInputs._fields)
        self.is_first, self.gets_flows = net.stage.is_first, net.stage.hands_inputs_on
        head = trained.of_head(head_table)
        self.trains_head, self.add = bool(head.parameters), _Add(head)
        weights = ms.ParameterTuple(list(head.parameters.values())) if self.trains_head else None
        self.gradient = ms.value_and_grad(self.from_layers, 0, weights, has_aux=True)
        again = net.stage.recomputed
        if self.gets_flows:
            again = (*again[:-1], False)
        self.backward = LayersBackward(net.stage, layers, trained, again)

    def from_layers(self, x: Any, inputs: Any) -> Any:
        logp, entropy = self.net.head(x, inputs[: self.of_head])
        loss = self.loss.compute(logp, entropy, inputs[self.of_head :])
        if self.scale != 1.0:
            return loss * self.scale, loss, logp, entropy
        return loss, loss, logp, entropy

    def construct(self, x: Any, *inputs: Any) -> Any:
        # As tuples: MindSpore never frees a graph, nor its weights, that passes `*inputs` on to a gradient.
        contexts = self.net.stage.contexts(inputs[: self.of_stage])
        if self.gets_flows:
            flows = inputs[self.of_step :]
            if not self.is_first:
                flows = (x, *flows)
            y = self.net.stage.layers[-1](flows[-1], contexts[-1])
        else:
            stage = self.net.stage
            entered = stage.entered(x, inputs[: self.of_stage])
            flows = stage.flows(entered, contexts, len(stage.layers))
            y = flows[-1]
        values, dy = self.gradient(y, inputs[self.of_stage : self.of_step])
        if self.trains_head:
            dy, gradients = dy
            dy = self.add(dy, gradients)
        dx = self.backward(x, flows, contexts, dy)
        return values[1], values[2], values[3], dx
