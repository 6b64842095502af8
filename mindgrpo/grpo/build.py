"""Builds a run's components from its configuration: roles, policy, engine and modes of evaluation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.algorithm.non_finite import in_arrays
from mindgrpo.backend.connect import RuntimeSettings
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import AdamWSettings, SamplingParams
from mindgrpo.config import Config
from mindgrpo.data.image_prompts import RunImages, no_images
from mindgrpo.errors import UserError
from mindgrpo.grpo.evaluation import GREEDY, SAMPLED, Mode
from mindgrpo.grpo.image_encoder import ImageEncoder
from mindgrpo.grpo.reward_model import make_reward_models
from mindgrpo.grpo.roles import Reference, Roles, TrainedRoles
from mindgrpo.memory.residency import Residency
from mindgrpo.models.decoder import Recompute
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.lora import adapter_names, fill_adapters
from mindgrpo.models.pipeline import ForwardPipeline
from mindgrpo.models.precision import (
    compute_dtype,
    flash_attention,
    loss_scale,
    matmul_precision,
    plain_kernels,
)
from mindgrpo.models.shard import Shard
from mindgrpo.monitor.host_memory import host_memory
from mindgrpo.parallel.sharding import Layout
from mindgrpo.plan.invariance import is_batch_invariant
from mindgrpo.plan.memory import check_engine, phase_needs
from mindgrpo.plan.micro_shapes import update_shape
from mindgrpo.plan.run_plan import RunPlan, generator_bytes
from mindgrpo.rewards.classifier_texts import ClassifierTexts
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import RolloutEngine
from mindgrpo.rollout.vllm.engine import VllmEngine
from mindgrpo.rollout.vllm.settings import vllm_settings
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weight_sync.execute import Resharder
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import WeightCheck, load_once
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random, load_weights


def runtime_settings(config: Config) -> RuntimeSettings:
    """Translates the configuration's `context` section and weight-sync bucket into the backend's settings."""
    context, jit_level = config.context, config.context.jit_config.jit_level
    return RuntimeSettings(
        compiled=context.mode == 0,
        deterministic=config.rl_config.deterministic == "ON",
        jit_level=jit_level,
        max_call_depth=context.max_call_depth,
        save_graphs=context.save_graphs,
        save_graphs_path=context.save_graphs_path,
        memory_optimize_level=context.memory_optimize_level,
        max_device_bytes=context.max_device_bytes,
        precision_mode=context.ascend_config.precision_mode,
        kernel_launch_capture=context.ascend_config.kernel_launch_capture,
        matmul_precision=matmul_precision(config),
        compute_dtype=compute_dtype(config),
        fp32_lm_head=context.fp32_lm_head,
        sums_in_float32=context.reduce_dtype == "float32",
        flash_attention=flash_attention(config),
        plain_kernels=plain_kernels(config),
        bucket_bytes=config.generate_config.bucket_bytes,
    )


def make_roles(
    plan: RunPlan,
    backend: Backend,
    sampling: SamplingParams,
    random_weights: bool = False,
    restored: Collection[str] = (),
    texts: Mapping[str, ClassifierTexts] = MappingProxyType({}),
    images: RunImages | None = None,
) -> Roles:
    """Builds policy, engine, reference and reward models, and loads their weights. Collective. Raises UserError.

    `texts` are those of reward models by the key of their section, and `images` those of the data. Roles in `restored`
    ("policy", "reference", "critic") are not loaded, because a checkpoint will fill them.
    """
    plan, residency = _residency(plan, backend)
    encoder = make_encoder(plan, backend, images, random_weights)
    features = None if encoder is None else encoder.features
    policy = make_policy(plan, backend, sampling, features)
    engine = make_engine(
        plan.config, plan.model, plan.infer, backend, sampling, plan.cache_config, features
    )
    _fill_policy(policy, plan.config, backend, random_weights, restored)
    reference = _make_reference(plan, backend, sampling, features)
    if reference is not None and "reference" not in restored:
        base = None if "policy" in restored else policy.weights
        _fill_reference(reference.weights, plan, backend, base, random_weights)
    critic = None
    if plan.critic is not None:
        critic = make_policy(plan.critic, backend, sampling, features)
        _fill_policy(critic, plan.critic.config, backend, random_weights, restored)
    reward_models = make_reward_models(plan.config, plan.reward_models, texts, backend)
    for model, role in zip(reward_models, plan.reward_models, strict=True):
        fill_forward(model.weights, role.load, plan.config, random_weights)
    added = (
        {spec.name for spec in policy.adapters.weights.layout.specs} if policy.adapters else set()
    )
    names = (spec.name for spec in plan.train.specs)
    adapted = frozenset(name for name in names if adapter_names(name)[1] in added)
    check = WeightCheck(backend, plan.config.rl_config.checksum_interval, adapted)
    ref = plan.config.ref_config
    mixup = ref.ref_model_mixup_alpha if ref.sync_ref_model else None
    others = mixup, reward_models, critic, encoder
    return Roles(plan, backend, policy, engine, reference, check, residency, *others)


def make_trained_roles(
    plan: RunPlan,
    backend: Backend,
    sampling: SamplingParams,
    random_weights: bool = False,
    restored: Collection[str] = (),
    images: RunImages | None = None,
) -> TrainedRoles:
    """Builds the policy alone, for supervised training; otherwise like `make_roles`."""
    plan, residency = _residency(plan, backend)
    encoder = make_encoder(plan, backend, images, random_weights)
    policy = make_policy(plan, backend, sampling, None if encoder is None else encoder.features)
    _fill_policy(policy, plan.config, backend, random_weights, restored)
    roles = TrainedRoles(plan, backend, policy, residency, encoder)
    residency.check_budget()
    return roles


def make_encoder(
    plan: RunPlan, backend: Backend, images: RunImages | None, random_weights: bool
) -> ImageEncoder | None:
    """Builds and loads the vision encoder; None for a model that sees no images. `images` None: a run of text alone."""
    vision = plan.model.vision
    if vision is None:
        return None
    _set_invariant(backend, plan.batch_invariant)
    encoder = ImageEncoder(vision, images or no_images(vision.image_token), backend)
    fill_forward(encoder.weights, plan.config.actor_config.load, plan.config, random_weights)
    return encoder


def _residency(plan: RunPlan, backend: Backend) -> tuple[RunPlan, Residency]:
    """Returns the plan with the device's memory filled in, and the Residency that enforces it. Raises UserError."""
    if backend.device_memory_bytes is not None:
        plan = replace(plan, device_bytes=backend.device_memory_bytes)
    check_engine(plan)
    budget = plan.config.context.max_device_bytes or backend.device_memory_bytes
    reserved = {need.phase: need.beside_pools for need in phase_needs(plan)}
    return plan, Residency(budget, not backend.shares_memory, reserved, backend.take_device_peak)


