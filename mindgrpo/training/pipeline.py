"""Runs forward and backward passes of micro-batches over pipeline stages, one forward one backward (1F1B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor

from mindgrpo.algorithm.packing import MicroBatch
from mindgrpo.algorithm.schedule import one_forward_one_backward
from mindgrpo.models.pipeline import ForwardPipeline


@dataclass(frozen=True)
class StepResult:
    """The loss of one micro-batch and its float32 [M] log-probs and entropies."""

    loss: float
    logps: np.ndarray
    entropy: np.ndarray


def forward_backward(
    pipeline: ForwardPipeline,
    batches: Sequence[MicroBatch],
    backward: Callable[..., Any],
    loss_inputs: Sequence[tuple[Any, ...]],
) -> list[StepResult] | None:
    """Forward and backward of all micro-batches; gradients are added up by `backward`, a cell of this stage.

    `loss_inputs[i]` are what the loss takes [M] after the entropy, for the last stage, whose ranks get results; the
    others None.
    """
    kept: dict[int, np.ndarray] = {}
    results: dict[int, StepResult] = {}
    stage, num_stages = pipeline.stage_index, pipeline.num_stages
    for kind, i in one_forward_one_backward(stage, num_stages, len(batches)):
        batch = batches[i]
        where = Tensor(batch.positions), Tensor(batch.spans)
        if kind == "forward":
            kept[i] = pipeline.inputs(batch)
            if pipeline.net is None:
                pipeline.pass_on(pipeline.forward(Tensor(kept[i]), *where))
            continue
        x = Tensor(kept.pop(i))
        if pipeline.net is None:
            dy = pipeline.links["from_next"].receive(pipeline.activation_shape, np.float32)
            dx = backward(x, *where, Tensor(dy))
        else:
            numbers = (Tensor(values) for values in loss_inputs[i])
            marks = Tensor(batch.picks), Tensor(batch.labels)
            loss, logp, entropy, dx = backward(x, *where, *marks, *numbers)
            results[i] = StepResult(float(loss), logp.asnumpy(), entropy.asnumpy())
        if stage > 0:
            pipeline.links["to_previous"].send(dx.asnumpy())
    return None if pipeline.net is None else [results[i] for i in range(len(batches))]
