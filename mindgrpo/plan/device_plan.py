"""What each phase needs of a rank's device: pools, what graphs hold beside them, and communication's buffers. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.errors import UserError
from mindgrpo.memory.account import PhaseMemory
from mindgrpo.models.lora_specs import adapter_specs
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.sharding import Layout, local_shape
from mindgrpo.plan.activation_plan import activation_bytes
from mindgrpo.plan.run_plan import FLOAT_BYTES, RunPlan
from mindgrpo.rollout.vllm.settings import device_share
from mindgrpo.training.buckets import BUCKET_BYTES
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.rounds import device_buffer_bytes


@dataclass(frozen=True)
class PhaseNeed:
    """Bytes on the device of the rank that needs most: `pools` are exact, the others are computed from shapes."""

    pools: PhaseMemory
    activations: int
    buffers: int

    @property
    def phase(self) -> str:
        return self.pools.phase

    @property
    def beside_pools(self) -> int:
        """Sums of gradients begin when the last activation is gone."""
        return max(self.activations, self.buffers)

    @property
    def total(self) -> int:
        return self.pools.total + self.beside_pools

    def __str__(self) -> str:
        terms = [f"pools {format_bytes(self.pools.total)}"]
        if self.activations:
            terms.append(f"activations {format_bytes(self.activations)}")
        if self.buffers:
            together = "or" if self.activations else "+"
            terms[-1] += f" {together} buffers {format_bytes(self.buffers)}"
        return f"{self.phase:<15}{format_bytes(self.total):>10} a rank = {' + '.join(terms)}"


def phase_needs(plan: RunPlan) -> list[PhaseNeed]:
    """Of every phase that the run has."""
    activations = activation_bytes(plan)
    buffers = {} if plan.config.context.target == SHARED_MEMORY else _buffers(plan)
    return [
        PhaseNeed(row, activations.get(row.phase, 0), buffers.get(row.phase, 0))
        for row in plan.memory()
        if row.total and _has(plan, row.phase)
    ]


def most_needed(plan: RunPlan) -> PhaseNeed:
    return max(phase_needs(plan), key=lambda need: need.total)


def check_engine(plan: RunPlan) -> None:
    """Raises UserError where vLLM and what the run has beside it do not fit a device, as far as its memory is known."""
    config, device = plan.config, plan.device_memory
    generate, keeps = config.generate_config, config.context.target.keeps_weights_on_host
    if not generate.uses_vllm or keeps or device is None:
        return
    for need in phase_needs(plan):
        engine = need.pools.by_role.get("generator")
        if engine is None or need.total <= device:
            continue
        share = device_share(config)
        key = "vllm.kv_cache_memory" if share is None else f"gpu_memory_utilization {share:g}"
        raise UserError(
            f"generate_config.{key} gives vLLM {format_bytes(engine)} of each device, and in phase {need.phase} the "
            f"run has {format_bytes(need.total - engine)} there beside it: {format_bytes(need.total)} together, but a "
            f"device has {format_bytes(device)} (context.max_device_memory, or what it says itself); lower "
            f"generate_config.{key.partition(' ')[0]}, or raise actor_config.parallel_config.model_parallel or "
            "pipeline_stage."
        )


def _has(plan: RunPlan, phase: str) -> bool:
    if phase == "sync_reference":
        return plan.reference is not None and plan.config.ref_config.sync_ref_model
    return phase != "reference" or plan.reference is not None


def _buffers(plan: RunPlan) -> dict[str, int]:
    """Where devices have memory of their own and ranks reach one another by sending. Those that the communication's
    own library keeps are not known."""
    sizes = {"reshard": device_buffer_bytes(plan.reshard), "update": _sum_bytes(plan)}
    if plan.reference is not None and plan.config.ref_config.sync_ref_model:
        to_reference = plan_reshard(plan.train, plan.reference, plan.reshard.itemsize)
        sizes["sync_reference"] = device_buffer_bytes(to_reference)
    return sizes


def _sum_bytes(plan: RunPlan) -> int:
    """Of a sum of gradients over data-parallel ranks: a bucket, a rank's share of its sum, and the sum."""
    num_ranks = plan.train.mesh.data_parallel
    if num_ranks == 1:
        return 0
    layout, lora = plan.train, plan.lora
    if lora is not None:
        layout = replace(layout, specs=adapter_specs(layout.specs, lora))
    bucket = max(BUCKET_BYTES, _largest(layout) * FLOAT_BYTES)
    return 2 * bucket + bucket // num_ranks


def _largest(layout: Layout) -> int:
    """Elements of a rank's largest tensor; those of gate and up are one."""
    tp_size = layout.mesh.model_parallel
    sizes = [
        math.prod(local_shape(spec, tp_size)) * (2 if "gate_proj" in spec.name else 1)
        for spec in layout.specs
    ]
    return max(sizes)
