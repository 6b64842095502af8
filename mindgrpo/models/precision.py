"""Resolves a run's dtypes on this machine: compute dtype, float32 matmul precision and attention.

Reads `context` and the models' MindFormers YAMLs.
"""

from __future__ import annotations

from mindgrpo.backend import dtypes
from mindgrpo.backend.connect import keeps_slots
from mindgrpo.backend.dtypes import (
    DTYPE_KEY,
    PRECISION_KEY,
    Dtype,
    MatmulPrecision,
    resolve_compute_dtype,
    resolve_matmul_precision,
)
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.config import Config
from mindgrpo.errors import UserError
from mindgrpo.models.mindformers_yaml import FLASH, stated_dtypes


def matmul_precision(config: Config) -> MatmulPrecision:
    """Resolves context.float32_matmul_precision for this machine. Raises UserError if it is not supported."""
    context = config.context
    precision = resolve_matmul_precision(
        context.float32_matmul_precision, context.target, _has_kernels(config)
    )
    if context.fp32_lm_head and precision != "highest" and context.target != SHARED_MEMORY:
        raise UserError(
            f"context.fp32_lm_head is true, but {PRECISION_KEY} {precision} is of all products on {context.target}; "
            f"set {PRECISION_KEY} to highest, or context.fp32_lm_head to false."
        )
    return precision


def compute_dtype(config: Config) -> Dtype:
    """Resolves context.compute_dtype, or that of the model YAMLs, for this machine. Raises UserError if unsupported."""
    context, stated = config.context, stated_dtypes(config)
    asked: str = context.compute_dtype
    key = DTYPE_KEY
    if asked == "auto" and stated.compute_dtype is not None:
        asked, key = stated.compute_dtype, f"compute_dtype of model_config '{stated.path}'"
    precision, has_kernels = context.float32_matmul_precision, _has_kernels(config)
    compiled = context.mode == 0
    return resolve_compute_dtype(asked, context.target, compiled, has_kernels, precision, key)


def flash_attention(config: Config) -> bool:
    """Returns whether the device's fused attention is used, if it has one. Raises UserError if float32 rules it out."""
    stated, dtype = stated_dtypes(config).flash_attention, compute_dtype(config)
    if stated and dtype == "float32" and config.context.target.has_fused_attention:
        raise UserError(
            f"{FLASH} of model_config is true, but the device's fused attention takes float16 and bfloat16 and "
            f"{DTYPE_KEY} is float32; set it to false or compute in one of them."
        )
    return dtype != "float32" and stated is not False


def plain_kernels(config: Config) -> list[str]:
    """Returns the device's fused kernels that the run turns off. Raises UserError if it does not run on a device."""
    names = config.context.plain_kernels
    if names and config.context.target == SHARED_MEMORY:
        raise UserError(
            "context.plain_kernels is for the fused kernels of devices, but the run computes on processors in shared "
            "memory; set MINDGRPO_NATIVE=0 in the environment to do without the C kernels, or leave it out."
        )
    return names


def dtype_notices(config: Config) -> list[str]:
    """Returns a notice for each dtype setting of the model YAMLs that has no effect."""
    stated, dtype = stated_dtypes(config), compute_dtype(config)
    notices = []
    if stated.compute_dtype not in (None, dtype):
        notices.append(
            f"{DTYPE_KEY} {dtype} is used, not compute_dtype {stated.compute_dtype} of model_config "
            f"'{stated.path}'"
        )
    if stated.flash_attention is not None and not config.context.target.has_fused_attention:
        notices.append(f"{FLASH} of model_config has no effect: processors have one attention")
    return notices


def loss_scale(config: Config) -> float:
    """Returns the loss scale, 1 unless the compute dtype is float16. Raises UserError for an unnecessary loss scale."""
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
    """Returns dtypes.num_product_parts of the configuration."""
    return dtypes.num_product_parts(compute_dtype(config), matmul_precision(config))


def _has_kernels(config: Config) -> bool:
    return config.context.mode == 0 and keeps_slots(config.context.target)
