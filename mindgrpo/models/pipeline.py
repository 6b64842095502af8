"""Runs one rank's stage of a model that is spread over pipeline stages, forward only: log-probs of given tokens.

Activations travel between neighbouring stages over the backend's links.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from mindspore import Tensor

from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.backend.contract import Backend, Group, Link
from mindgrpo.models.decoder import (
    KEEP_ALL,
    HeadInputs,
    LogProbStage,
    Recompute,
    Stage,
    StageForward,
    StageInputs,
    tensors_of,
)
from mindgrpo.models.shard import LOGITS_BYTES, Shard
from mindgrpo.parallel.mesh import Mesh

# Of a micro-batch's predicting positions, log-probs and entropies, float32 [M] each; or of a sample's completion.
Predictions = tuple[np.ndarray, np.ndarray]


class ForwardPipeline:
    """Forward passes of `shard`'s stage over micro-batches of at most `widest`; positions stay below `num_positions`.

    `shapes` chooses the micro-batches' own. `num_stages` ranks hold a stage each, this one stage number `stage_index`.
    `forward` is the stage's compiled graph, `net` the stage with the head on the last stage, None on the others. With
    `keeps_flows`, stages also return what their layers get, for a backward pass; the last one by a graph of its own, or
    not at all (Stage.hands_inputs_on).
    """

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        name: str,
        widest: MicroShape,
        num_positions: int,
        temperature: float,
        recompute: Recompute = KEEP_ALL,
        keeps_flows: bool = False,
    ) -> None:
        mesh = shard.weights.layout.mesh
        rank = shard.weights.rank
        self.shard = shard
        self.shapes = shape_choice(shard, backend, widest)
        self.progress = partial(backend.health.progress, "micro-batches")
        # What a stage keeps for later it computes once more in any case.
        again = recompute if shard.is_last else KEEP_ALL
        # A row of one sample is its prompt and then its completion: nothing that a mask would have to say.
        self.stage = Stage(shard, num_positions, again, is_causal=widest.max_per_row == 1)
        self.net = None
        if shard.is_last:
            self.net = LogProbStage(self.stage, shard, temperature, LOGITS_BYTES)
        self.hands_inputs_on = keeps_flows and self.stage.hands_inputs_on
        own = StageForward(self.stage) if self.hands_inputs_on else self.stage
        self.forward = backend.graph(self.net or own, f"{name} forward")
        self.layers = backend.graph(own, f"{name} layers") if self.net else self.forward
        self.stage_index = mesh.index(rank, "pp")
        self.num_stages = mesh.pp
        ranks = mesh.group(rank, ("pp",))
        activations = self.activations(widest.tokens)
        self.links: dict[str, Link] = {}
        # The earlier pair first, as on the neighbour: each end waits for the other's.
        if self.stage_index > 0:
            self.links["previous"] = backend.link(ranks[self.stage_index - 1], activations)
        if self.stage_index + 1 < self.num_stages:
            self.links["next"] = backend.link(ranks[self.stage_index + 1], activations)

    def activations(self, num_tokens: int) -> tuple[int, int]:
        """Returns the shape of what passes between stages of a micro-batch."""
        return num_tokens // self.shard.token_shares, self.shard.config.hidden_size

    def forward_flows(self, x: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns what goes on to the next stage, and what the layers got: nothing where no flows are kept."""
        made = self.layers(x, *inputs)
        y, *flows = made if isinstance(made, tuple) else (made,)
        return y, flows

    def log_probs(self, batches: Sequence[MicroBatch]) -> list[Predictions] | None:
        """Returns (log p, entropy) of every micro-batch's labels, float32 [M] each; None except on the last stage."""
        results = []
        for i, batch in enumerate(batches):
            self.progress(i, len(batches))
            is_first = self.stage_index == 0
            if is_first:
                x = Tensor(batch.tokens)
            else:
                x = self.links["previous"].exchange(None, self.activations(batch.tokens.size))
            inputs = tensors_of(StageInputs, batch)
            if self.net is None:
                self.links["next"].exchange(self.forward_flows(x, inputs)[0], receives=None)
                continue
            logp, entropy = self.forward(x, *inputs, *tensors_of(HeadInputs, batch))
            results.append((logp.asnumpy(), entropy.asnumpy()))
        return None if self.net is None else results


def shape_choice(shard: Shard, backend: Backend, widest: MicroShape) -> ShapeChoice:
    """Returns a choice of shapes for graphs of `shard`."""
    return ShapeChoice(widest, 0.0 if backend.kernels.ragged else shard.config.column_cost)


def by_sample(
    batches: Sequence[MicroBatch], results: Sequence[Predictions] | None, group: Group
) -> dict[int, Predictions]:
    """Splits micro-batches' `results` by sample, float32 [completion length] each; nothing without results.

    `group` are the ranks that share the rows, each of which has the results of its own tokens; all of them together.
    """
    samples: dict[int, Predictions] = {}
    for micro, (logps, entropies) in zip(batches, results or [], strict=bool(results)):
        entropy = micro.gather(entropies)
        samples |= {i: (own, entropy[i]) for i, own in micro.gather(logps).items()}
    if group.size > 1 and samples:
        arrays = [own for pair in samples.values() for own in pair]
        ends = np.cumsum([own.size for own in arrays])
        # What another rank predicts is 0 here, so that the sum adds nothing to a number.
        whole = iter(np.split(group.sum_array(np.concatenate(arrays)), ends[:-1]))
        samples = {i: (next(whole), next(whole)) for i in samples}
    return samples


def compute_log_probs(
    pipeline: ForwardPipeline | None, mesh: Mesh, backend: Backend, packed: PackedRollout
) -> list[np.ndarray]:
    """Computes log-probs by `pipeline`'s weights, float32 [completion length] per sample; all ranks together.

    Runs forward only. `pipeline` is None on ranks outside of `mesh`.
    """
    own: dict[int, np.ndarray] = {}
    if pipeline is not None:
        index = mesh.index(backend.rank, "dp")
        shape = pipeline.shapes.choose(packed, mesh.dp)
        part = mesh.index(backend.rank, "cp")
        batches = packed.micro_batches(shape, mesh.dp, index, part=part)
        samples = by_sample(batches, pipeline.log_probs(batches), pipeline.shard.context_group)
        if mesh.group(backend.rank, ("cp", "mp"))[0] == backend.rank:
            own = {i: logps for i, (logps, _) in samples.items()}
    merged: dict[int, np.ndarray] = {}
    for logps_of_rank in backend.world.gather_objects(own):
        merged |= logps_of_rank
    if len(merged) != len(packed.rollout):
        raise ValueError(f"log-probs of {len(merged)} of {len(packed.rollout)} samples arrived")
    return [merged[i] for i in range(len(packed.rollout))]
