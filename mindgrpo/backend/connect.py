"""Chooses the backend for `context.device_target` and connects this process to the other ranks.

A device's libraries, MindSpore among them, are imported when that device is chosen and no earlier.
"""

from __future__ import annotations

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.runtime import RuntimeSettings, apply
from mindgrpo.backend.targets import TRANSPORTS, check_target, needs_cluster


def keeps_slots(device_target: str | None) -> bool:
    """Whether that device's kernels keep the generator's slots (rollout.py), as far as can be told without it."""
    return check_target(device_target, None) == "CPU" and native_library.may_build()


def load(device_target: str | None) -> type[Backend]:
    """The device's backend. Its libraries, MindSpore among them, are imported here and no earlier."""
    if check_target(device_target, None) == "Ascend":
        from mindgrpo.backend.device.ascend import AscendBackend

        return AscendBackend
    from mindgrpo.backend.cpu.backend import CpuBackend

    return CpuBackend


def connect(
    device_target: str | None,
    transport: str | None,
    environment: dict[str, str],
    runtime: RuntimeSettings | None = None,
) -> Backend:
    """The backend of this process, joined to the other ranks that `environment` (msrun's) tells of.

    msrun's scheduler process does not return from here: it ends once the ranks have no more need of it.
    """
    target = check_target(device_target, transport)
    if environment.get("MS_ROLE") == "MS_SCHED" and not needs_cluster(target, transport):
        raise SystemExit(0)
    runtime = runtime or RuntimeSettings()
    unmet = apply(runtime, target, environment)
    backend = load(target)(environment, transport or TRANSPORTS[target][0], runtime.compiled)
    backend.unmet = unmet
    backend.compile_log.compiles = runtime.compiled
    return backend
