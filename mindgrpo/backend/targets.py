"""The devices and backends that a run can choose, and everything known about them without importing their libraries."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.errors import UserError

# CANN's set_env.sh sets one of these variables.
CANN_FOLDERS = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
DEVICE_FILES = Path("/dev")
# Where the ranks of a host find each other: the first writable folder.
BOARD_FOLDERS: tuple[Path, ...] = (Path("/dev/shm"), Path(tempfile.gettempdir()))
DEVICES = ("CPU", "Ascend")
# The first is the device's default.
BACKENDS = {"CPU": ("shared_memory", "device"), "Ascend": ("device",)}
# HCCL's defaults are 120 and 1836 seconds: too short while the slowest rank loads a large model, before which no rank
# connects to it, and while one rank writes a checkpoint and the others wait for it on their devices. These are the
# largest values that every NPU accepts (CANN's pages of these variables).
HCCL_SECONDS = {"HCCL_CONNECT_TIMEOUT": "7200", "HCCL_EXEC_TIMEOUT": "17340"}
# HCCL allocates a send and a receive buffer per group (HCCL_BUFFSIZE, 200 MB each), outside MindSpore's memory.
GROUP_BUFFER_BYTES = 2 * 200 * 2**20
# Lists the numbers of the host's NPUs that a process sees; all if unset.
VISIBLE_DEVICES = "ASCEND_RT_VISIBLE_DEVICES"
# Methods of kernels/contract.py with fused implementations, which context.plain_kernels can turn off.
FUSED_KERNELS = (
    *("rms_norm", "add_rms_norm", "glu", "add_matmul", "largest", "expert_mlp", "expert_matmul"),
    *("attention", "context_attention", "prefill_attention", "cached_attention"),
    *("adamw_cell", "squares"),
)
# Set by the launcher for jobs on several hosts.
RANKS_PER_HOST = "MINDGRPO_RANKS_PER_HOST"


@dataclass(frozen=True)
class Target:
    """A device type, and how its ranks communicate: through shared memory of one host or MindSpore's collectives."""

    device: str
    backend: str

    @property
    def needs_cluster(self) -> bool:
        """Returns whether ranks find each other through MindSpore's cluster and its scheduler."""
        return self.backend == "device"

    @property
    def has_fused_attention(self) -> bool:
        """Returns whether the device has a fused attention operator (in float16 and bfloat16)."""
        return self.device == "Ascend"

    @property
    def keeps_weights_on_host(self) -> bool:
        """Returns whether the trained weights live in host memory."""
        return self.device == "CPU"

    @property
    def group_bytes(self) -> int:
        """Returns the device bytes that each communication group takes on top of context.max_device_memory."""
        return GROUP_BUFFER_BYTES if self.device == "Ascend" else 0

    @property
    def may_fork(self) -> bool:
        """Returns whether ranks may be forked from a process that has imported MindSpore: not with a driver loaded."""
        return self.device == "CPU" and not device_files()

    def __str__(self) -> str:
        return f"{self.device}, {self.backend.replace('_', ' ')}"


SHARED_MEMORY = Target("CPU", "shared_memory")


def choose_target(device_target: str | None, backend: str | None) -> Target:
    """Resolves `context.device_target` and `context.backend` on this host. Raises UserError for unknown names.

    The default device is Ascend if the host has one, else the CPU.
    """
    device = device_target or ("Ascend" if device_files() else "CPU")
    matches = [name for name in DEVICES if name.lower() == device.lower()]
    if not matches:
        raise UserError(
            f"context.device_target is '{device_target}', but must be one of {', '.join(DEVICES)}; "
            "set it in the configuration or leave it out."
        )
    (device,) = matches
    if backend is not None and backend not in BACKENDS[device]:
        raise UserError(
            f"context.backend is '{backend}', but must be one of {', '.join(BACKENDS[device])} on {device}; set it in "
            "the configuration or leave it out."
        )
    return Target(device, backend or BACKENDS[device][0])


def ranks_per_host(environment: Mapping[str, str], world_size: int) -> int:
    return int(environment.get(RANKS_PER_HOST) or world_size)


def check_hosts(target: Target, environment: Mapping[str, str], world_size: int) -> None:
    """Raises UserError if `target` shares memory between ranks but the launcher started ranks on several hosts."""
    per_host = ranks_per_host(environment, world_size)
    if target == SHARED_MEMORY and per_host < world_size:
        raise UserError(
            f"context.backend is shared_memory, which joins ranks of one host only, but {world_size} ranks are on "
            f"{world_size // per_host} hosts; set context.backend: device, which joins hosts through MindSpore's "
            "cluster."
        )


def device_files() -> list[Path]:
    """Returns the Ascend device files of the host's driver, /dev/davinci0 and so on."""
    return sorted(path for path in DEVICE_FILES.glob("davinci*") if path.name[7:].isdecimal())


def rank_variables() -> dict[str, str]:
    """Returns default environment variables for ranks on this host's devices; the user's own values take precedence."""
    return dict(HCCL_SECONDS) if device_files() else {}


def log_variables(folder: Path) -> dict[str, str]:
    """Returns the environment variables that make CANN write its error logs to `folder`."""
    return {"ASCEND_PROCESS_LOG_PATH": str(folder), "ASCEND_GLOBAL_LOG_LEVEL": "3"}


def device_state(environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns a sentence about the default device of this host, and a remedy if that device is unusable, else ""."""
    if not device_files():
        return "runs compute on the CPU: no Ascend device (/dev/davinci*) is here", ""
    if not any(environment.get(name) for name in CANN_FOLDERS):
        what = f"there is an Ascend device, but none of {', '.join(CANN_FOLDERS)} is set"
        return what, "install CANN and source its set_env.sh"
    return "runs compute on an Ascend device, through CANN", ""


def check_device(target: Target, environment: Mapping[str, str]) -> None:
    """Raises UserError if this host lacks the device of `target` or its software."""
    if target.device != "Ascend":
        return
    if device_files():
        what, remedy = device_state(environment)
    else:
        what = "no Ascend device (/dev/davinci*) is on this host"
        remedy = "start the run on a host that has one, or set context.device_target: CPU"
    if remedy:
        raise UserError(f"context.device_target is Ascend, but {what}; {remedy}.")


def open_device(target: str) -> None:
    """Selects the device in MindSpore. Raises UserError if MindSpore cannot use it."""
    import mindspore as ms

    try:
        ms.set_device(target)
    except (RuntimeError, ValueError) as error:
        if target == "CPU":
            # MindSpore refuses a second choice once it has computed, but the CPU may already be chosen.
            if ms.get_context("device_target") == target:
                return
            raise
        reason = str(error).strip().splitlines()[0].partition(". ")[0]
        raise UserError(
            f"context.device_target is '{target}', but MindSpore cannot use such a device here ({reason}); install "
            "CANN, source its set_env.sh and check npu-smi info, or set context.device_target to CPU."
        ) from None
