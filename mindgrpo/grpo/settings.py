"""Turns the configuration into the settings of the rooms below it: plain values, made without a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindgrpo.algorithm.loss_config import AdvantageConfig, LossConfig
from mindgrpo.algorithm.schedule import learning_rate
from mindgrpo.backend.connect import RuntimeSettings
from mindgrpo.backend.kernels.sampling_params import SamplingParams
from mindgrpo.config import Config
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.models.precision import compute_dtype, flash_attention, matmul_precision


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
        max_device_bytes=config.context.max_device_bytes,
        precision_mode=context.ascend_config.precision_mode,
        matmul_precision=matmul_precision(config),
        compute_dtype=compute_dtype(config),
        flash_attention=flash_attention(config),
    )


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