def _fill_policy(
    policy: Policy,
    config: Config,
    backend: Backend,
    random_weights: bool,
    restored: Collection[str],
) -> None:
    if policy.role not in restored:
        whole = policy.weights if policy.adapters else policy.masters
        _fill(whole, config, backend, random_weights)
    if policy.adapters is not None:
        fill_adapters(policy.masters, config.rl_config.seed)
    if policy.adapters is not None or policy.role not in restored:
        policy.masters_changed()


def make_engine(
    config: Config,
    model: DecoderConfig,
    layout: Layout,
    backend: Backend,
    sampling: SamplingParams,
    cache_config: KVCacheConfig,
    images: ImageFeatures | None = None,
) -> RolloutEngine:
    """Builds the generator's engine, asleep and without weights."""
    _set_invariant(backend, is_batch_invariant(config, model))
    if config.generate_config.uses_vllm:
        on_host = config.context.target.keeps_weights_on_host
        memory_bytes = host_memory().total if on_host else None
        weight_bytes = generator_bytes(config, layout)
        device_bytes = backend.device_memory_bytes or config.context.max_device_bytes
        return VllmEngine(
            layout,
            backend,
            vllm_settings(
                config, model, layout.mesh, cache_config, weight_bytes, memory_bytes, device_bytes
            ),
            images,
        )
    return EmbeddedEngine(
        model,
        layout,
        backend,
        sampling,
        cache_config,
        records_routes=config.rl_config.router_replay,
        images=images,
    )


