"""Turns the configuration into the settings of the rooms below it: plain values, made without a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindgrpo.algorithm.loss_config import AdvantageConfig, LossConfig
from mindgrpo.algorithm.schedule import learning_rate
from mindgrpo.backend import compute_dtype as compute_dtypes
from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.backend.matmul_precision import MatmulPrecision, resolve
from mindgrpo.backend.runtime import RuntimeSettings
from mindgrpo.config import Config, memory_bytes
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.errors import UserError
from mindgrpo.grpo.model_dtypes import FLASH, stated_dtypes


def runtime_settings(config: Config) -> RuntimeSettings:
    """What of `context` the device's backend sets up."""
    context = config.context
    return RuntimeSettings(
        compiled=context.mode == 0,
        deterministic=config.rl_config.deterministic == "ON",
        jit_level=context.jit_config.jit_level,
        max_call_depth=context.max_call_depth,
        save_graphs=context.save_graphs,
        save_graphs_path=context.save_graphs_path,
        memory_optimize_level=context.memory_optimize_level,
        max_device_bytes=device_budget(config),
        precision_mode=context.ascend_config.precision_mode,
        matmul_precision=matmul_precision(config),
        compute_dtype=compute_dtype(config),
        flash_attention=flash_attention(config),
    )


def matmul_precision(config: Config) -> MatmulPrecision:
    """Of this machine. Raises UserError."""
    context = config.context
    return resolve(context.float32_matmul_precision, context.target, _has_kernels(config))


def compute_dtype(config: Config) -> Dtype:
    """Of this machine. Raises UserError."""
    context, stated = config.context, stated_dtypes(config)
    asked: str = context.compute_dtype
    key = compute_dtypes.KEY
    if asked == "auto" and stated.compute_dtype is not None:
        asked, key = stated.compute_dtype, f"compute_dtype of model_config '{stated.path}'"
    precision, has_kernels = context.float32_matmul_precision, _has_kernels(config)
    compiled = context.mode == 0
    return compute_dtypes.resolve(asked, context.target, compiled, has_kernels, precision, key)


def flash_attention(config: Config) -> bool:
    """Whether a device uses its fused attention, where it has one. Raises UserError."""
    stated, dtype = stated_dtypes(config).flash_attention, compute_dtype(config)
    if stated and dtype == "float32" and config.context.target.has_fused_attention:
        raise UserError(
            f"{FLASH} of model_config is true, but the device's fused attention takes float16 and bfloat16 and "
            f"{compute_dtypes.KEY} is float32; set it to false or compute in one of them."
        )
    return dtype != "float32" and stated is not False


def dtype_notices(config: Config) -> list[str]:
    """What of the model YAMLs' words on dtypes has no effect."""
    stated, dtype = stated_dtypes(config), compute_dtype(config)
    notices = []
    if stated.compute_dtype not in (None, dtype):
        notices.append(
            f"{compute_dtypes.KEY} {dtype} is used, not compute_dtype {stated.compute_dtype} of model_config "
            f"'{stated.path}'"
        )
    if stated.flash_attention is not None and not config.context.target.has_fused_attention:
        notices.append(f"{FLASH} of model_config has no effect: processors have one attention")
    return notices


def loss_scale(config: Config) -> float:
    """1 where the compute dtype needs none. Raises UserError."""
    asked, dtype = config.context.loss_scale, compute_dtype(config)
    if dtype == "float16":
        return 1024.0 if asked is None else asked
    if asked is not None:
        raise UserError(
            f"context.loss_scale is {asked:g}, but only context.compute_dtype float16 needs one, and it is {dtype}; "
            "leave it out."
        )
    return 1.0


def num_product_parts(config: Config) -> int | None:
    """See compute_dtype.num_product_parts."""
    return compute_dtypes.num_product_parts(compute_dtype(config), matmul_precision(config))


def _has_kernels(config: Config) -> bool:
    return config.context.mode == 0 and keeps_slots(config.context.target)


def device_budget(config: Config) -> int | None:
    """Bytes of a rank's device that the run may use; None without a limit."""
    budget = config.context.max_device_memory
    return memory_bytes(budget) if budget else None


def sampling_settings(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    sampling = config.generate_config.sampling_config
    stops = sampling.eos_token_id
    stop_ids = (stops,) if isinstance(stops, int) else tuple(stops or tokenizer.stop_ids)
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        max_tokens=sampling.max_tokens,
        stop_ids=stop_ids,
    )


def loss_config(config: Config) -> LossConfig:
    rl = config.rl_config
    return LossConfig(
        loss_type=rl.loss_type,
        importance_sampling_level=rl.importance_sampling_level,
        epsilon_low=rl.epsilon_low,
        epsilon_high=rl.epsilon_high,
        delta=rl.delta,
        dual_clip=rl.dual_clip,
        beta=0.0 if rl.kl_in_reward else rl.beta,
        kl_estimator=rl.kl_estimator,
        entropy_coef=rl.entropy_coef,
        corrected=rl.importance_sampling_correction != "none",
        max_completion_length=config.generate_config.sampling_config.max_tokens,
    )


def advantage_config(config: Config) -> AdvantageConfig:
    rl = config.rl_config
    return AdvantageConfig(
        num_generations=rl.num_generations,
        advantage_estimator=rl.advantage_estimator,
        scale_rewards=rl.reward_scale,
        reward_beta=rl.beta if rl.kl_in_reward else 0.0,
        kl_estimator=rl.kl_estimator,
        correction=rl.importance_sampling_correction,
        correction_cap=rl.correction_cap,
        mask_truncated=rl.mask_truncated_completions,
        std_floor=rl.advantage_std_floor,
        by_turn=rl.turn_advantages,
    )


def learning_rate_schedule(config: Config, num_updates: int) -> Callable[[int], float]:
    """The rate of an update, counted from 0, in a run of `num_updates`."""
    schedule = config.actor_config.lr_schedule
    warmup = schedule.warmup_step
    if schedule.warmup_ratio is not None:
        warmup = round(schedule.warmup_ratio * num_updates)
    return partial(
        learning_rate,
        style=schedule.lr_decay_style,
        peak=schedule.lr,
        floor=schedule.min_lr,
        warmup=warmup,
        decay=schedule.decay_steps or num_updates,
    )
