"""Configures MindSpore for the device, creates the backend, and connects this process to the other ranks.

Implements `context.device_target` and `context.backend`. The libraries of a device, including MindSpore, are imported
only once that device has been chosen.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import Dtype, MatmulPrecision, num_product_parts, slow_products
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.targets import SHARED_MEMORY, Target, open_device
from mindgrpo.errors import UserError, whole_number
from mindgrpo.processes.job import STATUS_VARIABLE

# The environment variables of rank and world size that other launchers set.
OTHER_LAUNCHERS = {
    "torchrun or accelerate": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "a launcher with a rank table": ("RANK_ID", "RANK_SIZE"),
}
# The precision mode that CPUs always have.
HOST_PRECISION = "must_keep_origin_dtype"


def keeps_slots(target: Target) -> bool:
    """Returns whether the generator decodes in slots of C kernels (kernels/rollout.py) on `target`; opens no device."""
    return target.backend == "shared_memory" and native_library.may_build()


def load(target: Target) -> Callable[[dict[str, str], RuntimeSettings], Backend]:
    """Imports the libraries of `target` and returns a factory of its backend: (environment, settings) -> Backend."""
    if target == SHARED_MEMORY:
        from mindgrpo.backend.cpu.backend import CpuBackend

        return lambda environment, own: CpuBackend(
            environment,
            own.compiled,
            num_product_parts(own.compute_dtype, own.matmul_precision),
            own.compute_dtype == "bfloat16",
        )
    if target.device == "Ascend":
        from mindgrpo.backend.device.ascend import AscendBackend

        def on_ascend(environment: dict[str, str], own: RuntimeSettings) -> Backend:
            # Fused attention does not support float32.
            dtype = own.compute_dtype
            fused = None if dtype == "float32" or not own.flash_attention else dtype
            return AscendBackend(environment, own.compiled, fused)

        return on_ascend
    from mindgrpo.backend.device.host_cpu import HostCpuBackend

    return lambda environment, own: HostCpuBackend(environment, own.compiled)


def connect(
    target: Target, environment: dict[str, str], runtime: RuntimeSettings | None = None
) -> Backend:
    """Creates the backend of this process and connects it to the other ranks, given msrun's `environment`.

    Does not return in msrun's scheduler process, which exits once the ranks no longer need it. Raises UserError if
    another launcher has started several processes.
    """
    refuse_other_launchers(environment, sys.argv)
    if environment.get("MS_ROLE") == "MS_SCHED" and not target.needs_cluster:
        raise SystemExit(0)
    runtime = runtime or RuntimeSettings()
    unmet = apply(runtime, target.device, environment)
    backend = load(target)(environment, runtime)
    backend.kernels.leave(runtime.plain_kernels)
    backend.kernels.fp32_lm_head = runtime.fp32_lm_head
    backend.matmul_precision = runtime.matmul_precision
    backend.compute_dtype = runtime.compute_dtype
    backend.sums_in_float32 = runtime.sums_in_float32
    backend.bucket_bytes = runtime.bucket_bytes
    backend.unmet = unmet
    backend.compile_log.compiles = runtime.compiled
    return backend


def refuse_other_launchers(environment: Mapping[str, str], argv: Sequence[str]) -> None:
    """Raises UserError if another launcher started several processes: each would train alone. `argv` is sys.argv."""
    # A simulation compiles the graphs of one rank of a job without starting the others.
    ours = ("MS_ROLE", STATUS_VARIABLE, "MS_SIMULATION_LEVEL")
    if any(name in environment for name in ours):
        return
    for launcher, (rank, count) in OTHER_LAUNCHERS.items():
        number, total = environment.get(rank, ""), environment.get(count, "")
        if whole_number(number) is None or (whole_number(total) or 0) < 2:
            continue
        program, *arguments = argv or [""]
        words = [*argv] if program.endswith(".py") else ["my_run.py"]
        if Path(program).name in ("mindgrpo", "__main__.py"):
            words = arguments
        raise UserError(
            f"{rank} is {number} and {count} is {total}: {launcher} has started {total} processes of this program, and "
            f"each would train by itself; start it once, with mindgrpo launch --ranks {total} -- {shlex.join(words)} "
            f"(or unset {count}, if this is the only one)."
        )


@dataclass(frozen=True)
class RuntimeSettings:
    """Settings of MindSpore and the backend. `compiled` False runs operations eagerly instead of as graphs.

    `max_device_bytes` limits MindSpore's own memory pool on the device.
    """

    compiled: bool = True
    deterministic: bool = False
    jit_level: str | None = None
    max_call_depth: int | None = None
    save_graphs: bool | int = False
    save_graphs_path: str = "./graphs"
    memory_optimize_level: str | None = None
    max_device_bytes: int | None = None
    precision_mode: str | None = None
    kernel_launch_capture: bool = False
    matmul_precision: MatmulPrecision = "highest"
    compute_dtype: Dtype = "float32"
    fp32_lm_head: bool = False
    sums_in_float32: bool = False
    flash_attention: bool = False
    plain_kernels: Sequence[str] = ()
    bucket_bytes: int = Backend.bucket_bytes


def apply(settings: RuntimeSettings, target: str, environment: Mapping[str, str]) -> list[str]:
    """Applies the settings to this process for device `target`; returns a sentence for each that it does not support.

    Raises UserError if MindSpore has no such device.
    """
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
    if settings.kernel_launch_capture:
        slow += _capture_launches(target)
    return slow + _set_precision(settings.precision_mode, target)


def _set_memory(settings: RuntimeSettings, target: str) -> None:
    import mindspore as ms

    # MindSpore accepts a single call with all memory settings.
    limits: dict[str, str] = {}
    if settings.memory_optimize_level:
        limits["optimize_level"] = settings.memory_optimize_level
    # MindSpore has no memory pool on CPU; the run's own budget limits host memory.
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


def _capture_launches(target: str) -> list[str]:
    """Turns on MindSpore's capture of kernel launches for graphs of the decoding phase (contract.PHASES)."""
    if target == "CPU":
        key = "context.ascend_config.kernel_launch_capture"
        return [f"{key} has no effect on this device, which launches no kernels"]
    import mindspore as ms

    ms.runtime.set_kernel_launch_capture(True)
    return []
