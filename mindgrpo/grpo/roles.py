"""The roles of a run on this rank (policy, reference, generator), built from a plan and moved between phases.

Knows which role needs which memory when, and that the generator's weights are the policy's current ones. Refuses to
know what a sample or a reward is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mindgrpo.algorithm.finite import in_arrays
from mindgrpo.algorithm.loss_config import Objective
from mindgrpo.algorithm.packing import MicroShape
from mindgrpo.backend.contract import Backend
from mindgrpo.config import memory_bytes
from mindgrpo.errors import UserError
from mindgrpo.grpo.run_plan import RunPlan
from mindgrpo.memory.residency import Location, Residency
from mindgrpo.models.decoder import Recompute, Shard
from mindgrpo.models.lora import fill_adapters
from mindgrpo.models.lora_specs import adapter_names
from mindgrpo.rollout.embedded.engine import Generator
from mindgrpo.rollout.sampling_params import SamplingSettings
from mindgrpo.training.optimizer import AdamWSettings
from mindgrpo.training.pipeline import Pipeline
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weight_sync.execute import Traffic
from mindgrpo.weight_sync.plan import Plan
from mindgrpo.weight_sync.syncer import WeightSyncer
from mindgrpo.weight_sync.verify import WeightCheck
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random, load_weights


@dataclass
class Reference:
    """`pipeline` is None on ranks outside the reference's grid."""

    weights: Weights
    pipeline: Pipeline | None


