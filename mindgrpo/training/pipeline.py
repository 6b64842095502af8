"""Runs forward and backward passes of micro-batches over pipeline stages, one forward one backward (1F1B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.schedule import Exchange, one_forward_one_backward
from mindgrpo.models.decoder import HeadInputs, StageInputs, tensors_of
from mindgrpo.models.pipeline import ForwardPipeline, Predictions
from mindgrpo.training.stage_graphs import LossInputs


def forward_backward(
    pipeline: ForwardPipeline,
    batches: Sequence[MicroBatch],
    backward: Callable[..., Any],
    loss_inputs: Sequence[LossInputs],
) -> list[Predictions] | None:
    """Runs all micro-batches forward and backward; `backward`, a cell of this stage, adds up the gradients.

    `loss_inputs[i]`, arrays, are read by the last stage only, whose ranks get the results; the others get None.
    """
    stage = _StageRun(pipeline, batches, backward, loss_inputs)
    for action in one_forward_one_backward(pipeline.stage_index, pipeline.num_stages, len(batches)):
        if isinstance(action, Exchange):
            stage.exchange(action)
        elif action.kind == "forward":
            stage.forward(action.micro_batch)
        else:
            stage.backward(action.micro_batch)
            pipeline.progress(action.micro_batch + 1, len(batches))
    return None if pipeline.net is None else [stage.results[i] for i in range(len(batches))]


class _StageRun:
    """Holds what a stage has on the device between the passes of one batch, by micro-batch."""

    def __init__(
        self,
        pipeline: ForwardPipeline,
        batches: Sequence[MicroBatch],
        backward: Callable[..., Any],
        loss_inputs: Sequence[LossInputs],
    ) -> None:
        self._pipeline, self._batches = pipeline, batches
        self._backward, self._loss_inputs = backward, loss_inputs
        self.results: dict[int, Predictions] = {}
        # Activations that came, what layers made of them and the gradients that go back; activations that go on and
        # their gradients.
        self._inputs: dict[int, Any] = {}
        self._flows: dict[int, list[Any]] = {}
        self._input_gradients: dict[int, Any] = {}
        self._outputs: dict[int, Any] = {}
        self._output_gradients: dict[int, Any] = {}

    def exchange(self, action: Exchange) -> None:
        is_next = action.neighbour == "next"
        outgoing = self._outputs if is_next else self._input_gradients
        incoming = self._output_gradients if is_next else self._inputs
        sent = None if action.sends is None else outgoing.pop(action.sends)
        link, shape = self._pipeline.links[action.neighbour], None
        if action.receives is not None:
            shape = self._pipeline.activations(self._batches[action.receives].tokens.size)
        arrived = link.exchange(sent, shape)
        if action.receives is not None:
            incoming[action.receives] = arrived

    def forward(self, i: int) -> None:
        if self._pipeline.stage_index == 0:
            self._inputs[i] = Tensor(self._batches[i].tokens)
        # Else the last stage's forward pass is part of its backward graph.
        if self._pipeline.hands_inputs_on:
            y, flows = self._pipeline.forward_flows(self._inputs[i], self._stage_inputs(i))
            if self._pipeline.net is None:
                self._outputs[i], self._flows[i] = y, flows
            else:
                self._flows[i] = [*flows, y]

    def backward(self, i: int) -> None:
        x = self._inputs.pop(i)
        if self._pipeline.net is None:
            dy = self._output_gradients.pop(i)
            dx = self._backward(x, dy, *self._stage_inputs(i), *self._flows.pop(i))
        else:
            head = tensors_of(HeadInputs, self._batches[i])
            numbers = tensors_of(LossInputs, self._loss_inputs[i])
            inputs = (*self._stage_inputs(i), *head, *numbers, *self._flows.pop(i, ()))
            _, logp, entropy, dx = self._backward(x, *inputs)
            self.results[i] = logp.asnumpy(), entropy.asnumpy()
        if self._pipeline.stage_index > 0:
            self._input_gradients[i] = dx

    def _stage_inputs(self, i: int) -> tuple[Tensor, ...]:
        return tensors_of(StageInputs, self._batches[i])
