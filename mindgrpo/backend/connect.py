"""Chooses the backend for `context.device_target` and `context.backend`, and connects this process to the other ranks.

A device's libraries, MindSpore among them, are imported when that device is chosen and no earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import num_product_parts
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.runtime import RuntimeSettings, apply
from mindgrpo.backend.targets import Target


def keeps_slots(target: Target) -> bool:
    """Whether its kernels keep the generator's slots (rollout.py), as far as can be told without it."""
    return target.backend == "shared_memory" and native_library.may_build()


def load(target: Target) -> Callable[[dict[str, str], RuntimeSettings], Backend]:
    """What makes the backend of (environment, settings)."""
    if target.backend == "device":
        return partial(_device_backend, target.device)
    return _cpu_backend


def _cpu_backend(environment: dict[str, str], settings: RuntimeSettings) -> Backend:
    from mindgrpo.backend.cpu.backend import CpuBackend

    num_parts = num_product_parts(settings.compute_dtype, settings.matmul_precision)
    return CpuBackend(environment, settings.compiled, num_parts)


def _device_backend(device: str, environment: dict[str, str], settings: RuntimeSettings) -> Backend:
    from mindgrpo.backend.device.backend import DeviceBackend

    if device == "Ascend":
        from mindgrpo.backend.device.ascend import Ascend

        # float32, which fused attention does not take, has none.
        dtype = settings.compute_dtype
        fused = None if dtype == "float32" or not settings.flash_attention else dtype
        return DeviceBackend(Ascend(fused), environment, settings.compiled)
    from mindgrpo.backend.device.host_cpu import HostCpu

    return DeviceBackend(HostCpu(), environment, settings.compiled)


def connect(
    target: Target, environment: dict[str, str], runtime: RuntimeSettings | None = None
) -> Backend:
    """The backend of this process, joined to the other ranks that `environment` (msrun's) tells of.

    msrun's scheduler process does not return from here: it ends once the ranks have no more need of it.
    """
    if environment.get("MS_ROLE") == "MS_SCHED" and not target.needs_cluster:
        raise SystemExit(0)
    runtime = runtime or RuntimeSettings()
    unmet = apply(runtime, target.device, environment)
    backend = load(target)(environment, runtime)
    backend.matmul_precision = runtime.matmul_precision
    backend.compute_dtype = runtime.compute_dtype
    backend.unmet = unmet
    backend.compile_log.compiles = runtime.compiled
    return backend
