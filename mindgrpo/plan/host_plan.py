"""What a run needs of the host's memory, and what passes between device and host in a step. Pure.

The phases of a step are gone through with the very Residency of a run, over pools that are only counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mindgrpo.backend.dtypes import ITEM_BYTES
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.memory.residency import CountedPool, Residency
from mindgrpo.models.lora_specs import adapter_specs
from mindgrpo.models.parameters import num_parameters
from mindgrpo.models.precision import compute_dtype
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.plan.device_plan import phase_needs
from mindgrpo.plan.run_plan import FLOAT_BYTES, LARGEST, RunPlan, generator_bytes
from mindgrpo.rollout.vllm.settings import engine_dtype
from mindgrpo.weights.safetensors_writer import MAX_SHARD_BYTES

# Roles that are made again instead of kept on the host (grpo/roles.py).
REBUILT = frozenset(("gradients", "generator", "kv_cache", "adapters_copy", "reference_copy"))
# Policy and the optimizer's two moments, in float32.
COPIES_IN_A_CHECKPOINT = 3


@dataclass(frozen=True)
class RankTraffic:
    """Of one rank: what a step copies between device and host, and the most that is on the host for it."""

    step_bytes: int
    host_bytes: int


class HostPlan:
    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    @cached_property
    def step_bytes(self) -> int:
        """Between device and host in a step, over all ranks, without evaluations, checkpoints and the first step."""
        return sum(number * traffic.step_bytes for traffic, number in self._traffic.items())

    @property
    def swapped_bytes(self) -> int:
        """Of roles that leave the device within a step, on the rank with most."""
        return max(traffic.host_bytes for traffic in self._traffic)

    @cached_property
    def _traffic(self) -> Mapping[RankTraffic, int]:
        """How many ranks have which."""
        plan = self._plan
        if plan.config.context.target == SHARED_MEMORY:
            return {RankTraffic(0, 0): plan.world_size}
        stages = Counter(self._stages(rank) for rank in range(plan.world_size))
        traffic: Counter[RankTraffic] = Counter()
        for (train, reference), number in stages.items():
            traffic[self._rank_traffic(train, reference)] += number
        if plan.config.generate_config.uses_vllm:
            # Each replica's first rank hands the whole model over.
            whole = num_parameters(plan.model) * ITEM_BYTES[compute_dtype(plan.config)]
            traffic[RankTraffic(whole, 0)] += plan.infer.mesh.data_parallel
        return traffic

    def _stages(self, rank: int) -> tuple[int, int | None]:
        reference = self._plan.reference
        if reference is None or not reference.mesh.holds(rank):
            return self._plan.train.mesh.coordinates(rank).stage, None
        return self._plan.train.mesh.coordinates(rank).stage, reference.mesh.coordinates(rank).stage

    def _rank_traffic(self, train: int, reference: int | None) -> RankTraffic:
        plan = self._plan
        reserved = {need.phase: need.beside_pools for need in phase_needs(plan)}
        # What does not fit is the verdict's word; copies are told as of a device that is just large enough.
        budget = plan.config.context.max_device_bytes
        if budget is not None:
            budget = max(budget, *(row.total for row in plan.memory()))
        residency = Residency(budget, keeps=True, reserved=reserved)
        for role, size in plan.bytes_by_role(train, reference).items():
            is_rebuilt = role in REBUILT
            residency.register(role, [CountedPool(size)], is_rebuilt, filled=not is_rebuilt)
        for phase in self._phases():
            residency.activate(phase)
        before, most = residency.ledger.transfer_bytes, 0
        for phase in self._phases():
            residency.activate(phase)
            most = max(most, residency.host_bytes)
        copied = residency.ledger.transfer_bytes - before
        return RankTraffic(copied + self._optimizer_bytes(train), most)

    def _phases(self) -> list[str]:
        plan = self._plan
        rl = plan.config.rl_config
        phases = ["reshard", "rollout"]
        if plan.reference is not None:
            phases.append("reference")
        if rl.enable_oldpolicy and plan.batch.updates_per_step > 1:
            phases.append("old_logps")
        phases.append("update")
        ref = plan.config.ref_config
        if plan.reference is not None and ref.sync_ref_model and ref.ref_model_sync_steps == 1:
            phases.append("sync_reference")
        return phases

    def _optimizer_bytes(self, stage: int) -> int:
        """With moments on the host, weights and gradients go there and come back in every update."""
        if not self._plan.config.actor_config.optimizer.opt_offload:
            return 0
        return 4 * self._plan.trained_bytes(stage) * self._plan.batch.updates_per_step

    def lines(self) -> list[str]:
        """Of the host's memory a rank, and of a step's copies."""
        plan = self._plan
        config, on_host = plan.config, plan.config.context.target.keeps_weights_on_host
        trained = plan.trained_bytes(LARGEST)
        sizes = {"roles that leave the device": self.swapped_bytes}
        if config.actor_config.optimizer.opt_offload:
            sizes["moments (opt_offload)"] = 2 * trained
            if not on_host:
                sizes["weights and gradients while the optimizer runs"] = 2 * trained
        if config.generate_config.uses_vllm:
            sizes["bucket that vLLM reads weights from"] = self._bucket_bytes()
            if not on_host:
                sizes["vLLM's weights while it sleeps"] = generator_bytes(config, plan.infer)
        if config.rl_config.save_ckpt_interval:
            share = COPIES_IN_A_CHECKPOINT * FLOAT_BYTES * num_parameters(plan.model)
            sizes["a checkpoint until it is written"] = share // plan.world_size
        lines = [f"{format_bytes(size):>10} a rank: {what}" for what, size in sizes.items() if size]
        export = format_bytes(self.export_bytes)
        lines.append(f"{export:>10} on rank 0: what is in memory of the model when it is written")
        if config.context.target == SHARED_MEMORY:
            return [*lines, "nothing is copied between device and host: they are one memory"]
        return [
            *lines,
            f"{format_bytes(self.step_bytes):>10} a step between device and host, over all ranks",
        ]

    @property
    def export_bytes(self) -> int:
        """On rank 0: a group of tensors as they are kept, and in float32 those of a file that is not full yet."""
        plan, lora = self._plan, self._plan.lora
        kept = FLOAT_BYTES if lora is None else ITEM_BYTES[compute_dtype(plan.config)]
        largest = FLOAT_BYTES * max(math.prod(spec.shape) for spec in plan.train.specs)
        whole = FLOAT_BYTES * num_parameters(plan.model)
        export = self._largest_group * kept + min(whole, max(MAX_SHARD_BYTES, largest) + largest)
        if lora is not None:
            # Whole adapters, and a tensor of narrow weights on its way to float32.
            sizes = (math.prod(spec.shape) for spec in adapter_specs(plan.train.specs, lora))
            export += FLOAT_BYTES * sum(sizes) + (largest if kept != FLOAT_BYTES else 0)
        return export

    def _bucket_bytes(self) -> int:
        """The largest group of tensors, in vLLM's dtype and once more in the run's where that is another."""
        config = self._plan.config
        dtypes = {engine_dtype(config), compute_dtype(config)}
        return self._largest_group * sum(ITEM_BYTES[dtype] for dtype in dtypes)

    @property
    def _largest_group(self) -> int:
        """Elements of a layer, or of what stands before or after the layers."""
        groups: Counter[object] = Counter()
        for spec in self._plan.train.specs:
            groups[spec.position] += math.prod(spec.shape)
        return max(groups.values())
