"""Computes what each phase needs of a rank's device and of the host, and what passes between the two in a step. Pure.

On the device: pools, what graphs hold beside them, and communication's buffers. The phases of a step are gone through
with the very Residency of a run, over pools that are only counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mindgrpo.backend.arithmetic.device_rows import BUCKET_BYTES
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import REFERENCE, CountedPool, PhaseMemory, Residency
from mindgrpo.models.parameters import num_parameters
from mindgrpo.models.precision import compute_dtype
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.mesh import DENSE_DATA
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.activations import activation_bytes
from mindgrpo.plan.image_needs import feature_bytes
from mindgrpo.plan.run_plan import FLOAT_BYTES, LARGEST, RunPlan, generator_bytes
from mindgrpo.rollout.vllm.settings import device_share, engine_dtype
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.rounds import device_buffer_bytes
from mindgrpo.weight_sync.stream import adapters_of, bucket_size, in_model_order, spread
from mindgrpo.weights.checksum import sum_bytes
from mindgrpo.weights.expert_files import file_tensors, names_of_experts
from mindgrpo.weights.model_files import BLOCK_BYTES, MAX_SHARD_BYTES, plan_shards


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
    """Returns the need of every phase that the run has."""
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
        return plan.syncs_reference
    return phase != REFERENCE or plan.reference is not None


def _buffers(plan: RunPlan) -> dict[str, int]:
    """Returns the bytes of buffers by phase, for devices with memory of their own.

    Those that the communication library itself keeps are not known.
    """
    bucket = plan.config.generate_config.bucket_bytes
    # Checksums are taken when the buckets are free again.
    reshard = max(device_buffer_bytes(plan.reshard, bucket), _checksum_bytes(plan))
    sizes = {"reshard": reshard, "update": _sum_bytes(plan)}
    if plan.critic is not None:
        sizes["update_critic"] = _sum_bytes(plan.critic)
    if plan.reference is not None and plan.syncs_reference:
        to_reference = plan_reshard(plan.train, plan.reference.layout, plan.reshard.itemsize)
        sizes["sync_reference"] = device_buffer_bytes(to_reference, bucket)
    return sizes


def group_bytes(plan: RunPlan) -> int:
    """Returns the bytes that communication keeps on a device for its groups, outside of the memory of the run."""
    groups = {tuple(range(plan.world_size))}
    for mesh in (plan.train.mesh, plan.infer.mesh, *plan.beside.values()):
        axes = ("tp",), ("cp",), DENSE_DATA, ("pp",)
        groups |= {mesh.group(0, own) for own in axes}
    return plan.config.context.target.group_bytes * sum(len(ranks) > 1 for ranks in groups)


def _checksum_bytes(plan: RunPlan) -> int:
    """Returns the bytes of copies in 32 bits that sums of weights are made of."""
    if plan.config.rl_config.checksum_interval is None:
        return 0
    layouts = plan.train, plan.infer
    return sum_bytes(max(max(layout.stored_sizes.values()) for layout in layouts))


def _sum_bytes(plan: RunPlan) -> int:
    """Returns the bytes for summing gradients over data-parallel ranks: a bucket, a rank's share, and the sum."""
    num_ranks = plan.train.num_replicas
    if num_ranks == 1:
        return 0
    bucket = max(BUCKET_BYTES, max(plan.trained.stored_sizes.values()) * FLOAT_BYTES)
    return 2 * bucket + bucket // num_ranks


# Of a token in a checkpoint's manifest: its id, log-prob and turn.
TOKEN_BYTES = 16
# Policy and the optimizer's two moments, in float32.
COPIES_IN_A_CHECKPOINT = 3


def unfinished_bytes(plan: RunPlan) -> int:
    """Returns the most bytes of unfinished completions that a step leaves to the next, with the experts of tokens."""
    rl, generate, moe = plan.config.rl_config, plan.config.generate_config, plan.model.moe
    if not rl.partial_rollout:
        return 0
    samples = plan.batch.prompts_under_way * rl.num_generations
    longest = generate.sampling_config.max_tokens
    size = samples * longest * TOKEN_BYTES
    if rl.router_replay and moe is not None:
        layers = sum(layer.has_experts for layer in plan.model.layers)
        item = 1 if moe.num_experts <= 256 else 2
        tokens = samples * (generate.max_prompt_length + longest)
        size += tokens * layers * moe.per_token * item
    return size


