"""Looks at driver, toolkit, versions and device memory of this host; needs no MindSpore, and calls npu-smi alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from mindgrpo.backend import targets
from mindgrpo.doctor.probes import matrix, toolkit
from mindgrpo.doctor.probes.line import Line, fails, ok, skipped
from mindgrpo.doctor.probes.smi import Chip, SmiTable, read_smi

TOOL, TOOL_SECONDS = "npu-smi", 30.0
FIRMWARE = Path("/usr/local/Ascend/firmware/version.info")
# A chip that nobody uses has up to 3.4 of 64 GiB taken by its own system, 2.9 of 32 GiB the smaller one.
IDLE_SHARE = 0.15
# Variables by their beginnings that say how devices and ranks were set up.
TOLD = ("ASCEND_", "HCCL_", "LCCL_", "MS_", "MINDGRPO_", "RANK_", "DEVICE_ID", "GLOG_", "OMP_NUM")
PATHS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
SECRET = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL")
PACKAGES = ("mindspore", "mindformers", "numpy", "transformers", "tokenizers", "safetensors")


@dataclass(frozen=True)
class Host:
    """`trouble` says why there is no `table`; `has_device` whether anything here speaks of an NPU."""

    environment: Mapping[str, str]
    table: SmiTable | None
    trouble: str
    has_device: bool

    @classmethod
    def look(cls, environment: Mapping[str, str]) -> Host:
        table, trouble = _table(environment)
        signs = (
            table is not None,
            bool(toolkit.device_files(targets.DEVICE_FILES)),
            toolkit.home_of(environment) is not None,
            bool(trouble) and trouble != MISSING,
        )
        return cls(environment, table, trouble, any(signs))

    @property
    def num_devices(self) -> int:
        """That a process of this host can use, as far as files and variables say."""
        files = len(toolkit.device_files(targets.DEVICE_FILES))
        visible = [
            word
            for word in self.environment.get(targets.VISIBLE_DEVICES, "").split(",")
            if word.strip()
        ]
        return min(files, len(visible)) if visible else files


MISSING = f"{TOOL} is not on PATH"
NO_DEVICE = "there is no NPU here: no npu-smi, no /dev/davinci* and no CANN"


def _table(environment: Mapping[str, str]) -> tuple[SmiTable | None, str]:
    try:
        ended = subprocess.run(
            [TOOL, "info"],
            env=dict(environment),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TOOL_SECONDS,
        )
    except FileNotFoundError:
        return None, MISSING
    except subprocess.TimeoutExpired:
        return None, f"{TOOL} info did not end within {TOOL_SECONDS:.0f} s"
    except OSError as error:
        return None, f"{TOOL} cannot be started ({error.strerror})"
    if ended.returncode:
        words = (ended.stderr + ended.stdout).split("\n")
        first = next((line.strip() for line in words if line.strip()), "without a word")
        return None, f"{TOOL} info ended with status {ended.returncode}: {first[:200]}"
    try:
        return read_smi(ended.stdout), ""
    except ValueError as error:
        return None, f"{TOOL} info printed a table that cannot be read: {error}"


def driver_lines(host: Host) -> list[Line]:
    checks = ("driver", "device files", "CANN", "set_env.sh")
    if not host.has_device:
        return [skipped(check, NO_DEVICE) for check in checks]
    return [_driver(host), _files(), _toolkit(host), _variables(host)]


def _driver(host: Host) -> Line:
    if host.table is None:
        return fails(
            "driver",
            host.trouble,
            "install driver and firmware, or in a container mount npu-smi and /usr/local/Ascend/driver, as Ascend's "
            "Docker runtime does",
        )
    chips = host.table.chips
    sick = [chip for chip in chips if chip.health != "OK"]
    firmware = toolkit.version_of(FIRMWARE) or "unknown"
    seen = f"{host.table.version}, firmware {firmware}, {len(chips)} x {chips[0].name}"
    if sick:
        states = ", ".join(f"device {chip.index} is {chip.health}" for chip in sick)
        return fails("driver", f"{seen}; {states}", f"ask {TOOL} info -t health -i NUMBER for why")
    return ok("driver", f"{seen}, all healthy")


def _files() -> Line:
    folder = targets.DEVICE_FILES
    files = toolkit.device_files(folder)
    if not files:
        return fails(
            "device files",
            f"there is no {folder}/davinci0",
            "load the driver, or start the container with its devices (--device /dev/davinci0 ..., or Ascend's Docker "
            "runtime)",
        )
    closed = toolkit.closed_files(folder)
    if closed:
        return fails(
            "device files",
            f"this user cannot read and write {', '.join(closed)}",
            "add the user to the group of the files (ls -l says which, HwHiAiUser by default) and log in again, or "
            "start the container with them",
        )
    return ok("device files", f"{len(files)}, which this user can read and write")


def _toolkit(host: Host) -> Line:
    home = toolkit.home_of(host.environment)
    if home is None:
        script = toolkit.script_of(host.environment)
        seen = f"{targets.CANN_FOLDERS[0]} is not set"
        return fails("CANN", seen, f"install CANN, then: source {script}")
    version = toolkit.toolkit_version(home)
    if version is None:
        return fails(
            "CANN",
            f"{home} has no version file",
            f"set {targets.CANN_FOLDERS[0]} by sourcing the set_env.sh of an installation of CANN",
        )
    return ok("CANN", f"{version[0]} ({version[1]})")


def _variables(host: Host) -> Line:
    missing = toolkit.missing_variables(host.environment)
    if missing:
        script = toolkit.script_of(host.environment)
        seen = f"{', '.join(missing)} lack what it sets"
        return fails("set_env.sh", seen, f"source {script} in the shell that starts ranks")
    return ok("set_env.sh", "its variables are set")


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def version_lines(host: Host) -> list[Line]:
    lines = [
        matrix.python_line(tuple(sys.version_info[:3])),
        matrix.mindspore_line(installed("mindspore")),
        matrix.mindformers_line(installed("mindformers")),
        matrix.numpy_line(installed("numpy")),
    ]
    if not host.has_device:
        checks = ("CANN's version", "driver's version")
        return lines + [skipped(check, NO_DEVICE) for check in checks]
    home = toolkit.home_of(host.environment)
    version = toolkit.toolkit_version(home) if home else None
    if version is None:
        lines.append(skipped("CANN's version", "CANN is not there (see above)"))
    else:
        lines.append(matrix.toolkit_line(version[0]))
    if host.table is None:
        return [*lines, skipped("driver's version", host.trouble)]
    return [*lines, matrix.driver_line(host.table.version, version and version[0])]


def memory_lines(host: Host, num_ranks: int) -> list[Line]:
    """Of the devices that `num_ranks` ranks of this host would use: the first of those that are visible."""
    if not host.has_device:
        return [skipped("device memory", f"{NO_DEVICE}; the host's is plain doctor's")]
    if host.table is None:
        return [skipped("device memory", host.trouble)]
    chips = _visible(host.table.chips, host.environment.get(targets.VISIBLE_DEVICES, ""))
    lines = [_memory(chip) for chip in chips[:num_ranks]]
    if len(chips) < num_ranks:
        lines.append(
            fails(
                "device memory",
                f"{len(chips)} devices are here, but {num_ranks} ranks need one each",
                f"give --ranks {len(chips)}, or add devices to {targets.VISIBLE_DEVICES} or the container",
            )
        )
    return lines


def _visible(chips: Sequence[Chip], variable: str) -> list[Chip]:
    wanted = [word.strip() for word in variable.split(",") if word.strip()]
    if not wanted:
        return list(chips)
    return [chip for word in wanted for chip in chips if str(chip.index) == word]


def _memory(chip: Chip) -> Line:
    check = f"memory of device {chip.index}"
    seen = f"{chip.free_mib / 1024:.1f} of {chip.total_mib / 1024:.1f} GiB free"
    others = f"end them, or leave device {chip.index} out of {targets.VISIBLE_DEVICES}"
    if chip.holders:
        processes = ", ".join(map(str, chip.holders))
        return fails(check, f"{seen}; held by process {processes}", others)
    if chip.used_mib > IDLE_SHARE * chip.total_mib:
        return fails(
            check,
            f"{seen}, and no process is shown",
            f"look on the host, outside of this container, for who holds it: {others}",
        )
    return ok(check, f"{seen}, no process")


def versions() -> dict[str, str]:
    """Of what a report is read for, as they are installed."""
    known = {name: installed(name) or "not installed" for name in PACKAGES}
    return {"python": ".".join(map(str, sys.version_info[:3])), **known}


def telling_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that say how devices and ranks were set up; none whose name speaks of a secret."""

    def is_told(name: str) -> bool:
        secret = any(word in name.upper() for word in SECRET)
        return not secret and (name in PATHS or name.startswith(TOLD))

    return {name: environment[name] for name in sorted(environment) if is_told(name)}


HOST_CHECKS: Mapping[str, Callable[[Host, int], list[Line]]] = {
    "driver": lambda host, ranks: driver_lines(host),
    "versions": lambda host, ranks: version_lines(host),
    "memory": memory_lines,
}


def system() -> str:
    name = os.uname()
    return f"{name.sysname} {name.release} {name.machine}"
