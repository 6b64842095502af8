"""The roles of a run on this rank: policy, reference and engine.

Moves each phase's roles onto the device, and keeps the weights of engine and reference in sync with the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mindgrpo.algorithm.image_tokens import ImageTable
from mindgrpo.algorithm.row_shapes import ShapeChoice
from mindgrpo.backend.contract import Backend
from mindgrpo.grpo.image_encoder import ImageEncoder
from mindgrpo.grpo.reward_model import RewardModel
from mindgrpo.memory.residency import REFERENCE, VISION, Residency, needed_in
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.rollout.engine import RolloutEngine
from mindgrpo.training.policy import Policy
from mindgrpo.weight_sync.execute import Traffic
from mindgrpo.weight_sync.transfer import WeightCheck, WeightSyncer, mix
from mindgrpo.weights.local_weights import Weights


@dataclass
class Reference:
    """`pipeline` is None on ranks outside of the reference's mesh."""

    weights: Weights
    pipeline: ForwardPipeline | None


class TrainedRoles:
    """The roles of supervised training: the policy alone."""

    reference: Reference | None = None
    reward_models: Sequence[RewardModel] = ()
    critic: Policy | None = None

    def __init__(
        self,
        plan: RunPlan,
        backend: Backend,
        policy: Policy,
        residency: Residency,
        encoder: ImageEncoder | None = None,
    ) -> None:
        self.encoder = encoder
        self.plan, self.backend, self.policy, self.residency = plan, backend, policy, residency
        self.traffic = Traffic(0, 0.0)
        self._counted = backend.host_device_bytes
        residency.add(policy.pools)
        if encoder is not None:
            residency.add({VISION: [encoder.weights.pool]})
        for name, pools in policy.host_pools.items():
            residency.register_host(name, pools)

    @property
    def shape_choices(self) -> Mapping[str, ShapeChoice]:
        """Returns the chooser of micro-batch shapes of each phase."""
        return {"old_logps": self.policy.pipeline.shapes, "update": self.policy.shapes}

    def host_device_bytes(self) -> int:
        """Returns the bytes this rank copied between device and host since the last call."""
        counted, self._counted = self._counted, self.backend.host_device_bytes
        return self._counted - counted

    def enter(self, phase: str) -> None:
        """Loads the phase's pools onto the device and offloads the others."""
        self.residency.activate(phase)

    @property
    def image_table(self) -> ImageTable | None:
        """Returns the images of the run's prompts; None for a model that sees none."""
        return None if self.encoder is None else self.encoder.features.table

    def encode_images(self, prompts: Sequence[np.ndarray], keeps: bool = False) -> int:
        """Encodes the prompts' images that have no features yet (ImageEncoder.encode). Collective."""
        if self.encoder is None:
            return 0
        return self.encoder.encode(prompts, keeps, partial(self.enter, "images"))


class Roles(TrainedRoles):
    """The roles of GRPO; `reference` is None if the loss needs none, and `reward_models` are weighed in rewards.

    `reference_mixup` is the policy's weight in `sync_reference`, None to keep the reference fixed. `traffic` is that of
    the last weight transfer to the engine.
    """

    def __init__(
        self,
        plan: RunPlan,
        backend: Backend,
        policy: Policy,
        engine: RolloutEngine,
        reference: Reference | None,
        weight_check: WeightCheck,
        residency: Residency,
        reference_mixup: float | None = None,
        reward_models: Sequence[RewardModel] = (),
        critic: Policy | None = None,
        encoder: ImageEncoder | None = None,
    ) -> None:
        super().__init__(plan, backend, policy, residency, encoder)
        self.engine, self.reference, self.weight_check = engine, reference, weight_check
        self.reward_models, self.critic = reward_models, critic
        self._to_engine = engine.transfer_from(policy.weights, policy.adapters, plan.reshard)
        # Transfers the policy's weights to the reference, or to a copy that is then mixed into it.
        self._mixup = reference_mixup
        self._to_reference: WeightSyncer | None = None
        self._reference_copy: Weights | None = None
        if reference is not None and reference_mixup is not None:
            target = reference.weights
            if reference_mixup < 1.0:
                self._reference_copy = target = Weights(
                    target.layout, backend.rank, backend, "reference_copy", dtype=target.dtype
                )
            self._to_reference = self._syncer_to(target)
        self._register_copies()

    @property
    def shape_choices(self) -> Mapping[str, ShapeChoice]:
        """Returns the chooser of micro-batch shapes of each phase."""
        beside = {model.role: model.pipeline for model in self.reward_models}
        if self.reference is not None:
            beside[REFERENCE] = self.reference.pipeline
        own = {name: pipeline.shapes for name, pipeline in beside.items() if pipeline is not None}
        if self.critic is not None:
            own |= {"values": self.critic.pipeline.shapes, "update_critic": self.critic.shapes}
        return {**super().shape_choices, **own}

    def _register_copies(self) -> None:
        residency = self.residency
        residency.add(self.engine.pools)
        if self.reference is not None:
            residency.add({REFERENCE: [self.reference.weights.pool]})
        residency.add({model.role: [model.weights.pool] for model in self.reward_models})
        if self.critic is not None:
            residency.add(self.critic.pools)
            for name, pools in self.critic.host_pools.items():
                residency.register_host(name, pools)
        copies = {"adapters_copy": list(self._to_engine.copies)}
        if self._to_engine.host_copies:
            residency.register_host("engine_bucket", self._to_engine.host_copies)
        if self._to_reference is not None:
            own = [self._reference_copy.pool] if self._reference_copy else []
            copies["reference_copy"] = [*own, *self._to_reference.copies]
        residency.add(copies)
        residency.check_budget()

    def enter(self, phase: str) -> None:
        needs_engine = "generator" in needed_in(phase)
        if not needs_engine:
            self.engine.sleep()
        super().enter(phase)
        if needs_engine:
            self.engine.wake()

    def refresh_engine(self) -> None:
        """Transfers the policy's current weights to the engine, unless it has them already."""
        policy = self.policy
        is_fresh = self.engine.version == policy.version
        if is_fresh and not self.weight_check.lacks(policy.version):
            return
        self.enter("reshard")
        weights = [policy.weights]
        if policy.adapters is not None:
            weights.append(policy.adapters.weights)
        self.weight_check.keep(weights, policy.version)
        if not is_fresh or not self._to_engine.has_sums:
            transfer = partial(self._to_engine.run, self.weight_check.is_due)
            self.traffic = self.engine.publish(transfer, policy.version)

    def enter_rollout(self) -> int:
        """Wakes the engine and verifies its weights; returns their version. Raises WeightsDiffer."""
        self.enter("rollout")
        self.weight_check.check(self._to_engine, self.policy.version)
        return self.policy.version

    def encode_in_rollout(self, prompts: Sequence[np.ndarray]) -> None:
        """Encodes images of prompts that are made while the engine generates, which goes on then. Collective."""
        if self.encode_images(prompts, keeps=True):
            self.refresh_engine()
            self.enter_rollout()

    def _syncer_to(self, target: Weights) -> WeightSyncer:
        policy = self.policy
        return WeightSyncer(policy.weights, policy.adapters, target, self.backend)

    def sync_reference(self) -> None:
        """Sets reference = mixup * policy + (1 - mixup) * reference (TR-DPO, arXiv:2404.09656)."""
        if self.reference is None or self._to_reference is None:
            return
        self.enter("sync_reference")
        self._to_reference.run()
        if self._reference_copy is not None and self._mixup is not None:
            mix(self.reference.weights, self._reference_copy, self._mixup)
            self.backend.synchronize()