@dataclass(frozen=True)
class RankTraffic:
    """Bytes of one rank: copied between device and host in a step, and the most that it has on the host."""

    step_bytes: int
    host_bytes: int


class HostPlan:
    """What a run needs on the host, and what it copies."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan

    @cached_property
    def step_bytes(self) -> int:
        """Returns the bytes copied in a step over all ranks, without evaluations, checkpoints and the first step."""
        return sum(number * traffic.step_bytes for traffic, number in self._traffic.items())

    @property
    def swapped_bytes(self) -> int:
        """Returns the bytes of roles that leave the device within a step, on the rank with most."""
        return max(traffic.host_bytes for traffic in self._traffic)

    @cached_property
    def _traffic(self) -> Mapping[RankTraffic, int]:
        """Counts the ranks by their traffic."""
        plan = self._plan
        if plan.config.context.target == SHARED_MEMORY:
            return {RankTraffic(0, 0): plan.world_size}
        stages = Counter(self._stages(rank) for rank in range(plan.world_size))
        traffic: Counter[RankTraffic] = Counter()
        for (train, others), number in stages.items():
            traffic[self._rank_traffic(train, dict(others))] += number
        if plan.config.generate_config.uses_vllm:
            # Each replica's first rank hands the whole model over.
            whole = num_parameters(plan.model) * ITEM_BYTES[compute_dtype(plan.config)]
            traffic[RankTraffic(whole, 0)] += plan.infer.mesh.dp
        return traffic

    def _stages(self, rank: int) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Returns the rank's stage of the trainer, and of each model beside it that it has a part of."""
        meshes = self._plan.beside
        others = {name: own.index(rank, "pp") for name, own in meshes.items() if own.holds(rank)}
        return self._plan.train.mesh.index(rank, "pp"), tuple(others.items())

    def _rank_traffic(self, train: int, others: Mapping[str, int]) -> RankTraffic:
        residency = self._resident(train, others)
        before, most = residency.ledger.transfer_bytes, 0
        for phase in self._phases():
            residency.activate(phase)
            most = max(most, residency.host_bytes)
        copied = residency.ledger.transfer_bytes - before
        return RankTraffic(copied + self._optimizer_bytes(train), most)

    def _resident(self, train: int = LARGEST, others: Mapping[str, int] | None = None) -> Residency:
        """Goes through a step's phases once, from what is there when a run starts."""
        plan = self._plan
        reserved = {need.phase: need.beside_pools for need in self._needs}
        # Whether it fits is the verdict's matter; copies are counted for a device that is just large enough.
        budget = plan.config.context.max_device_bytes
        if budget is not None:
            budget = max(budget, *(row.total for row in plan.memory()))
        residency = Residency(budget, keeps=True, reserved=reserved)
        sizes = plan.bytes_by_role(train, others)
        residency.add({role: [CountedPool(size)] for role, size in sizes.items()})
        for phase in self._phases():
            residency.activate(phase)
        return residency

    @cached_property
    def _needs(self) -> list[PhaseNeed]:
        return phase_needs(self._plan)

    def device_lines(self) -> list[str]:
        """Formats what is on a device beside a phase's own: roles that stay, and what communication keeps."""
        plan = self._plan
        if plan.config.context.target == SHARED_MEMORY:
            return []
        residency = self._resident()
        for phase in self._phases():
            residency.activate(phase)
        peaks = residency.planned_peaks()
        phase = max(peaks, key=lambda name: peaks[name])
        lines = [
            f"with roles that stay between phases, at most {format_bytes(peaks[phase])} in phase {phase}"
        ]
        outside = group_bytes(plan)
        if outside:
            lines.append(
                f"outside of context.max_device_memory: {format_bytes(outside)} of communication's buffers, and the "
                "runtime's own"
            )
        return lines

    def _phases(self) -> list[str]:
        plan = self._plan
        images = ["images"] if plan.model.vision is not None else []
        phases = [*images, "reshard", "rollout", *(role.name for role in plan.forward_roles)]
        if plan.computes_old_logps:
            phases.append("old_logps")
        if plan.critic is not None:
            phases += ["values", "update_critic"]
        phases.append("update")
        if plan.syncs_reference and plan.config.ref_config.ref_model_sync_steps == 1:
            phases.append("sync_reference")
        return phases

    def _optimizer_bytes(self, stage: int) -> int:
        """Returns the bytes of weights and gradients that go to moments on the host and back in every update."""
        if not self._plan.config.actor_config.optimizer.opt_offload:
            return 0
        travelling = self._plan.optimizer_bytes(stage) + self._plan.trained_bytes(stage)
        return 2 * travelling * self._plan.batch.updates_per_step

    def lines(self) -> list[str]:
        """Formats the host's memory by rank, and a step's copies."""
        plan = self._plan
        config, on_host = plan.config, plan.config.context.target.keeps_weights_on_host
        updated = plan.optimizer_bytes(LARGEST)
        sizes = {"roles that leave the device": self.swapped_bytes}
        if config.actor_config.optimizer.opt_offload:
            sizes["moments (opt_offload)"] = 2 * updated
            if not on_host:
                travelling = updated + plan.trained_bytes(LARGEST)
                sizes["weights and gradients while the optimizer runs"] = travelling
        if config.generate_config.uses_vllm:
            sizes["bucket that vLLM reads weights from"] = self._bucket_bytes()
            if not on_host:
                sizes["vLLM's weights while it sleeps"] = generator_bytes(config, plan.infer)
        if config.rl_config.save_ckpt_interval:
            share = COPIES_IN_A_CHECKPOINT * FLOAT_BYTES * num_parameters(plan.model)
            sizes["a checkpoint until it is written"] = share // plan.world_size
        if (vision := plan.model.vision) is not None:
            sizes["features of a step's images, at most one a prompt"] = feature_bytes(plan, vision)
        sizes["unfinished completions (partial_rollout), at most"] = unfinished_bytes(plan)
        lines = [f"{format_bytes(size):>10} a rank: {what}" for what, size in sizes.items() if size]
        export = format_bytes(self.export_bytes)
        lines.append(
            f"{export:>10} a rank that writes files: the part of the model in memory when it is written"
        )
        if config.context.target == SHARED_MEMORY:
            return [*lines, "nothing is copied between device and host: they are one memory"]
        return [
            *lines,
            f"{format_bytes(self.step_bytes):>10} a step between device and host, over all ranks",
        ]

    @property
    def export_bytes(self) -> int:
        """Returns what a rank that writes files holds: a group of tensors as they are kept, and a block of one."""
        plan, lora = self._plan, self._plan.lora
        dtype: Dtype = plan.export_dtype if lora is None else compute_dtype(plan.config)
        names = names_of_experts((), plan.model.model_type)
        tensors = {t.name: t for t in file_tensors(in_model_order(plan.train), names)}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        shards = plan_shards(shapes, MAX_SHARD_BYTES, plan.export_dtype)
        files = [[tensors[name] for name in own] for own in shards]
        ranks = min(len(shards), plan.world_size)
        shared = spread(plan.train, files, ranks, plan.world_size, dtype)
        groups = chain.from_iterable(shared.rows)
        largest = max(sum(math.prod(rows.shape) for rows in group) for group in groups)
        copied = [
            FLOAT_BYTES * math.prod(tensor.shape)
            for tensor in tensors.values()
            for name, _ in tensor.boxes
            if dtype != plan.export_dtype or plan.train.by_name[name].transposed
        ]
        # Blocks are sized in float32.
        block = min(BLOCK_BYTES, max(copied)) * ITEM_BYTES[plan.export_dtype] // FLOAT_BYTES
        export = largest * ITEM_BYTES[dtype] + block
        if lora is not None:
            low_rank = adapters_of(shared.groups, plan.trained)
            writers = map(int, shared.groups[0].mesh.ranks().flat)
            export += max(FLOAT_BYTES * bucket_size(low_rank, rank, "float32") for rank in writers)
            # By themselves they are written as one.
            export = max(export, FLOAT_BYTES * sum(math.prod(s.shape) for s in plan.trained.specs))
        return export

    def _bucket_bytes(self) -> int:
        """Returns the bytes of the largest group of tensors in vLLM's dtype, and in the run's where that differs."""
        config = self._plan.config
        dtypes = {engine_dtype(config), compute_dtype(config)}
        return _largest_group(self._plan.train) * sum(ITEM_BYTES[dtype] for dtype in dtypes)


def _largest_group(layout: Layout) -> int:
    """Returns the most elements that have one position: of a layer, or of what is before or after the layers."""
    groups: Counter[object] = Counter()
    for spec in layout.specs:
        groups[spec.position] += math.prod(spec.shape)
    return max(groups.values())