def make_policy(
    plan: RunPlan,
    backend: Backend,
    sampling: SamplingParams,
    images: ImageFeatures | None = None,
) -> Policy:
    """Builds the policy, or the critic whose plan this is, without loading weights."""
    _set_invariant(backend, plan.batch_invariant)
    rl, actor = plan.config.rl_config, plan.config.actor_config
    optimizer = actor.optimizer
    settings = UpdateSettings(
        shape=update_shape(plan.config, backend.kernels.ragged),
        num_positions=rl.seq_length,
        temperature=sampling.trainer_temperature,
        recompute=Recompute(actor.recompute_config.modules, actor.recompute_config.every),
        loss_config=rl,
        max_tokens=plan.config.generate_config.sampling_config.max_tokens,
        max_grad_norm=optimizer.max_grad_norm,
        adamw=AdamWSettings(
            optimizer.adam_beta1, optimizer.adam_beta2, optimizer.eps, optimizer.weight_decay
        ),
        moments_on_host=optimizer.opt_offload,
        loss_scale=loss_scale(plan.config),
        keeps_entropies=plan.config.monitor_config.per_token > 0,
        shards_optimizer=actor.enable_parallel_optimizer,
        bias_update_rate=rl.moe_router_bias_update_rate,
    )
    return Policy(
        plan.model.balanced(rl.router_aux_loss_coef),
        plan.train,
        backend,
        settings,
        plan.lora,
        plan.trained_role,
        images,
    )


def _set_invariant(backend: Backend, is_planned: bool) -> None:
    # The plan assumed a working compiler, which may have failed since.
    backend.kernels.batch_invariant = is_planned and backend.kernels.has_slots


def _make_reference(
    plan: RunPlan, backend: Backend, sampling: SamplingParams, images: ImageFeatures | None
) -> Reference | None:
    """Builds the reference model, without loading weights; None if the run needs none."""
    role = plan.reference
    if role is None:
        return None
    weights = Weights(role.layout, backend.rank, backend, role.name, dtype=backend.compute_dtype)
    pipeline = None
    if role.layout.mesh.holds(backend.rank):
        pipeline = ForwardPipeline(
            Shard(role.model, weights, backend),
            backend,
            role.name,
            role.widest(backend.kernels.ragged),
            role.longest,
            sampling.trainer_temperature,
            images=images,
        )
    return Reference(weights, pipeline)


def _fill(weights: Weights, config: Config, backend: Backend, random_weights: bool) -> None:
    """Loads the policy's initial weights, or draws them."""
    if random_weights:
        fill_random(weights, config.rl_config.seed)
        return
    directory = config.actor_config.load
    # A language model becomes a critic whose values are 0 at first.
    load_once(weights, directory, backend, may_lack_score=True)
    _check_finite(weights, directory)


def _fill_reference(
    weights: Weights, plan: RunPlan, backend: Backend, base: Weights | None, random_weights: bool
) -> None:
    """Loads the reference's weights; resharded from the policy's, `base`, if these come from the same files."""
    config = plan.config
    directory = config.reference_load
    if base is not None and (random_weights or directory == config.actor_config.load):
        weights.pool.load()
        between = plan_reshard(base.layout, weights.layout, weights.pool.itemsize)
        Resharder(between, base, weights, backend).run()
    else:
        fill_forward(weights, directory, config, random_weights)


def fill_forward(
    weights: Weights, directory: str, config: Config, random_weights: bool = False
) -> None:
    """Loads the weights of a model beside the policy, or draws them."""
    if random_weights:
        fill_random(weights, config.rl_config.seed)
    elif weights.boxes:
        load_weights(weights, directory)
        _check_finite(weights, directory)


def _check_finite(weights: Weights, directory: str) -> None:
    with weights.on_host() as host:
        bad = in_arrays(host.hf_views.items())
    if bad is not None:
        raise UserError(
            f"The model in '{directory}' holds a number that is not finite ({bad}), and everything computed "
            "with it would be; restore its safetensors files from their source."
        )


def evaluation_modes(config: Config, sampling: SamplingParams) -> list[Mode]:
    """Returns the configured evaluation modes, in their order; `sampling` holds the training run's parameters."""
    rl = config.rl_config
    own = replace(
        sampling,
        temperature=sampling.temperature if rl.eval_temperature is None else rl.eval_temperature,
        top_p=sampling.top_p if rl.eval_top_p is None else rl.eval_top_p,
    )
    known = {
        SAMPLED: Mode(SAMPLED, rl.eval_num_generations, own, rl.eval_pass_threshold),
        # A second greedy completion would equal the first.
        GREEDY: Mode(GREEDY, 1, replace(sampling, temperature=0.0), rl.eval_pass_threshold),
    }
    return [known[name] for name in rl.eval_modes]
