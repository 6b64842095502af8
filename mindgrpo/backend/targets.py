"""Names the devices that a run can ask for, and says what is known of each without its libraries."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mindgrpo.errors import UserError

# Where ranks of one host meet: the first that can be written to.
BOARD_FOLDERS: tuple[Path, ...] = (Path("/dev/shm"), Path(tempfile.gettempdir()))
TARGETS = ("CPU", "Ascend")
# The first is the default.
TRANSPORTS = {"CPU": ("shared_memory", "mccl"), "Ascend": ("hccl",)}


def check_target(device_target: str | None, transport: str | None) -> str:
    """The canonical name of the device. Raises UserError for a device or transport that does not exist."""
    target = device_target or "CPU"
    matches = [name for name in TARGETS if name.lower() == target.lower()]
    if not matches:
        raise UserError(
            f"context.device_target is '{target}', but must be one of {', '.join(TARGETS)}; "
            "set it in the configuration or leave it out."
        )
    if transport is not None and transport not in TRANSPORTS[matches[0]]:
        raise UserError(
            f"context.transport is '{transport}', but must be one of {', '.join(TRANSPORTS[matches[0]])} on "
            f"{matches[0]}; set it in the configuration or leave it out."
        )
    return matches[0]


def needs_cluster(target: str, transport: str | None) -> bool:
    """Whether ranks on this device find each other through MindSpore's cluster and its scheduler."""
    return (transport or TRANSPORTS[target][0]) != "shared_memory"


def keeps_weights_on_host(device_target: str | None) -> bool:
    """Whether what that device trains lies in the memory of the host itself."""
    return check_target(device_target, None) == "CPU"


def may_fork(device_target: str | None) -> bool:
    """Whether ranks may be forked from a process that has imported what they need: not where that loads a driver."""
    return check_target(device_target, None) == "CPU" and not any(Path("/dev").glob("davinci*"))
