"""Runs forward and backward passes of micro-batches over pipeline stages, in the order of algorithm/schedule.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.schedule import Exchange, Pass
from mindgrpo.models.decoder import HeadInputs, tensors_of
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.pipeline import ForwardPipeline, HandOvers, Predictions
from mindgrpo.training.stage_graphs import LossInputs


def forward_backward(
    pipeline: ForwardPipeline,
    batches: Sequence[MicroBatch],
    backward: Sequence[Callable[..., Any]],
    loss_inputs: Sequence[LossInputs],
    experts: Sequence[ExpertInputs] | None = None,
) -> list[Predictions] | None:
    """Runs all micro-batches forward and backward; `backward[c]` is chunk c's graph, which accumulates gradients.

    Returns each micro-batch's log-probs and entropies, float32 [M] each, on the last stage, which alone reads
    `loss_inputs[i]` (numpy); None on the other stages.
    """
    stage = _StageRun(pipeline, batches, backward, loss_inputs, experts)
    for action in pipeline.actions(len(batches), has_backward=True):
        if isinstance(action, Exchange):
            stage.others.exchange(action)
        elif action.kind == "forward":
            stage.forward(action)
        else:
            stage.backward(action)
            if action.chunk == 0:
                pipeline.progress(action.micro_batch + 1, len(batches))
    return [stage.results[i] for i in range(len(batches))] if pipeline.has_head else None


class _StageRun:
    """Holds a stage's activations and results on the device between the passes of one batch."""

    def __init__(
        self,
        pipeline: ForwardPipeline,
        batches: Sequence[MicroBatch],
        backward: Sequence[Callable[..., Any]],
        loss_inputs: Sequence[LossInputs],
        experts: Sequence[ExpertInputs] | None,
    ) -> None:
        self._chunks, self._batches = pipeline.chunks, batches
        self._experts: Sequence[ExpertInputs | None]
        self._experts = [None] * len(batches) if experts is None else experts
        self._span = pipeline.span
        self._backward, self._loss_inputs = backward, loss_inputs
        self.others = HandOvers(pipeline, batches)
        self.results: dict[int, Predictions] = {}
        # By (chunk, micro-batch): the activations received, and the inputs of the layers behind them.
        self._inputs: dict[tuple[int, int], Any] = {}
        self._flows: dict[tuple[int, int], list[Any]] = {}

    def forward(self, own: Pass) -> None:
        chunk, at = self._chunks[own.chunk], (own.chunk, own.micro_batch)
        batch = self._batches[own.micro_batch]
        x = Tensor(batch.tokens) if chunk.is_first else self.others.take(own)
        self._inputs[at] = x
        # Else the last chunk's forward pass is part of its backward graph.
        if chunk.hands_inputs_on:
            with self._span(own):
                y, flows = chunk.forward_flows(
                    x, chunk.inputs(batch, self._experts[own.micro_batch])
                )
            if not chunk.is_last:
                self.others.make(own, y)
                self._flows[at] = flows
            else:
                self._flows[at] = [*flows, y]

    def backward(self, own: Pass) -> None:
        chunk, at = self._chunks[own.chunk], (own.chunk, own.micro_batch)
        batch, compute = self._batches[own.micro_batch], self._backward[own.chunk]
        x, flows = self._inputs.pop(at), self._flows.pop(at, ())
        inputs = chunk.inputs(batch, self._experts[own.micro_batch])
        if not chunk.is_last:
            dy = self.others.take(own)
            with self._span(own):
                dx = compute(x, dy, *inputs, *flows)
        else:
            head = tensors_of(HeadInputs, batch)
            numbers = tensors_of(LossInputs, self._loss_inputs[own.micro_batch])
            with self._span(own):
                _, logp, entropy, dx = compute(x, *inputs, *head, *numbers, *flows)
                self.results[own.micro_batch] = logp.asnumpy(), entropy.asnumpy()
        if not chunk.is_first:
            self.others.make(own, dx)
