"""How the framework compiles and runs graphs on a device, as the user asked for it.

Set once, before anything is placed on the device. What a device does not have is told in a sentence, and the run
goes on without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.backend.dtypes import Dtype, MatmulPrecision, slow_products
from mindgrpo.errors import UserError

# What the host's processors do anyway.
HOST_PRECISION = "must_keep_origin_dtype"


@dataclass(frozen=True)
class RuntimeSettings:
    """`compiled` False runs every operation by itself; `max_device_bytes` is for the framework's own pool."""

    compiled: bool = True
    deterministic: bool = False
    jit_level: str | None = None
    max_call_depth: int | None = None
    save_graphs: bool | int = False
    save_graphs_path: str = "./graphs"
    memory_optimize_level: str | None = None
    max_device_bytes: int | None = None
    precision_mode: str | None = None
    matmul_precision: MatmulPrecision = "highest"
    compute_dtype: Dtype = "float32"
    flash_attention: bool = False


def apply(settings: RuntimeSettings, target: str, environment: Mapping[str, str]) -> list[str]:
    """Sets up this process for `target`; what the device cannot do, a sentence each. Raises UserError."""
    import mindspore as ms

    open_device(target)
    if settings.deterministic:
        ms.set_deterministic(True)
    if settings.jit_level:
        ms.set_context(jit_config={"jit_level": settings.jit_level})
    if settings.max_call_depth:
        ms.set_recursion_limit(settings.max_call_depth)
    if settings.save_graphs:
        folder = Path(settings.save_graphs_path)
        if int(environment.get("MS_WORKER_NUM", "1")) > 1:
            folder /= f"rank_{environment.get('RANK_ID', '0')}"
        ms.set_context(save_graphs=settings.save_graphs, save_graphs_path=str(folder))
    _set_memory(settings, target)
    if target == "Ascend":
        is_high = settings.matmul_precision == "high"
        ms.device_context.ascend.op_precision.matmul_allow_hf32(is_high)
    slow = []
    if not settings.compiled:
        slow = ["context.mode 1 compiles nothing: steps take many times as long as with mode 0"]
    if target == "CPU":
        slow += slow_products(settings.matmul_precision, environment, settings.compute_dtype)
    return slow + _set_precision(settings.precision_mode, target)


def open_device(target: str) -> None:
    """Raises UserError where MindSpore has no such device."""
    import mindspore as ms

    try:
        ms.set_device(target)
    except (RuntimeError, ValueError) as error:
        if target == "CPU":
            # A program that has computed with MindSpore before has opened it.
            if ms.get_context("device_target") == target:
                return
            raise
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise UserError(
            f"context.device_target is '{target}', but MindSpore cannot use such a device here ({reason}); install "
            "CANN, source its set_env.sh and check npu-smi info, or set context.device_target to CPU."
        ) from None


def _set_memory(settings: RuntimeSettings, target: str) -> None:
    import mindspore as ms

    # The framework takes all of it in one call, and only once.
    limits: dict[str, str] = {}
    if settings.memory_optimize_level:
        limits["optimize_level"] = settings.memory_optimize_level
    # The host's own memory is no pool of the framework's; the run's budget limits that.
    if settings.max_device_bytes and target != "CPU":
        limits["max_size"] = f"{settings.max_device_bytes / 2**30:.2f}GB"
    if limits:
        ms.runtime.set_memory(**limits)


def _set_precision(mode: str | None, target: str) -> list[str]:
    if mode is None or (target == "CPU" and mode == HOST_PRECISION):
        return []
    if target == "CPU":
        return [
            f"context.ascend_config.precision_mode '{mode}' has no effect on this device, which "
            f"computes everything in the type that it is given ({HOST_PRECISION})"
        ]
    import mindspore as ms

    ms.device_context.ascend.op_precision.precision_mode(mode)
    return []
