"""Everything a configuration and a model's shapes decide before anything is loaded: layouts, batches, memory, traffic.

Pure: no device, no weights; `python -m mindgrpo plan` prints it and the trainer builds from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.contract import Pool
from mindgrpo.backend.dtypes import ITEM_BYTES, Dtype
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import Config
from mindgrpo.config.arithmetic import BatchPlan, laid_out, validate_world
from mindgrpo.errors import UserError, counted
from mindgrpo.memory.residency import MIB, VISION, CountedPool, PhaseMemory, by_phase
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.lora import LoraSettings, adapter_specs, targets_of
from mindgrpo.models.precision import (
    compute_dtype,
    dtype_notices,
    loss_scale,
    matmul_precision,
    plain_kernels,
)
from mindgrpo.models.vision_config import vision_layout
from mindgrpo.monitor.host_memory import format_bytes
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.count import CountingBackend
from mindgrpo.plan.invariance import invariance_lines, is_batch_invariant
from mindgrpo.plan.model_roles import (
    NO_OTHERS,
    ModelRole,
    OtherModels,
    as_trained,
    critic_layout,
    reference_role,
    reward_model_roles,
)
from mindgrpo.plan.role_layouts import (
    check_mode,
    check_positions,
    check_routing,
    fits,
    generating_layout,
    layout_of,
)
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, notices
from mindgrpo.rollout.vllm.settings import engine_bytes, engine_dtype
from mindgrpo.training.policy import TrainedWeights
from mindgrpo.weight_sync.plan import Plan, plan_reshard
from mindgrpo.weight_sync.transfer import adapters_copy
from mindgrpo.weights.local_weights import Weights

FLOAT_BYTES = ITEM_BYTES["float32"]
# In place of a stage: the rank that needs most.
LARGEST = -1
Pools = Mapping[str, Sequence[Pool]]


@dataclass(frozen=True)
class RunPlan:
    """Layouts of the roles (`reference` None where nothing needs one) and the arithmetic of a step.

    `device_bytes` is the memory that a device reports; None where none was asked. Supervised training has no generator.
    `critic` is the plan of what trains the critic, as a policy with the role "critic".
    """

    config: Config
    model: DecoderConfig
    train: Layout
    infer: Layout
    reference: ModelRole | None
    batch: BatchPlan
    device_bytes: int | None = None
    generates: bool = True
    reward_models: tuple[ModelRole, ...] = ()
    critic: RunPlan | None = None
    trained_role: str = "policy"

    @property
    def forward_roles(self) -> tuple[ModelRole, ...]:
        """Returns the models beside the policy, in the order of their phases."""
        own = () if self.reference is None else (self.reference,)
        return (*self.reward_models, *own)

    def of_role(self, role: ModelRole) -> RunPlan:
        """Returns the plan with the role's model, for what that computes."""
        return self if role.model is self.model else replace(self, model=role.model)

    @property
    def other_models(self) -> OtherModels:
        reference = self.reference
        own = reference is not None and reference.model is not self.model
        shapes = {role.key: role.model for role in self.reward_models}
        critic = None if self.critic is None else self.critic.model
        return OtherModels(reference.model if reference and own else None, shapes, critic)

    @property
    def beside(self) -> dict[str, Mesh]:
        """Returns the meshes of all models beside the policy, by role."""
        meshes = {role.name: role.layout.mesh for role in self.forward_roles}
        return meshes if self.critic is None else {**meshes, "critic": self.critic.train.mesh}

    @property
    def world_size(self) -> int:
        return self.train.mesh.size

    @property
    def syncs_reference(self) -> bool:
        return self.reference is not None and self.config.ref_config.sync_ref_model

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
        drafts = [
            key for key in ("draft_rows", "draft_history") if key in generate.model_fields_set
        ]
        if generate.uses_vllm:
            return dtypes + [
                f"generate_config.{key} has no effect: it is the embedded generator's, and vLLM is used"
                for key in drafts
            ]
        if drafts and generate.draft_rows != 0 and generate.sampling_config.repetition_penalty != 1:
            dtypes.append(
                "generate_config.draft_rows has no effect: with a repetition_penalty there are no drafts"
            )
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
        return by_phase(self.bytes_by_role())

    def bytes_by_role(
        self, stage: int = LARGEST, others: Mapping[str, int] | None = None
    ) -> Mapping[str, int]:
        """Returns the bytes of a rank in `stage` of the trainer and in those of `others`, which are by role.

        LARGEST, and without `others`: of each role, those of the rank that needs most.
        """
        own: list[Pools] = [trained.pools for trained in self._on_stages(stage)]
        if self.model.vision is not None and self.trained_role == "policy":
            own.append(self._vision_pools)
        if self.generates:
            own.append(self._generator_pools)
        for beside in self.forward_roles:
            numbers: Sequence[int] = range(beside.layout.mesh.pp)
            if others is not None:
                numbers = [others[beside.name]] if beside.name in others else []
            own += [self._forward_pools(beside, number) for number in numbers]
        if self.critic is not None and (others is None or "critic" in others):
            of_critic = self.critic._on_stages(LARGEST if others is None else others["critic"])
            own += [trained.pools for trained in of_critic]
        sizes: dict[str, int] = {}
        for role, pools in chain.from_iterable(by_role.items() for by_role in own):
            sizes[role] = max(sizes.get(role, 0), sum(pool.num_bytes for pool in pools))
        # In the order in which a run registers them, in which they leave the device.
        ordered = sorted(sizes, key=lambda role: role.endswith("_copy"))
        return {role: sizes[role] for role in ordered if sizes[role]}

    def _on_rank(self, mesh: Mesh, stage: int = 0) -> CountingBackend:
        return CountingBackend(self.config, mesh, stage, self.batch_invariant)

    @cached_property
    def _trained_weights(self) -> Sequence[TrainedWeights]:
        """Constructs by stage what training keeps."""
        return self._trained_with(self.config.actor_config.enable_parallel_optimizer)

    def _trained_with(self, shards_optimizer: bool) -> Sequence[TrainedWeights]:
        layout, on_host = self.train, self.config.actor_config.optimizer.opt_offload
        ranks = [self._on_rank(layout.mesh, stage) for stage in range(layout.mesh.pp)]
        how = self.lora, shards_optimizer, on_host, self.trained_role
        return [TrainedWeights(layout, own, *how) for own in ranks]

    def _on_stages(self, stage: int) -> Sequence[TrainedWeights]:
        return self._trained_weights if stage == LARGEST else [self._trained_weights[stage]]

    @cached_property
    def _generator_pools(self) -> Pools:
        """Constructs what a rank generates with, and the copy of the policy's adapters there."""
        generate, backend = self.config.generate_config, self._on_rank(self.infer.mesh)
        model, cache, copy = self.model, self.cache_config, self._adapters_on(self.infer, backend)
        if generate.uses_vllm:
            weights, device = generator_bytes(self.config, self.infer), self.device_memory
            sizes = engine_bytes(self.config, model, self.infer.mesh, cache, weights, device)
            pools: Pools = {role: [CountedPool(size)] for role, size in sizes.items()}
            return {**pools, "adapters_copy": copy}
        own = generate.sampling_config
        penalty = own.repetition_penalty
        sampling = SamplingParams(max_tokens=own.max_tokens, repetition_penalty=penalty)
        engine = EmbeddedEngine(model, self.infer, backend, sampling, cache)
        return {**engine.pools, "adapters_copy": copy}

    @cached_property
    def _vision_pools(self) -> Pools:
        """Constructs the vision encoder, whole on every rank."""
        backend = self._on_rank(self.train.mesh)
        assert self.model.vision is not None
        layout = vision_layout(self.model.vision, self.world_size)
        return {VISION: [Weights(layout, 0, backend, VISION, dtype=backend.compute_dtype).pool]}

    def _adapters_on(self, target: Layout, backend: CountingBackend) -> list[Pool]:
        adapters = self._trained_weights[0].adapters
        return [adapters_copy(adapters, target, backend).pool] if adapters else []

    def _forward_pools(self, role: ModelRole, stage: int) -> Pools:
        """Constructs a model beside the policy, and copies of what the reference is synchronised with."""
        layout = role.layout
        backend, ref = self._on_rank(layout.mesh, stage), self.config.ref_config
        dtype = backend.compute_dtype
        weights: list[Pool] = [Weights(layout, backend.rank, backend, role.name, dtype=dtype).pool]
        if role is not self.reference or not self.syncs_reference:
            return {role.name: weights}
        # The policy in the reference's layout while the two are mixed, and its adapters there.
        mixed = weights if ref.ref_model_mixup_alpha < 1.0 else []
        return {role.name: weights, "reference_copy": [*mixed, *self._adapters_on(layout, backend)]}

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

    def trained_bytes(self, stage: int) -> int:
        """Returns the float32 bytes of what the optimizer updates on all ranks of the stage that have the same."""
        return max(trained.gradients.num_bytes for trained in self._on_stages(stage))

    def optimizer_bytes(self, stage: int) -> int:
        """Returns the float32 bytes of what the optimizer updates on a rank of the stage."""
        return max(trained.moments[0].num_bytes for trained in self._on_stages(stage))

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
        sizes = slots, group, prompts, context, longest, continues
        return KVCacheConfig(*sizes, generate.draft_rows, generate.draft_history << 20)

    @property
    def device_memory(self) -> int | None:
        """Returns the bytes of a device, as far as they are known."""
        return self.device_bytes or self.config.context.max_device_bytes

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

    def layout_lines(self) -> list[str]:
        uses_vllm = self.config.generate_config.uses_vllm
        by_vllm = f", vLLM in {engine_dtype(self.config)}" if uses_vllm else ""
        stages = "+".join(str(sum(map(len, own))) for own in self.train.stage_layers)
        reference = "none (beta and distillation_coef are 0)"
        if self.reference is not None:
            reference = _described(self.reference.layout)
        return [
            f"train {self.train.mesh}, stages of {stages} layers{_options(self.train)}",
            *self._sharding_lines(),
        ] + self.generates * [
            f"generate {self.infer.mesh}{by_vllm}",
            f"reference {reference}",
            *(f"{role.name} {_described(role.layout)}" for role in self.reward_models),
            *([] if self.critic is None else [f"critic {_described(self.critic.train)}"]),
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
        after, before = (
            max(own.optimizer_bytes for own in by_stage)
            for by_stage in (self._trained_weights, self._trained_with(shards_optimizer=False))
        )
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


def _described(layout: Layout) -> str:
    return f"{layout.mesh}{_options(layout)}"


def _options(layout: Layout) -> str:
    words = f", {layout.mesh.cp} ranks a row" if layout.mesh.cp > 1 else ""
    words += ", sequence parallel" if layout.splits_tokens else ""
    if layout.num_chunks > 1:
        idle = f"{layout.mesh.pp - 1}/({layout.num_chunks} m)"
        words += f", in {layout.num_chunks} chunks a stage, which idles {idle} of the time of m micro-batches"
    return words


def generator_bytes(config: Config, layout: Layout) -> int:
    """Returns the bytes of the weights of the rank of `layout`, or the worker of vLLM, that holds most."""
    generate = config.generate_config
    dtype = engine_dtype(config) if generate.uses_vllm else compute_dtype(config)
    return max(layout.stage_sizes) * ITEM_BYTES[dtype]


def plan_run(
    config: Config,
    model: DecoderConfig,
    world_size: int | None,
    others: OtherModels = NO_OTHERS,
) -> RunPlan:
    """Plans a run, with `others` where models beside the policy are of other shapes than `model`.

    Raises UserError for layouts that the world or a model does not allow.
    """
    config = laid_out(config, world_size)
    if world_size is not None:
        validate_world(config, world_size, lambda degrees: fits(Mesh(*degrees), model))
    actor, generate = config.actor_config, config.generate_config
    train = layout_of(actor.parallel_config, model, actor.offset)
    infer = generating_layout(config, model)
    reference = reference_role(config, others.teacher or model)
    reward_models = reward_model_roles(config, others.reward_models)
    for own in filter(None, (model, others.teacher, others.critic)):
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
    critic = None
    if config.has_critic:
        of_critic = others.critic or model.with_scalar_head()
        layout = critic_layout(config, of_critic)
        critic = RunPlan(
            as_trained(config), of_critic, layout, infer, None, batch, trained_role="critic"
        )
    plan = RunPlan(
        config, model, train, infer, reference, batch, reward_models=reward_models, critic=critic
    )
    if plan.lora is not None:
        adapter_specs(train.specs, plan.lora)
    return plan