class Roles:
    def __init__(
        self,
        plan: RunPlan,
        backend: Backend,
        sampling: SamplingSettings,
        random_weights: bool = False,
        restored: Collection[str] = (),
    ) -> None:
        """`restored`: "policy" and "reference" are not read where a checkpoint will fill them."""
        self.plan, self.backend = plan, backend
        budget = plan.config.context.max_device_memory
        self.residency = Residency(memory_bytes(budget) if budget else None)
        self._random, self._restored = random_weights, restored
        settings = update_settings(plan, sampling, backend)
        self.policy = Policy(plan.model, plan.train, backend, settings, plan.lora)
        self.generator = Generator(plan.model, plan.infer, backend, sampling, plan.room)
        if "policy" not in restored:
            self._load(self.policy.weights, plan.config.actor_config.load)
        if self.policy.adapters is not None:
            fill_adapters(self.policy.adapters.weights, plan.config.rl_config.seed)
        self.reference = self._make_reference(sampling)
        self._to_generator = self._syncer_to(self.generator.weights, plan.reshard)
        self._make_reference_sync()
        self.traffic = Traffic(0, 0.0)
        self.weight_check = self._make_weight_check()
        self._register_memory()

    def _make_weight_check(self) -> WeightCheck:
        adapters = self.policy.adapters
        added = {spec.name for spec in adapters.weights.layout.specs} if adapters else set()
        names = (spec.name for spec in self.plan.train.specs)
        adapted = frozenset(name for name in names if adapter_names(name)[1] in added)
        return WeightCheck(self.backend, self.plan.config.rl_config.checksum_interval, adapted)

    def _load(self, weights: Weights, directory: str) -> None:
        if self._random:
            fill_random(weights, self.plan.config.rl_config.seed)
        else:
            load_weights(weights, directory)
            bad = in_arrays(weights.parts.items())
            if bad is not None:
                raise UserError(
                    f"The model in '{directory}' holds a number that is not finite ({bad}), and everything computed "
                    "with it would be; restore its safetensors files from their source."
                )

    def _make_reference(self, sampling: SamplingSettings) -> Reference | None:
        plan = self.plan
        if plan.reference is None:
            return None
        weights = Weights(plan.reference, self.backend.rank, self.backend)
        pipeline = None
        if plan.reference.grid.holds(self.backend.rank):
            if "reference" not in self._restored:
                self._load(weights, plan.config.reference_load)
            pipeline = Pipeline(
                Shard(plan.model, weights, self.backend, "reference"),
                self.backend,
                "reference",
                micro_shape(plan, plan.config.ref_config.ref_model_batch_size, self.backend),
                plan.row_length,
                sampling.trainer_temperature,
            )
        return Reference(weights, pipeline)

    def _make_reference_sync(self) -> None:
        """The policy's way to the reference's weights, or to a copy that is then mixed into them."""
        self._to_reference: WeightSyncer | None = None
        self._reference_copy: Weights | None = None
        ref = self.plan.config.ref_config
        if self.reference is not None and ref.sync_ref_model:
            target = self.reference.weights
            if ref.ref_model_mixup_alpha < 1.0:
                target = Weights(target.layout, self.backend.rank, self.backend)
                self._reference_copy = target
            self._to_reference = self._syncer_to(target)

    def _register_memory(self) -> None:
        policy, residency = self.policy, self.residency
        trained = [policy.adapters.weights.pool] if policy.adapters else []
        residency.register("policy", [policy.weights.pool, *trained], rebuilt=False, filled=True)
        residency.register("gradients", [policy.gradients.pool], rebuilt=True, filled=False)
        moments = [policy.optimizer.first.pool, policy.optimizer.second.pool]
        if policy.settings.moments_on_host:
            residency.register_host("optimizer", moments)
        else:
            residency.register("optimizer", moments, rebuilt=False, filled=True)
        residency.register("generator", [self.generator.weights.pool], rebuilt=True, filled=False)
        residency.register("kv_cache", self.generator.pools, rebuilt=True, filled=False)
        if self.reference is not None:
            residency.register(
                "reference", [self.reference.weights.pool], rebuilt=False, filled=True
            )
        copies = {"adapters_copy": self._to_generator.copies}
        if self._to_reference is not None:
            own = [self._reference_copy.pool] if self._reference_copy else []
            copies["reference_copy"] = [*own, *self._to_reference.copies]
        for name, pools in copies.items():
            if pools:
                residency.register(name, pools, rebuilt=True, filled=False)
        residency.check_budget()

    def enter(self, phase: str) -> None:
        self.residency.activate(phase)

    def refresh_generator(self) -> None:
        """Gives the generator the policy's current weights, unless it has them already."""
        present = self.residency.roles["generator"].location is Location.DEVICE
        is_fresh = present and self.generator.version == self.policy.version
        if is_fresh and not self.weight_check.lacks(self.policy.version):
            return
        self.enter("reshard")
        weights = [self.policy.weights]
        if self.policy.adapters is not None:
            weights.append(self.policy.adapters.weights)
        self.weight_check.keep(weights, self.policy.version)
        if not is_fresh:
            self.traffic = self._to_generator.run()
            self.generator.version = self.policy.version

    def check_generator(self) -> None:
        """With its weights on the device. Raises WeightsDiffer."""
        self.weight_check.check(self.generator.weights, self.policy.version)

    def _syncer_to(self, target: Weights, plan: Plan | None = None) -> WeightSyncer:
        policy = self.policy
        return WeightSyncer(policy.weights, policy.adapters, target, self.backend, plan)

    def sync_reference(self) -> None:
        """reference = share * policy + (1 - share) * reference (TR-DPO, arXiv:2404.09656)."""
        if self.reference is None or self._to_reference is None:
            return
        self.enter("sync_reference")
        self._to_reference.run()
        share = self.plan.config.ref_config.ref_model_mixup_alpha
        if self._reference_copy is not None:
            old, new = self.reference.weights, self._reference_copy
            for run, fresh in zip(old.runs, new.runs, strict=True):
                run *= 1.0 - share
                run += share * fresh
            old.pool.push()


def micro_shape(plan: RunPlan, rows: int, backend: Backend) -> MicroShape:
    """`rows` rows of seq_length, or one as long as all of them where length costs nothing by itself."""
    rl = plan.config.rl_config
    if not rl.packing:
        return MicroShape(rows, plan.row_length, 1)
    if backend.kernels.ragged:
        return MicroShape(1, rows * plan.row_length, rl.pack_num and rows * rl.pack_num)
    return MicroShape(rows, plan.row_length, rl.pack_num)


def update_settings(plan: RunPlan, sampling: SamplingSettings, backend: Backend) -> UpdateSettings:
    rl, actor = plan.config.rl_config, plan.config.actor_config
    optimizer = actor.optimizer
    return UpdateSettings(
        shape=micro_shape(plan, rl.batch_size // rl.micro_batch_interleaved, backend),
        num_positions=plan.row_length,
        temperature=sampling.trainer_temperature,
        recompute=Recompute(actor.recompute_config.parts, actor.recompute_config.every),
        objective=Objective.of(plan.config),
        max_grad_norm=optimizer.max_grad_norm,
        adamw=AdamWSettings(
            optimizer.adam_beta1, optimizer.adam_beta2, optimizer.eps, optimizer.weight_decay
        ),
        moments_on_host=optimizer.opt_offload,
    )
