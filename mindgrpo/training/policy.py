"""A model being trained, policy or critic, on one rank: forward passes, optimizer updates, the version of its weights.

A critic is a policy with a scalar head, whose loss is the ValueLoss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.non_finite import NonFinite, in_arrays
from mindgrpo.algorithm.packing import MicroBatch, MicroShape
from mindgrpo.backend.contract import Backend, Pool
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.models.decoder import Recompute
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.expert_plan import ExpertInputs
from mindgrpo.models.lora import LoraSettings, adapter_specs
from mindgrpo.models.pipeline import ForwardPipeline, Predictions, StageChunk, shape_choice
from mindgrpo.models.shard import Adapters, Shard
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.optimizer import AdamW, moments_of
from mindgrpo.training.pipeline import forward_backward
from mindgrpo.training.stage_graphs import LossInputs, LossStep, PolicyLoss, StageBackward, Trained
from mindgrpo.training.value_loss import ValueLoss
from mindgrpo.weights.expert_files import BIAS, addends
from mindgrpo.weights.local_weights import Weights


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of updates: the largest micro-batch `shape`, the limit `num_positions`, the sampling `temperature`.

    `keeps_entropies`: update reports contain every token's entropy.
    """

    shape: MicroShape
    num_positions: int
    temperature: float
    recompute: Recompute
    loss_config: AlgorithmConfig
    max_grad_norm: float
    adamw: AdamWSettings
    moments_on_host: bool = False
    loss_scale: float = 1.0
    max_tokens: int = 1  # of a completion
    keeps_entropies: bool = False
    # ZeRO-1 over the ranks that train the same parameters.
    shards_optimizer: bool = False
    bias_update_rate: float = 0.0  # of routers


class TrainedWeights:
    """All tensors of training on this rank: weights, adapters, gradients, master weights and moments; no graphs.

    `role` is "policy" or "critic". `masters` are the float32 weights that the optimizer updates: the trained weights
    themselves, or a separate copy that is rounded into them. `shards_optimizer` splits masters and moments over the
    ranks that train the same parameters (ZeRO-1).
    """

    def __init__(
        self,
        layout: Layout,
        backend: Backend,
        lora: LoraSettings | None = None,
        shards_optimizer: bool = False,
        moments_on_host: bool = False,
        role: str = "policy",
    ) -> None:
        self.backend, self._moments_on_host = backend, moments_on_host
        self.role, self._prefix = role, "" if role == "policy" else f"{role}_"
        self.weights = Weights(
            layout, backend.rank, backend, role, shared=True, dtype=backend.compute_dtype
        )
        self.adapters: Adapters | None = None
        if lora is not None:
            specs = adapter_specs(layout.specs, lora)
            adapted = Weights(
                replace(layout, specs=specs), backend.rank, backend, "adapters", shared=True
            )
            self.adapters = Adapters(adapted, lora)
        name = f"{self._prefix}gradient"
        self.gradients = Weights(self.trained.layout, backend.rank, backend, name)
        self._is_sharded = shards_optimizer and self.trained.layout.has_replicas
        self.masters = self._make_masters()
        self.moments = moments_of(self.gradients, backend, moments_on_host, self._is_sharded)

    @property
    def pools(self) -> dict[str, list[Pool]]:
        """Lists the memory on the device by role."""
        adapters = [self.adapters.weights.pool] if self.adapters else []
        by_role = {"gradients": [self.gradients.pool]}
        if not self._moments_on_host:
            by_role["optimizer"] = [moment.pool for moment in self.moments]
        if self.has_masters:
            by_role["master_weights"] = [self.masters.pool]
        others = {f"{self._prefix}{name}": pools for name, pools in by_role.items()}
        return {self.role: [self.weights.pool, *adapters], **others}

    @property
    def optimizer_bytes(self) -> int:
        """Returns the bytes of the moments, and of the master weights if these are a separate copy."""
        own = [*self.moments, *([self.masters] if self.has_masters else [])]
        return sum(weights.num_bytes for weights in own)

    @property
    def host_pools(self) -> dict[str, list[Pool]]:
        """Lists the pools that stay in host memory, by role."""
        moments = [moment.pool for moment in self.moments]
        return {f"{self._prefix}optimizer": moments} if self._moments_on_host else {}

    @property
    def trained(self) -> Weights:
        """Returns the weights that have gradients: the LoRA adapters if there are any, else the model's weights."""
        return self.adapters.weights if self.adapters else self.weights

    @property
    def has_masters(self) -> bool:
        """Returns whether the master weights are a separate copy, which is rounded into the trained weights."""
        return self.masters is not self.trained

    def _make_masters(self) -> Weights:
        """Returns the float32 master weights: the trained weights themselves, or a copy, only its share if sharded."""
        trained = self.trained
        # A graph updates whole parameters, never rows of one.
        in_place = trained.pool.is_host_memory or not self._is_sharded
        if trained.dtype == "float32" and in_place:
            return trained
        layout = trained.layout.split_over_data() if self._is_sharded else trained.layout
        name = f"{self._prefix}master"
        return Weights(layout, self.backend.rank, self.backend, name, shared=True)


