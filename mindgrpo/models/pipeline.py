"""Runs a rank's pipeline stage forward to compute log-probs of given tokens.

Activations are sent between stages over the backend's point-to-point links.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from mindspore import GRAPH_MODE, Tensor, get_context, nn

from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.algorithm.schedule import Actions, Exchange, Pass, pipeline_schedule
from mindgrpo.backend.contract import Backend, Group, Link
from mindgrpo.models.decoder import (
    KEEP_ALL,
    HeadInputs,
    HeadStage,
    LogProbStage,
    Recompute,
    Stage,
    StageForward,
    StageInputs,
    ValueStage,
    tensors_of,
)
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.expert_routes import Choices, StageExperts, StepExperts
from mindgrpo.models.rotary import PositionAngles
from mindgrpo.models.shard import LOGITS_BYTES, Shard
from mindgrpo.parallel.mesh import Mesh

# (log-probs, entropies), float32 [M] each, of a micro-batch's picks; or float32 [completion length] of a sample. With a
# scalar head (values, zeros).
Predictions = tuple[np.ndarray, np.ndarray]


class StageChunk:
    """One chunk of a stage's layers and its compiled graphs.

    `forward` computes outputs and, with experts, lets routers choose. `replaying` is for micro-batches with
    ExpertInputs: routers choose as well, but tokens are routed by the plan. With `keeps_flows` (training), `layers`
    also returns the layers' inputs for the backward, if Stage.hands_inputs_on; with experts, it reads a plan. It is the
    same graph as `forward` in dense chunks without head. `net` is the stage with the head in the last chunk, else None.
    `planned` are the chunk's layers among the stage's expert layers. `images` are the features that take the place of
    negative tokens.
    """

    def __init__(
        self,
        shard: Shard,
        backend: Backend,
        name: str,
        num_positions: int,
        temperature: float,
        recompute: Recompute,
        is_causal: bool,
        keeps_flows: bool,
        planned: slice,
        images: ImageFeatures | None = None,
    ) -> None:
        self.shard, self.name = shard, name
        self.is_first, self.is_last = shard.is_first, shard.is_last
        # Chunks before the last one store only their layers' inputs, and recompute everything else anyway.
        again = recompute if shard.is_last else KEEP_ALL

        # In eager mode, a parameter that is passed to a cell with a bprop (the table) would get a gradient of no shape.
        is_compiled = get_context("mode") == GRAPH_MODE
        chunk_bytes = LOGITS_BYTES if is_compiled else sys.maxsize

        def with_head(stage: Stage) -> HeadStage | None:
            if not shard.is_last:
                return None
            if shard.config.head == "scalar":
                return ValueStage(stage, shard)
            return LogProbStage(stage, shard, temperature, chunk_bytes)

        self.stage = Stage(shard, num_positions, again, is_causal)
        self.net = with_head(self.stage)
        self.hands_inputs_on = keeps_flows and self.stage.hands_inputs_on
        own = StageForward(self.stage) if self.hands_inputs_on else self.stage
        self.records = self.stage.reads_plan
        forward: nn.Cell = self.net or own

        def choosing(replays: bool) -> nn.Cell:
            stage = Stage(shard, num_positions, KEEP_ALL, is_causal, True, replays)
            return with_head(stage) or stage

        if self.records:
            forward = choosing(False)
        self.forward = backend.graph(forward, f"{name} forward")
        self.replaying = self.forward
        if self.records and keeps_flows:
            self.replaying = backend.graph(choosing(True), f"{name} forward")
        is_same = forward is own
        self.layers = self.forward if is_same else backend.graph(own, f"{name} layers")
        self._planned, self._images = planned, images
        has_axes = shard.config.rope_sections is not None
        self._angles = PositionAngles(shard.config, num_positions) if has_axes else None

    def run(
        self, x: Tensor, batch: MicroBatch, experts: ExpertInputs | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Runs `forward` on x, tokens int32 [R, T] or x_NH, or `replaying` if `experts` are given.

        Returns the outputs, x_NH first, or log-probs and entropies float32 [M] from the head, and separately choices
        and margins as in Stage, if the chunk has experts.
        """
        inputs = self.inputs(batch, experts)
        if self.is_last:
            inputs += tensors_of(HeadInputs, batch)
        made = (self.forward if experts is None else self.replaying)(x, *inputs)
        out = list(made) if isinstance(made, tuple) else [made]
        chosen = out[-2:] if self.records else []
        return out[: len(out) - len(chosen)], chosen

    def forward_flows(self, x: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the output for the next chunk, and the inputs of the layers, x_NH each; none if they are not kept."""
        made = self.layers(x, *inputs)
        y, *flows = made if isinstance(made, tuple) else (made,)
        return y, flows

    def inputs(self, batch: MicroBatch, experts: ExpertInputs | None) -> tuple[Tensor, ...]:
        """Returns the StageInputs of a micro-batch, followed by the ExpertInputs of the chunk's layers, if any, and by
        the features of images on the first stage of a model that sees some."""
        inputs = tensors_of(StageInputs, batch)
        if self._angles is not None:
            inputs = (Tensor(self._angles.of(batch.positions)), *inputs[1:])
        if self.records and experts is not None:
            inputs += tuple(map(Tensor, experts.of_layers(self._planned)))
        if self.stage.reads_features and self._images is not None:
            inputs += (Tensor(self._images.rows(batch.tokens)),)
        return inputs


class HandOvers:
    """The tensors that passes over `batches` receive from other stages and send to them."""

    def __init__(self, pipeline: ForwardPipeline, batches: Sequence[MicroBatch]) -> None:
        self._pipeline, self._batches = pipeline, batches
        self._arriving: dict[Pass, Callable[[], Any]] = {}
        self._made: dict[Pass, Any] = {}

    def make(self, own: Pass, made: Any) -> None:
        self._made[own] = made

    def take(self, own: Pass) -> Any:
        """Waits for the tensor that pass `own` receives from another stage, and returns it."""
        return self._arriving.pop(own)()

    def exchange(self, action: Exchange) -> None:
        sent = None if action.sends is None else self._made.pop(action.sends)
        shape = None
        if action.receives is not None:
            shape = self._pipeline.activations(
                self._batches[action.receives.micro_batch].tokens.size
            )
        arriving = self._pipeline.links[action.peer].exchange(sent, shape)
        if action.receives is not None:
            self._arriving[action.receives] = arriving


class ForwardPipeline:
    """Forward passes of `shard`'s pipeline stage over micro-batches of at most shape `widest`.

    Positions are below `num_positions`. `shapes` chooses the actual shapes of micro-batches. This rank holds stage
    `stage_index` of `num_stages`, split into `chunks`; `links` are point-to-point links by peer stage. `keeps_flows` is
    as in StageChunk.
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
        images: ImageFeatures | None = None,
    ) -> None:
        mesh = shard.weights.layout.mesh
        rank = shard.weights.rank
        self.shard = shard
        self.shapes = shape_choice(shard, backend, widest)
        self.is_trained = keeps_flows
        self.progress = partial(backend.health.progress, "micro-batches")
        self._show = lambda name: backend.span(name)
        # A row of one sample is its prompt followed by its completion, for which a causal mask suffices.
        is_causal = widest.max_per_row == 1
        layers = shard.config.layers
        ends = np.cumsum([sum(layers[i].has_experts for i in own.layers) for own in shard.chunks])
        planned = [slice(*ends_of) for ends_of in pairwise([0, *ends.tolist()])]
        self.chunks = tuple(
            StageChunk(
                own,
                backend,
                name if len(shard.chunks) == 1 else f"{name} chunk {number}",
                num_positions,
                temperature,
                recompute,
                is_causal,
                keeps_flows,
                planned[number],
                images,
            )
            for number, own in enumerate(shard.chunks)
        )
        shard.restore_names()
        self.stage_index = mesh.index(rank, "pp")
        self.num_stages = mesh.pp
        ranks = mesh.group(rank, ("pp",))
        self.experts = None if shard.config.moe is None else StageExperts(shard, backend)
        activations = self.activations(widest.tokens)
        self.links: dict[int, Link] = {}
        # The same order on all ranks, since making a link waits for the other end.
        for pair in neighbours(self.num_stages, len(self.chunks)):
            if self.stage_index in pair:
                (peer,) = pair - {self.stage_index}
                self.links[peer] = backend.link(ranks[peer], activations)

    def activations(self, num_tokens: int) -> tuple[int, int]:
        """Returns the shape of the hidden states of `num_tokens` tokens that are sent between stages."""
        return num_tokens // self.shard.token_shares, self.shard.config.hidden_size

    def span(self, own: Pass) -> AbstractContextManager[None]:
        """Context manager that marks a pass in a profile; on a device it covers the host's kernel launches."""
        of_chunk = f", chunk {own.chunk}" if len(self.chunks) > 1 else ""
        return self._show(f"{own.kind} {own.micro_batch}{of_chunk}")

    @property
    def has_head(self) -> bool:
        return self.chunks[-1].is_last

    def actions(self, num_micro_batches: int, has_backward: bool) -> Actions:
        """Returns this stage's schedule: its passes and exchanges, in order."""
        sizes = self.num_stages, len(self.chunks), num_micro_batches
        return pipeline_schedule(*sizes, has_backward)[self.stage_index]

    def batches_of(
        self, packed: PackedRollout, members: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        """Returns this rank's micro-batches of the samples `members`, or of all samples."""
        mesh, rank = self.shard.weights.layout.mesh, self.shard.weights.rank
        share, part = (mesh.index(rank, axis) for axis in ("dp", "cp"))
        shape = self.shapes.choose(packed, mesh.dp, members)
        return packed.micro_batches(shape, mesh.dp, share, members, part)

    def log_probs(
        self,
        batches: Sequence[MicroBatch],
        experts: Sequence[ExpertInputs] | None = None,
        keeps_choices: bool = False,
    ) -> tuple[list[Predictions] | None, list[Choices]]:
        """Returns (log-probs, entropies) of each micro-batch's labels, float32 [M] each; None except on the last stage.

        With `keeps_choices`, also returns the routers' Choices for each micro-batch in the stage's expert layers.
        """
        results = []
        recorded: list[list[Choices]] = [[] for _ in batches]
        others = HandOvers(self, batches)
        for action in self.actions(len(batches), has_backward=False):
            if isinstance(action, Exchange):
                others.exchange(action)
                continue
            batch, chunk = batches[action.micro_batch], self.chunks[action.chunk]
            if action.chunk == 0:
                self.progress(action.micro_batch, len(batches))
            x = Tensor(batch.tokens) if chunk.is_first else others.take(action)
            planned = None if experts is None else experts[action.micro_batch]
            with self.span(action):
                out, chosen = chunk.run(x, batch, planned)
                if chosen and keeps_choices:
                    made = Choices(*(own.asnumpy() for own in chosen))
                    recorded[action.micro_batch].append(made)
                if not chunk.is_last:
                    others.make(action, out[0])
                    continue
                results.append((out[0].asnumpy(), out[1].asnumpy()))
        choices = [Choices(*map(np.concatenate, zip(*own, strict=True))) for own in recorded if own]
        return results if self.has_head else None, choices

    def record(
        self, batches: Sequence[MicroBatch], packed: PackedRollout
    ) -> tuple[list[Predictions] | None, StepExperts | None]:
        """Collective call: returns log_probs and, for a trained model with experts, those of the samples.

        They are the experts of the generator, or else those that routers choose now. Together, the micro-batches of the
        ranks with the same layers must contain all samples.
        """
        if self.experts is None or not self.is_trained:
            return self.log_probs(batches)[0], None
        experts = self.experts.replayed(packed.rollout)
        inputs = None if experts is None else experts.inputs(batches)
        results, choices = self.log_probs(batches, inputs, keeps_choices=True)
        if experts is None:
            return results, self.experts.recorded(batches, choices, len(packed.rollout))
        return results, experts.compared(inputs, choices).measured(batches, choices)

    def replay(
        self, batches: Sequence[MicroBatch], experts: StepExperts | None
    ) -> tuple[list[Predictions] | None, StepExperts | None]:
        """Returns log_probs with tokens routed by `experts`, and `experts` with statistics of the routers' choices."""
        if experts is None:
            return self.log_probs(batches)[0], None
        inputs = experts.inputs(batches)
        results, choices = self.log_probs(batches, inputs, keeps_choices=True)
        return results, experts.compared(inputs, choices)

    def experts_of(self, packed: PackedRollout) -> StepExperts | None:
        """Returns the experts of the generator, or else those that routers choose now; None for a dense model."""
        if self.experts is None:
            return None
        replayed = self.experts.replayed(packed.rollout)
        return replayed or self.record(self.batches_of(packed), packed)[1]


def neighbours(num_stages: int, num_chunks: int) -> list[frozenset[int]]:
    """Returns the pairs of stages that send activations to each other; with several chunks they form a ring."""
    pairs = [(stage, stage + 1) for stage in range(num_stages - 1)]
    if num_chunks > 1:
        pairs.append((0, num_stages - 1))
    return list(map(frozenset, dict.fromkeys(pairs)))


def shape_choice(shard: Shard, backend: Backend, widest: MicroShape) -> ShapeChoice:
    """Returns the chooser of micro-batch shapes up to `widest` for `shard`."""
    return ShapeChoice(widest, 0.0 if backend.kernels.ragged else shard.config.column_cost)


def by_sample(
    batches: Sequence[MicroBatch], results: Sequence[Predictions] | None, group: Group
) -> dict[int, Predictions]:
    """Splits `results`, float32 [M] per micro-batch, by sample, float32 [completion length]; empty without results.

    Collective over `group`, the cp ranks that share rows, each of which has the results of its own tokens.
    """
    samples: dict[int, Predictions] = {}
    for micro, (logps, entropies) in zip(batches, results or [], strict=bool(results)):
        entropy = micro.gather(entropies)
        samples |= {i: (own, entropy[i]) for i, own in micro.gather(logps).items()}
    if group.size > 1 and samples:
        arrays = [own for pair in samples.values() for own in pair]
        ends = np.cumsum([own.size for own in arrays])
        # Tokens of other ranks are 0 here, so that the all-reduce changes no value.
        whole = iter(np.split(group.sum_array(np.concatenate(arrays)), ends[:-1]))
        samples = {i: (next(whole), next(whole)) for i in samples}
    return samples


def compute_log_probs(
    pipeline: ForwardPipeline | None, mesh: Mesh, backend: Backend, packed: PackedRollout
) -> list[np.ndarray]:
    """Collective call: returns the log-probs of each sample's completion, float32 [completion length], on all ranks.

    `pipeline` is None on ranks outside `mesh`.
    """
    return record_log_probs(pipeline, mesh, backend, packed)[0]


def record_log_probs(
    pipeline: ForwardPipeline | None, mesh: Mesh, backend: Backend, packed: PackedRollout
) -> tuple[list[np.ndarray], StepExperts | None]:
    """Like compute_log_probs, but also returns the experts that `pipeline` records."""
    own: dict[int, np.ndarray] = {}
    experts = None
    if pipeline is not None:
        batches = pipeline.batches_of(packed)
        results, experts = pipeline.record(batches, packed)
        samples = by_sample(batches, results, pipeline.shard.context_group)
        if mesh.group(backend.rank, ("cp", "tp"))[0] == backend.rank:
            own = {i: logps for i, (logps, _) in samples.items()}
    merged: dict[int, np.ndarray] = {}
    for logps_of_rank in backend.world.gather_objects(own):
        merged |= logps_of_rank
    if len(merged) != len(packed.rollout):
        raise ValueError(f"log-probs of {len(merged)} of {len(packed.rollout)} samples arrived")
    return [merged[i] for i in range(len(packed.rollout))], experts
