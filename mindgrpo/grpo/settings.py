"""Turns the configuration into settings of other packages: plain values, made without a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from mindgrpo.algorithm.schedule import learning_rate
from mindgrpo.backend.connect import RuntimeSettings
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.config import Config
from mindgrpo.data.tokenizer import Tokenizer
from mindgrpo.models.precision import (
    compute_dtype,
    flash_attention,
    matmul_precision,
    plain_kernels,
)
from mindgrpo.settings.section import Section

Settings = TypeVar("Settings", RuntimeSettings, SamplingParams)


def _settings(kind: type[Settings], section: Section, **others: Any) -> Settings:
    """Takes the fields of `kind` from the section, which names them alike; `others` are given.

    A field that is null there has the default of `kind`.
    """
    names = {field.name for field in fields(kind)} - others.keys()
    values = {name: getattr(section, name) for name in names}
    return kind(**{name: value for name, value in values.items() if value is not None}, **others)


def runtime_settings(config: Config) -> RuntimeSettings:
    """Returns what the device's backend sets up of `context`, and the bucket of weight sync."""
    context = config.context
    return _settings(
        RuntimeSettings,
        context,
        compiled=context.mode == 0,
        deterministic=config.rl_config.deterministic == "ON",
        jit_level=context.jit_config.jit_level,
        precision_mode=context.ascend_config.precision_mode,
        kernel_launch_capture=context.ascend_config.kernel_launch_capture,
        matmul_precision=matmul_precision(config),
        compute_dtype=compute_dtype(config),
        sums_in_float32=context.reduce_dtype == "float32",
        flash_attention=flash_attention(config),
        plain_kernels=plain_kernels(config),
        bucket_bytes=config.generate_config.bucket_bytes,
    )


def sampling_settings(config: Config, tokenizer: Tokenizer) -> SamplingParams:
    sampling = config.generate_config.sampling_config
    stops = sampling.eos_token_id
    stop_ids = (stops,) if isinstance(stops, int) else tuple(stops or tokenizer.stop_ids)
    top_k = max(0, sampling.top_k)
    return _settings(SamplingParams, sampling, top_k=top_k, stop_ids=stop_ids)


def learning_rate_schedule(config: Config, num_updates: int) -> Callable[[int], float]:
    """Returns a function from an update, counted from 0, to its learning rate in a run of `num_updates`."""
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