class Policy(TrainedWeights):
    def __init__(
        self,
        config: DecoderConfig,
        layout: Layout,
        backend: Backend,
        settings: UpdateSettings,
        lora: LoraSettings | None = None,
        role: str = "policy",
        images: ImageFeatures | None = None,
    ) -> None:
        shards, on_host = settings.shards_optimizer, settings.moments_on_host
        super().__init__(layout, backend, lora, shards, on_host, role)
        self.settings = settings
        self.shard = Shard(config, self.weights, backend, self.adapters)
        self.pipeline = ForwardPipeline(
            self.shard,
            backend,
            role,
            settings.shape,
            settings.num_positions,
            settings.temperature,
            settings.recompute,
            keeps_flows=True,
            images=images,
        )
        # Of the backward graphs; those of the forward passes are the pipeline's.
        self.shapes = shape_choice(self.shard, backend, settings.shape)
        self.optimizer = AdamW(
            self.masters,
            self.gradients,
            backend,
            settings.adamw,
            settings.moments_on_host,
            self.trained if self.has_masters else None,
            self._is_sharded,
            self.moments,
        )
        self._backward: dict[tuple[StageChunk, bool], Any] = {}
        self.version = 0
        self.updates = 0

    def masters_changed(self) -> None:
        """Rounds the master weights into the trained ones. Collective; to be called whenever the masters changed."""
        self.optimizer.weights_changed()

    def _backward_graph(self, chunk: StageChunk, has_old: bool) -> Any:
        """Returns the chunk's backward graph; the last chunk has two, with and without old log-probs."""
        key = chunk, has_old and chunk.is_last
        if key not in self._backward:
            parameters = self.trained.parameters
            trained = Trained(parameters, self.gradients.parameters, self.settings.loss_scale)
            shard, cell = chunk.shard, None
            if chunk.net is None:
                cell = StageBackward(chunk.stage, shard.layers, trained)
            else:
                config = self.settings.loss_config
                loss: Any = PolicyLoss(config, has_old, shard.context_group)
                if shard.config.head == "scalar":
                    loss = ValueLoss(config.cliprange_value or None)
                cell = LossStep(chunk.net, shard.layers, shard.head_key, loss, trained)
            shard.restore_names()
            self.gradients.restore_names()
            self._backward[key] = self.backend.graph(cell, f"{chunk.name} backward")
        return self._backward[key]

    def accumulate(
        self,
        batches: Sequence[MicroBatch],
        loss_inputs: Sequence[LossInputs],
        has_old: bool,
        experts: Sequence[ExpertInputs] | None = None,
    ) -> list[Predictions] | None:
        """Accumulates the gradients of all micro-batches; `experts[i]` are given for models with experts.

        Returns log-probs and entropies, float32 [M] each, of every micro-batch; None unless this is the last stage.
        """
        backward = [self._backward_graph(chunk, has_old) for chunk in self.pipeline.chunks]
        return forward_backward(self.pipeline, batches, backward, loss_inputs, experts)

    def gradient_norm(self) -> float:
        """Reduces the accumulated gradients over the ranks; returns their global 2-norm before clipping."""
        return self.optimizer.sum_gradients()

    def bad_gradient(self) -> NonFinite | None:
        """Returns the first non-finite number in this rank's gradients, None if all are finite."""
        with self.gradients.on_host() as host:
            return in_arrays((f"the gradient of {name}", g) for name, g in host.hf_views.items())

    def apply(self, norm: float, lr: float) -> None:
        """Takes one optimizer step with the accumulated gradients, clipped by their global `norm`, and zeroes them."""
        limit = self.settings.max_grad_norm
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        self.updates += 1
        self.optimizer.step(self.updates, lr, scale)
        self.version += 1

    def move_biases(self, load: np.ndarray) -> None:
        """Moves the routers' selection biases towards an even load (arXiv:2408.15664, algorithm 1).

        `load` [L, E] counts the tokens routed to each of E experts in the stage's L layers with experts, over the whole
        update.
        """
        steps = self.settings.bias_update_rate * np.sign(load.mean(1, keepdims=True) - load)
        layers, chunks = self.shard.config.layers, self.shard.chunks
        with_experts = [i for own in chunks for i in own.layers if layers[i].has_experts]
        names = [f"model.layers.{index}.mlp.{BIAS}" for index in with_experts]
        # Read from the trained weights, which hold the bias whole; sharded masters hold only some rows.
        with self.weights.on_host() as own:
            before = [own.hf_views[name].astype(np.float32).sum(0) for name in names]
        # One by one: a stage may have no layer with experts.
        pairs = zip(names, before, steps.astype(np.float32), strict=True)
        moved = {name: addends(bias + step) for name, bias, step in pairs}
        for weights in (self.weights, self.masters) if self.has_masters else (self.weights,):
            with weights.on_host(write=True) as host:
                for name in weights.boxes.keys() & moved:
                    host.hf_views[name][...] = moved[name][weights.boxes[name].slices]

    def clear_gradients(self) -> None:
        self.optimizer.clear_gradients()
