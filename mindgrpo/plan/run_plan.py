"""Everything a configuration and a model's shapes decide before anything is loaded: layouts, batches, memory, traffic.

Pure: no device, no weights; `python -m mindgrpo plan` prints it and the trainer builds from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype, num_head_parts
from mindgrpo.backend.kernels.rollout import LocalModelShape
from mindgrpo.backend.kernels.shapes import Vocabulary
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.config import Config
from mindgrpo.config.arithmetic import BatchPlan, laid_out, validate_world
from mindgrpo.errors import UserError, counted
from mindgrpo.memory.residency import MIB, PhaseMemory, by_phase
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.lora import LoraSettings, adapter_specs, targets_of
from mindgrpo.models.precision import (
    compute_dtype,
    dtype_notices,
    loss_scale,
    matmul_precision,
    num_product_parts,
    plain_kernels,
)
from mindgrpo.models.shard import (
    cached_heads,
    local_experts,
    local_inner,
    local_latents,
    local_vocabulary,
    product_leaves,
    vocabulary_leaves,
)
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.invariance import invariance_lines, is_batch_invariant
from mindgrpo.plan.role_layouts import (
    check_mode,
    check_positions,
    check_routing,
    fits,
    generating_layout,
    layout_of,
)
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes, missing_options, notices
from mindgrpo.rollout.vllm.settings import engine_bytes, engine_dtype
from mindgrpo.weight_sync.plan import Plan, plan_reshard

FLOAT_BYTES = ITEM_BYTES["float32"]
# In place of a stage: the rank that needs most.
LARGEST = -1


@dataclass(frozen=True)
class RunPlan:
    """Layouts of the roles (`reference` None where nothing needs one) and the arithmetic of a step.

    `device_bytes` is the memory that a device reports; None where none was asked. `teacher` has the shapes of a
    reference of another model than the policy's. Supervised training has no generator.
    """

    config: Config
    model: DecoderConfig
    train: Layout
    infer: Layout
    reference: Layout | None
    batch: BatchPlan
    device_bytes: int | None = None
    teacher: DecoderConfig | None = None
    generates: bool = True

    @property
    def of_reference(self) -> RunPlan:
        """Returns the plan with the reference's model, for what the reference computes."""
        return self if self.teacher is None else replace(self, model=self.teacher)

    @property
    def world_size(self) -> int:
        return self.train.mesh.size

    @property
    def lora(self) -> LoraSettings | None:
        lora = self.config.actor_config.lora
        if lora.rank is None:
            return None
        targets = tuple(lora.target_modules or targets_of(self.train.specs))
        return LoraSettings(lora.rank, float(lora.alpha or lora.rank), targets)

    @cached_property
    def reshard(self) -> Plan:
        """Plans the transfer of the policy's weights to the generator, or to the ranks that hand them to vLLM."""
        target = self.infer
        if self.config.generate_config.uses_vllm:
            target = target.whole_on(target.mesh.first_ranks)
        return plan_reshard(self.train, target, self._itemsize)

    def take_reshard(self, other: RunPlan) -> None:
        """Takes over what `other` has planned between the same layouts: it takes longer than all else of a plan."""
        if "reshard" not in vars(other):
            return
        ours, theirs = (
            (plan.train, plan.infer, plan._itemsize, plan.config.generate_config.uses_vllm)
            for plan in (self, other)
        )
        if ours == theirs:
            vars(self)["reshard"] = other.reshard

    @property
    def export_dtype(self) -> Dtype:
        """Returns the dtype of the model's files."""
        asked = self.config.actor_config.save_dtype
        return compute_dtype(self.config) if asked == "auto" else asked

    @property
    def _itemsize(self) -> int:
        """Returns the bytes of an element of the compute dtype."""
        return ITEM_BYTES[compute_dtype(self.config)]

    def num_steps(self, num_prompts: int) -> int:
        """Counts the steps of a run over `num_prompts` prompts, where an epoch's last step may reach into the next.

        `max_steps` takes precedence over `epochs`, as in TRL and verl: the data set is repeated as often as needed.
        """
        rl = self.config.rl_config
        return rl.max_steps or -(-num_prompts // self.batch.prompts_per_step) * rl.epochs

    def steps_text(self, num_prompts: int) -> str:
        num_steps = self.num_steps(num_prompts)
        epochs = num_steps * self.batch.prompts_per_step / num_prompts
        rows = counted(num_prompts, "prompt" if self.generates else "row")
        return f"{counted(num_steps, 'step')} ({epochs:.3g} epochs of {rows})"

    @property
    def notices(self) -> list[str]:
        """Returns sentences for the user on how this model runs on this device."""
        generate, dtypes = self.config.generate_config, dtype_notices(self.config)
        idle = self.infer.mesh.dp - self.batch.prompts_per_step
        if idle > 0:
            dtypes.append(
                f"the generator has {self.infer.mesh.dp} replicas and a step "
                f"{counted(self.batch.prompts_per_step, 'prompt')}: "
                f"{idle} of them generate nothing; raise rl_config.prompts_per_step"
            )
        if generate.uses_vllm:
            return dtypes
        own = notices(self.model) if keeps_slots(self.config.context.target) else []
        unused = [
            f"generate_config.{key} has no effect: it is vLLM's, and the embedded generator is used"
            for key in ("block_size", "gpu_memory_utilization", "max_num_batched_tokens")
            if getattr(generate, key) is not None
        ]
        if generate.use_vllm == 2:
            unused.append(
                "generate_config.use_vllm is 2, a mode of MindRLHF for debugging: the embedded generator is used"
            )
        return [*own, *dtypes, *unused]

    def memory(self) -> list[PhaseMemory]:
        """Returns the pools by phase of the rank that needs most: weights, gradients, moments, cache and copies."""
        reference = None if self.reference is None else LARGEST
        return by_phase(self.bytes_by_role(LARGEST, reference))

    def bytes_by_role(self, stage: int, reference_stage: int | None) -> Mapping[str, int]:
        """Returns the bytes of a rank in these stages of the trainer and of the reference (None: in none of its)."""
        ref, adapters = self.config.ref_config, self._adapter_bytes

        def weights(layout: Layout, stage: int) -> int:
            return self._itemsize * share_of(layout, stage)

        trained = self.trained_bytes(stage)
        by_role = {
            "policy": weights(self.train, stage) + adapters(self.train, stage),
            "gradients": trained,
            "optimizer": 2 * self.optimizer_bytes(stage),
        }
        if self.generates:
            by_role |= {**self._engine_bytes, "adapters_copy": adapters(self.infer, 0)}
        if self.has_masters:
            by_role["master_weights"] = self.optimizer_bytes(stage)
        if self.config.actor_config.optimizer.opt_offload:
            del by_role["optimizer"]
        if self.reference is not None and reference_stage is not None:
            by_role["reference"] = weights(self.reference, reference_stage)
            if ref.sync_ref_model:
                # The policy in the reference's layout while the two are mixed, and its adapters there.
                mixed = by_role["reference"] if ref.ref_model_mixup_alpha < 1.0 else 0
                by_role["reference_copy"] = mixed + adapters(self.reference, reference_stage)
        return {role: size for role, size in by_role.items() if size}

    def _adapter_bytes(self, layout: Layout, stage: int) -> int:
        specs = adapter_specs(self.train.specs, self.lora) if self.lora is not None else ()
        return FLOAT_BYTES * share_of(replace(layout, specs=specs), stage)

    @cached_property
    def trained(self) -> Layout:
        """Returns the layout of what has gradients: the adapters where there are some, else the whole model."""
        if self.lora is None:
            return self.train
        return replace(self.train, specs=adapter_specs(self.train.specs, self.lora))

    @property
    def shards_optimizer(self) -> bool:
        asked = self.config.actor_config.enable_parallel_optimizer
        return asked and self.trained.has_replicas

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates float32 weights of its own (Policy.has_masters)."""
        on_device = self.config.context.target != SHARED_MEMORY
        return self._rounds_masters or (self.shards_optimizer and on_device)

    @property
    def _rounds_masters(self) -> bool:
        return self.lora is None and self._itemsize != FLOAT_BYTES

    def trained_bytes(self, stage: int) -> int:
        """Returns the float32 bytes of what the optimizer updates on all ranks of the stage that have the same."""
        return FLOAT_BYTES * share_of(self.trained, stage)

    def optimizer_bytes(self, stage: int) -> int:
        """Returns the float32 bytes of what the optimizer updates on a rank of the stage."""
        if not self.shards_optimizer:
            return self.trained_bytes(stage)
        return FLOAT_BYTES * share_of(self._updated, stage)

    @cached_property
    def _updated(self) -> Layout:
        """Returns the layout of what each rank's optimizer updates, where that is a share."""
        return self.trained.split_over_data()

    @property
    def cache_config(self) -> KVCacheConfig:
        """Sizes the KV cache of each replica of the generator."""
        generate, group = self.config.generate_config, self.config.rl_config.num_generations
        batch, is_partial = self.batch, self.config.rl_config.partial_rollout
        at_once = batch.prompts_under_way if is_partial else batch.prompts_per_step
        prompts = -(-at_once // self.infer.mesh.dp)
        slots = min(prompts * group, generate.max_num_seqs or prompts * group)
        longest = generate.sampling_config.max_tokens
        # Partial rollouts recompute the partial completions: slots that are as long as a chunk are worth more.
        continues = self.config.rl_config.has_conversations and not is_partial
        context = self.config.longest_context
        return KVCacheConfig(slots, group, prompts, context, longest, continues)

    @property
    def device_memory(self) -> int | None:
        """Returns the bytes of a device, as far as they are known."""
        return self.device_bytes or self.config.context.max_device_bytes

    @property
    def _engine_bytes(self) -> Mapping[str, int]:
        weights = generator_bytes(self.config, self.infer)
        if not self.config.generate_config.uses_vllm:
            packed = weights + self._packed_bytes()
            return {"generator": packed, "kv_cache": self._embedded_cache_bytes()}
        shapes = self.model, self.infer.mesh, self.cache_config
        return engine_bytes(self.config, *shapes, weights, self.device_memory)

    @property
    def _generator_shape(self) -> LocalModelShape:
        """Returns a generating rank's share of the model."""
        model, tp_size = self.model, self.infer.mesh.mp
        width = local_vocabulary(model, tp_size)
        in_tree = self.batch_invariant
        leaves = vocabulary_leaves(model, tp_size) if in_tree else 1
        return LocalModelShape(
            layers=model.num_hidden_layers,
            hidden=model.hidden_size,
            inner=local_inner(model, tp_size),
            heads=cached_heads(model, tp_size),
            vocabulary=Vocabulary(0, width, width, leaves=leaves),
            norm_eps=model.rms_norm_eps,
            tp_size=tp_size,
            tp_rank=0,
            leaves=product_leaves(model, tp_size) if in_tree else 1,
            experts=local_experts(model, self.infer.mesh.ep, 0),
            latents=local_latents(model),
        )

    @cached_property
    def batch_invariant(self) -> bool:
        """Whether generator and trainer compute a token's numbers bit for bit."""
        return is_batch_invariant(self.config, self.model)

    @property
    def computes_old_logps(self) -> bool:
        """Whether a pass of its own computes the policy's log-probs before a step's first update."""
        rl = self.config.rl_config
        are_kept = rl.enable_oldpolicy and self.batch.updates_per_step > 1
        are_kept = rl.old_source == "trainer" and (are_kept or bool(rl.needing_trainers))
        return are_kept and (rl.partial_rollout or not self.batch_invariant)

    @property
    def keeps_slots(self) -> bool:
        return keeps_slots(self.config.context.target) and not missing_options(self.model)

    def _embedded_cache_bytes(self) -> int:
        """Returns the bytes of keys, values and the kernels' work space."""
        shape = self._generator_shape
        dtype = compute_dtype(self.config)
        if not self.keeps_slots:
            # As rollout/embedded/plain.py has it.
            plain: Dtype = "float32" if self.config.context.target == SHARED_MEMORY else dtype
            heads = cached_heads(self.model, self.infer.mesh.mp)
            return KVCacheSizes.plain(self.cache_config, shape.layers, heads).num_bytes(plain)
        penalty = self.config.generate_config.sampling_config.repetition_penalty
        return KVCacheSizes.of(self.cache_config, shape, penalty != 1.0).num_bytes(dtype)

    def _packed_bytes(self) -> int:
        """Returns the bytes of matrices that the embedded generator packs for bfloat16 products, beside its weights."""
        if self.config.generate_config.uses_vllm or not self.keeps_slots:
            return 0
        num_parts = num_product_parts(self.config)
        of_head = num_head_parts(num_parts, self.config.context.fp32_lm_head)
        return sum(self._generator_shape.packed_sizes(num_parts, of_head))

    def layout_lines(self) -> list[str]:
        uses_vllm = self.config.generate_config.uses_vllm
        by_vllm = f", vLLM in {engine_dtype(self.config)}" if uses_vllm else ""
        stages = "+".join(str(sum(map(len, own))) for own in self.train.stage_layers)
        reference = "none (beta and distillation_coef are 0)"
        if self.reference is not None:
            reference = f"{self.reference.mesh}{_options(self.reference)}"
        return [
            f"train {self.train.mesh}, stages of {stages} layers{_options(self.train)}",
            *self._sharding_lines(),
        ] + self.generates * [
            f"generate {self.infer.mesh}{by_vllm}",
            f"reference {reference}",
            *invariance_lines(self.config, self.model),
        ]

    def _sharding_lines(self) -> list[str]:
        if not self.shards_optimizer:
            is_asked = self.config.actor_config.enable_parallel_optimizer
            why = (
                "the optimizer's state is whole on every rank: enable_parallel_optimizer needs data_parallel or "
                "context_parallel above 1"
            )
            return [why] if is_asked else []
        after = (2 + self.has_masters) * self.optimizer_bytes(LARGEST)
        before = (2 + self._rounds_masters) * self.trained_bytes(LARGEST)
        return [
            f"the optimizer's state shared out over {self.train.num_replicas} replicas: {format_bytes(after)} a rank "
            f"instead of {format_bytes(before)}"
        ]

    def most_memory(self) -> str:
        most = max(self.memory(), key=lambda phase: phase.total)
        return f"at most {most.total / MIB:.1f} MiB a rank, in phase {most.phase}; --verbose shows every phase"

    def memory_lines(self) -> list[str]:
        lines = [str(row) for row in self.memory() if row.total]
        if self.config.actor_config.optimizer.opt_offload:
            moments = 2 * self.optimizer_bytes(LARGEST) / MIB
            lines.append(f"optimizer      {moments:>10.1f} MiB a rank, on the host (opt_offload)")
        return lines

    def reshard_lines(self) -> list[str]:
        plan = self.reshard
        most = max((plan.received_bytes(rank) for rank in range(plan.num_ranks)), default=0)
        return [
            f"{plan.bytes_moved / 2**20:.1f} MiB between ranks an update (lower bound "
            f"{plan.lower_bound / 2**20:.1f}), at most {most / 2**20:.1f} MiB into one rank"
        ]


def _options(layout: Layout) -> str:
    words = f", {layout.mesh.cp} ranks a row" if layout.mesh.cp > 1 else ""
    words += ", sequence parallel" if layout.splits_tokens else ""
    if layout.num_chunks > 1:
        idle = f"{layout.mesh.pp - 1}/({layout.num_chunks} m)"
        words += f", in {layout.num_chunks} chunks a stage, which idles {idle} of the time of m micro-batches"
    return words


def share_of(layout: Layout, stage: int) -> int:
    """Counts the elements of a rank of the stage with the padding of short shares; LARGEST: of the largest rank."""
    sizes = layout.stage_sizes
    return max(sizes) if stage == LARGEST else sizes[stage]


def generator_bytes(config: Config, layout: Layout) -> int:
    """Returns the bytes of the weights of the rank of `layout`, or the worker of vLLM, that holds most."""
    generate = config.generate_config
    dtype = engine_dtype(config) if generate.uses_vllm else compute_dtype(config)
    return share_of(layout, LARGEST) * ITEM_BYTES[dtype]


def plan_run(
    config: Config,
    model: DecoderConfig,
    world_size: int | None,
    teacher: DecoderConfig | None = None,
) -> RunPlan:
    """Plans a run, with `teacher` where the reference is of another model than `model`.

    Raises UserError for layouts that the world or a model does not allow.
    """
    config = laid_out(config, world_size)
    if world_size is not None:
        validate_world(config, world_size, lambda degrees: fits(Mesh(*degrees), model))
    actor, generate = config.actor_config, config.generate_config
    train = layout_of(actor.parallel_config, model, actor.offset)
    infer = generating_layout(config, model)
    reference = None
    if config.has_reference:
        role = "ref_config" if config.ref_config.parallel_config else "actor_config"
        where = f"{role}.parallel_config"
        reference = layout_of(
            config.reference_parallel, teacher or model, config.ref_config.offset, where
        )
    for own in filter(None, (model, teacher)):
        check_positions(config, own)
    # These refuse what the run cannot have.
    check_routing(config, model)
    check_mode(config, model)
    loss_scale(config)
    matmul_precision(config)
    plain_kernels(config)
    is_batch_invariant(config, model)
    group = config.rl_config.num_generations
    if generate.max_num_seqs is not None and generate.max_num_seqs < group:
        raise UserError(
            f"generate_config.max_num_seqs {generate.max_num_seqs} is less than rl_config.num_generations {group}, "
            "but a prompt's group runs together; raise it or leave it out."
        )
    batch = BatchPlan.of(config)
    plan = RunPlan(config, model, train, infer, reference, batch, teacher=teacher)
    if plan.lora is not None:
        adapter_specs(train.specs, plan.lora)
    return plan
