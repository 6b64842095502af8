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
from mindgrpo.models.decoder import HeadInputs, LogProbStage, Stage, SummedLayer
from mindgrpo.training.surrogates import CELLS, SampleMean


class LossInputs(NamedTuple):
    """Holds what the loss of [M] tokens reads beside log-probs and entropies, float32 but `segments`.

    Where `weights` is 0 a token adds nothing, whatever it holds. `rollout_is_weights` multiply the policy's term, of
    which `penalties` times |log rho| are a part.
    `segments` int32 is the number of a token's sample and `shares` one over the sample's tokens that count; both are
    read where the loss is of whole samples, all of whose tokens must be here or on the ranks that share the row.
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
    """(log p [M], entropy [M], *LossInputs) -> the loss of these tokens. Without `has_old` the ratio is 1 in value.

    `group` are the ranks that share rows, and so samples; None where each has its own.
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
        """Computes the same from LossInputs as one tuple, as Stage takes its inputs."""
        old, reference, advantages, weights, rollout_is_weights, segments, shares, penalties = (
            inputs
        )
        in_loss = weights > 0
        # 0 * infinity is no zero, so what is not in the loss goes before anything is multiplied.
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
    """Parameters by stored key, and the accumulators of their gradients, which arrive `scale` times as large."""

    parameters: Mapping[str, Any]
    accumulators: Mapping[str, Any]
    scale: float = 1.0

    def among(self, belongs: Callable[[str], bool]) -> Trained:
        """Returns those whose keys belong."""
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
        """Returns those of the last norm and of the head, whose table has this key."""
        return self.among(lambda key: key == table or key.startswith("model.norm."))


def _add(accumulator: Any, gradient: Any) -> Any:
    return ops.assign_add(accumulator, ops.cast(gradient, ms.float32))


def _add_unscaled(unscaled: float, accumulator: Any, gradient: Any) -> Any:
    return ops.assign_add(accumulator, ops.cast(gradient, ms.float32) * unscaled)


class _Add(nn.Cell):
    """(x, gradients) -> x, which waits until these have been added: then their memory is free for what follows."""

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
    """(x_NH, context, dy) -> dx of a layer; adds the gradients of its parameters."""

    def __init__(self, layer: SummedLayer, trained: Trained) -> None:
        super().__init__()
        self.layer, self.add = layer, _Add(trained)
        self.parameters_of_layer = ms.ParameterTuple(list(trained.parameters.values()))
        self.gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def construct(self, x: Any, context: Any, dy: Any) -> Any:
        of_inputs, gradients = self.gradient(self.layer, self.parameters_of_layer)(x, context, dy)
        return self.add(of_inputs[0], gradients)


class LayersBackward(nn.Cell):
    """(x, flows, contexts, dy) -> dx, from a stage's last layer to its first; x and `flows` as of Stage.flows.

    A layer's own forward pass is in the graph already, or is computed again (`recomputed`) when the layer above is
    done. The first stage's x is token ids and has no gradient: dx is of no use.
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
    """(x, dy, *inputs, *what StageForward returned beside its result) -> dx, of a stage that is not the last.

    Each layer is computed once more, from what it got. Adds the gradients of `trained`; dy and dx are `scale` times the
    gradients, as in LossStep.
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
    """The last stage, forward and backward: (x, *inputs, *HeadInputs, *LossInputs) -> (loss, log p, entropy, dx).

    Behind its inputs follows what layers get, where the stage hands that on: then only the last layer is computed
    forward, and the others once more. Gradients are taken of `scale` times the loss, so that a narrow dtype holds them,
    and accumulated without it.
    """

    def __init__(
        self, net: LogProbStage, layers: range, head_table: str, loss: PolicyLoss, trained: Trained
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
            flows = self.net.stage.flows(x, contexts, len(self.net.stage.layers))
            y = flows[-1]
        values, dy = self.gradient(y, inputs[self.of_stage : self.of_step])
        if self.trains_head:
            dy, gradients = dy
            dy = self.add(dy, gradients)
        dx = self.backward(x, flows, contexts, dy)
        return values[1], values[2], values[3], dx
