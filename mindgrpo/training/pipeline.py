"""One rank's part of a model that is spread over stages: log-probs forward only, and 1F1B forward and backward.

Activations travel between neighbouring stages over the backend's links. Refuses to know what the loss is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Tensor

from mindgrpo.algorithm.packing import MicroBatch, MicroShape
from mindgrpo.algorithm.schedule import one_forward_one_backward
from mindgrpo.backend.contract import Backend, Link
from mindgrpo.models.decoder import KEEP_ALL, LogProbStage, Recompute, Stage
from mindgrpo.models.shard import Shard

# The largest [rows, vocabulary] tensor of a head; longer ones go in chunks.
LOGITS_BYTES = 64 << 20


@dataclass(frozen=True)
class StepResult:
    """The loss of one micro-batch and its float32 [M] log-probs and entropies."""

    loss: float
    logps: np.ndarray
    entropy: np.ndarray


class Pipeline:
    """Forward passes of `shard`'s stage over micro-batches of `shape`, whose positions stay below `num_positions`.

    The last stage's ranks get results; the others None.
    """

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        name: str,
        shape: MicroShape,
        num_positions: int,
        temperature: float,
        recompute: Recompute = KEEP_ALL,
    ) -> None:
        grid = shard.weights.layout.grid
        rank = shard.weights.rank
        self.shard = shard
        self.shape = shape
        self.stage = Stage(shard, num_positions, recompute)
        self.net = None
        if shard.is_last:
            self.net = LogProbStage(self.stage, shard, temperature, LOGITS_BYTES)
        self._forward = backend.graph(self.net or self.stage, f"{name} forward")
        self.place = grid.coordinates(rank).stage
        self.num_stages = grid.pipeline_stage
        self._shape = (shape.tokens, shard.config.hidden_size)
        ranks = grid.stage_group(rank)
        slot = int(np.prod(self._shape)) * 4
        self._links: dict[str, Link] = {}
        # Both ends of a pair make its two links in one order, or each would wait for the other's first.
        for pair in range(self.num_stages - 1):
            if self.place in (pair, pair + 1):
                down = backend.link(ranks[pair], ranks[pair + 1], slot)
                up = backend.link(ranks[pair + 1], ranks[pair], slot)
                if self.place == pair:
                    self._links |= {"to_next": down, "from_next": up}
                else:
                    self._links |= {"from_previous": down, "to_previous": up}

    def inputs(self, batch: MicroBatch) -> np.ndarray:
        """Token ids on the first stage, the previous stage's activations elsewhere."""
        if self.place == 0:
            return batch.tokens
        return self._links["from_previous"].receive(self._shape, np.float32)

    def pass_on(self, y: Any) -> None:
        self._links["to_next"].send(y.asnumpy())

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[tuple[np.ndarray, np.ndarray]] | None:
        """(log p, entropy), float32 [M] each, of every micro-batch's labels."""
        results = []
        for batch in batches:
            x = Tensor(self.inputs(batch))
            places = Tensor(batch.positions), Tensor(batch.spans)
            if self.net is None:
                self.pass_on(self._forward(x, *places))
                continue
            logp, entropy = self._forward(x, *places, Tensor(batch.picks), Tensor(batch.labels))
            results.append((logp.asnumpy(), entropy.asnumpy()))
        return None if self.net is None else results

    def train(
        self,
        batches: Sequence[MicroBatch],
        backward: Callable[..., Any],
        extras: Sequence[tuple[Any, ...]],
    ) -> list[StepResult] | None:
        """Forward and backward of all micro-batches; gradients are added up by `backward`, a cell of this stage.

        `extras[i]` are the loss's inputs [M] after the entropy, for the last stage.
        """
        kept: dict[int, np.ndarray] = {}
        results: dict[int, StepResult] = {}
        for kind, i in one_forward_one_backward(self.place, self.num_stages, len(batches)):
            batch = batches[i]
            places = Tensor(batch.positions), Tensor(batch.spans)
            if kind == "forward":
                kept[i] = self.inputs(batch)
                if self.net is None:
                    self.pass_on(self._forward(Tensor(kept[i]), *places))
                continue
            x = Tensor(kept.pop(i))
            if self.net is None:
                dy = self._links["from_next"].receive(self._shape, np.float32)
                dx = backward(x, *places, Tensor(dy))
            else:
                numbers = (Tensor(extra) for extra in extras[i])
                marks = Tensor(batch.picks), Tensor(batch.labels)
                loss, logp, entropy, dx = backward(x, *places, *marks, *numbers)
                results[i] = StepResult(float(loss), logp.asnumpy(), entropy.asnumpy())
            if self.place > 0:
                self._links["to_previous"].send(dx.asnumpy())
        return None if self.net is None else [results[i] for i in range(len(batches))]
