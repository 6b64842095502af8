"""Looks at driver, toolkit, versions and device memory of this host; needs no MindSpore, and calls npu-smi alone.

What `npu-smi info` prints has two lines a chip, the second with the bus id, then a table of processes. Tables of the
generations differ in columns (910A has memory and HBM, 910B an HBM column, A3 two chips an NPU with a physical id
each), but not in this.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mindgrpo.backend import targets
from mindgrpo.backend.targets import CANN_FOLDERS
from mindgrpo.doctor.jobs import CheckLine, fails, ok, skipped
from mindgrpo.doctor.probes import versions

_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_NAME = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)\s+(\S+)?\s*\|\s*[0-9A-Fa-f]{4}:\S+\s*\|(.*)\|\s*$")
_MEMORY = re.compile(r"(\d+)\s*/\s*(\d+)")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|\s*$")
# What set_env.sh leaves, as MindSpore 2.9 looks for it (mindspore/run_check/_check_version.py): a variable, and a part
# of its value.
VARIABLES = {
    "ASCEND_OPP_PATH": "/opp",
    "PYTHONPATH": "opp/built-in/op_impl/ai_core/tbe",
    "LD_LIBRARY_PATH": "/lib64",
}
# Where the installers put set_env.sh by default: CANN before 8.5, and since.
DEFAULT_SCRIPTS = (
    "/usr/local/Ascend/ascend-toolkit/set_env.sh",
    "/usr/local/Ascend/cann/set_env.sh",
)
# Shared by all devices of a host.
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
TOOL, TOOL_SECONDS = "npu-smi", 30.0
FIRMWARE = Path("/usr/local/Ascend/firmware/version.info")
# A chip that nobody uses has up to 3.4 of 64 GiB taken by its own system, 2.9 of 32 GiB the smaller one.
IDLE_SHARE = 0.15
MISSING = f"{TOOL} is not on PATH"
NO_DEVICE = "there is no NPU here: no npu-smi, no /dev/davinci* and no CANN"


@dataclass(frozen=True)
class Holder:
    """Names a process that holds `mib` MiB of a chip's memory; its name is not always shown."""

    pid: int
    name: str
    mib: int

    def __str__(self) -> str:
        return f"{self.pid} ({self.name or 'no name shown'}, {self.mib} MiB)"


@dataclass(frozen=True)
class Chip:
    """Describes chip number `index` of this host, counted over all chips in the order of the table."""

    index: int
    npu: int
    chip: int
    name: str
    health: str
    used_mib: int
    total_mib: int
    holders: tuple[Holder, ...]

    @property
    def free_mib(self) -> int:
        return self.total_mib - self.used_mib


@dataclass(frozen=True)
class SmiTable:
    version: str
    chips: tuple[Chip, ...]


def read_smi(text: str) -> SmiTable:
    """Reads what `npu-smi info` prints. Raises ValueError for a text that names no version or no chip."""
    version = _VERSION.search(text)
    if version is None:
        raise ValueError("it names no version")
    holders: dict[tuple[int, int], list[Holder]] = {}
    for process in filter(None, map(_PROCESS.match, text.splitlines())):
        npu, chip, pid, name, mib = process.groups()
        holders.setdefault((int(npu), int(chip)), []).append(Holder(int(pid), name, int(mib)))
    chips: list[Chip] = []
    named: tuple[int, str, str] | None = None
    for line in text.splitlines():
        second = _CHIP.match(line)
        if second and named is not None:
            number = int(second[1])
            # Of several pairs the last one is the memory that models are in; an absent kind is 0 / 0.
            pairs = [(int(used), int(total)) for used, total in _MEMORY.findall(second[3])]
            memory = next((pair for pair in reversed(pairs) if pair[1]), (0, 0))
            unit, word, health = named
            own = tuple(holders.get((unit, number), ()))
            chips.append(Chip(len(chips), unit, number, word, health, *memory, own))
            named = None
        elif first := _NAME.match(line):
            named = int(first[1]), first[2], first[3]
    if not chips:
        raise ValueError("it lists no device")
    return SmiTable(version[1], tuple(chips))


def home_of(environment: Mapping[str, str]) -> Path | None:
    """Returns CANN's folder, as set_env.sh names it."""
    named = next(filter(None, (environment.get(name) for name in CANN_FOLDERS)), None)
    return None if named is None else Path(named)


def version_files(home: Path) -> Iterator[Path]:
    """Yields the version files that exist, the most exact first."""
    yield from sorted(home.glob("*-linux/ascend_toolkit_install.info"))
    for path in (home / "compiler" / "version.info", home / "version.info"):
        if path.is_file():
            yield path


def version_in(text: str) -> str | None:
    """Reads `version=` or `Version=`: 8.5.0, 9.0.0 or 8.3.RC2; of 7.7.0:8.1.RC1, what follows the colon."""
    match = re.search(r"^\s*version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return match[1].strip('"[]').rpartition(":")[2] if match else None


def version_of(path: Path) -> str | None:
    """Reads a version file; None where it has no version or cannot be read."""
    try:
        return version_in(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def toolkit_version(home: Path) -> tuple[str, Path] | None:
    """Returns CANN's version and the file that has it."""
    read = ((version_of(path), path) for path in version_files(home))
    return next(((version, path) for version, path in read if version), None)


def missing_variables(environment: Mapping[str, str]) -> list[str]:
    """Lists the variables of set_env.sh that are not set as it sets them."""
    missing = [] if home_of(environment) else [CANN_FOLDERS[0]]
    return missing + [
        name for name, part in VARIABLES.items() if part not in environment.get(name, "")
    ]


def script_of(environment: Mapping[str, str]) -> str:
    """Returns the set_env.sh to source: CANN's own, else the one of a default installation."""
    home = home_of(environment)
    beside = [home / "set_env.sh", home.parent / "set_env.sh"] if home else []
    candidates = [*beside, *map(Path, DEFAULT_SCRIPTS)]
    return str(next((path for path in candidates if path.is_file()), DEFAULT_SCRIPTS[0]))


def device_files(folder: Path) -> list[Path]:
    """Lists /dev/davinci0 and so on, by number."""
    files = [path for path in folder.glob("davinci[0-9]*") if path.name[7:].isdecimal()]
    return sorted(files, key=lambda path: int(path.name[7:]))


@dataclass(frozen=True)
class HostState:
    """Holds what was seen of this host.

    `trouble` says why there is no `table`; `has_device` whether anything here indicates an NPU.
    """

    environment: Mapping[str, str]
    table: SmiTable | None
    trouble: str
    has_device: bool

    @classmethod
    def look(cls, environment: Mapping[str, str]) -> HostState:
        table, trouble = _table(environment)
        has_device = (
            trouble != MISSING
            or bool(device_files(targets.DEVICE_FILES))
            or home_of(environment) is not None
        )
        return cls(environment, table, trouble, has_device)

    @property
    def visible(self) -> list[str]:
        """Lists the devices that the environment makes visible, as it names them; empty for all."""
        words = self.environment.get(targets.VISIBLE_DEVICES, "").split(",")
        return [word.strip() for word in words if word.strip()]

    @property
    def num_devices(self) -> int:
        """Counts the devices that a process of this host can use, as far as files and variables say."""
        files = len(device_files(targets.DEVICE_FILES))
        return min(files, len(self.visible)) if self.visible else files

    @property
    def toolkit(self) -> tuple[str, Path] | None:
        home = home_of(self.environment)
        return None if home is None else toolkit_version(home)


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


def driver_lines(host: HostState) -> list[CheckLine]:
    """Checks driver, device files, CANN and its variables."""
    checks = {"driver": _driver, "device files": _files, "CANN": _toolkit, "set_env.sh": _variables}
    if not host.has_device:
        return [skipped(check, NO_DEVICE) for check in checks]
    return [look(check, host) for check, look in checks.items()]


def _driver(check: str, host: HostState) -> CheckLine:
    if host.table is None:
        return fails(
            check,
            host.trouble,
            "install driver and firmware, or in a container mount npu-smi and /usr/local/Ascend/driver, as Ascend's "
            "Docker runtime does",
        )
    chips = host.table.chips
    sick = [chip for chip in chips if chip.health != "OK"]
    firmware = version_of(FIRMWARE) or "unknown"
    seen = f"{host.table.version}, firmware {firmware}, {len(chips)} x {chips[0].name}"
    if sick:
        states = ", ".join(f"device {chip.index} is {chip.health}" for chip in sick)
        return fails(check, f"{seen}; {states}", f"ask {TOOL} info -t health -i NUMBER for why")
    return ok(check, f"{seen}, all healthy")


def _files(check: str, host: HostState) -> CheckLine:
    folder = targets.DEVICE_FILES
    files = device_files(folder)
    if not files:
        return fails(
            check,
            f"there is no {folder}/davinci0",
            "load the driver, or start the container with its devices (--device /dev/davinci0 ..., or Ascend's Docker "
            "runtime)",
        )
    needed = [*files, *(folder / name for name in MANAGERS)]
    closed = [str(path) for path in needed if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return fails(
            check,
            f"this user cannot read and write {', '.join(closed)}",
            "add the user to the group of the files (ls -l says which, HwHiAiUser by default) and log in again, or "
            "start the container with them",
        )
    return ok(check, f"{len(files)}, which this user can read and write")


def _toolkit(check: str, host: HostState) -> CheckLine:
    home = home_of(host.environment)
    if home is None:
        seen = f"{CANN_FOLDERS[0]} is not set"
        return fails(check, seen, f"install CANN, then: source {script_of(host.environment)}")
    if host.toolkit is None:
        return fails(
            check,
            f"{home} has no version file",
            f"set {CANN_FOLDERS[0]} by sourcing the set_env.sh of an installation of CANN",
        )
    version, path = host.toolkit
    return ok(check, f"{version} ({path})")


def _variables(check: str, host: HostState) -> CheckLine:
    missing = missing_variables(host.environment)
    if missing:
        script = script_of(host.environment)
        seen = f"{', '.join(missing)} lack what it sets"
        return fails(check, seen, f"source {script} in the shell that starts ranks")
    return ok(check, "its variables are set")


def version_lines(host: HostState) -> list[CheckLine]:
    """Checks the versions of Python, packages, CANN and driver against each other."""
    lines = versions.package_lines()
    toolkit, driver = "CANN's version", "driver's version"
    if not host.has_device:
        return lines + [skipped(check, NO_DEVICE) for check in (toolkit, driver)]
    version = host.toolkit and host.toolkit[0]
    if version is None:
        lines.append(skipped(toolkit, "CANN is not there (see above)"))
    else:
        lines.append(versions.toolkit_line(version))
    if host.table is None:
        return [*lines, skipped(driver, host.trouble)]
    return [*lines, versions.driver_line(host.table.version, version)]


def memory_lines(host: HostState, num_ranks: int) -> list[CheckLine]:
    """Checks the devices that `num_ranks` ranks of this host would use: the first of those that are visible."""
    check = "device memory"
    if not host.has_device:
        return [skipped(check, f"{NO_DEVICE}; the host's is plain doctor's")]
    if host.table is None:
        return [skipped(check, host.trouble)]
    chips = list(host.table.chips)
    if host.visible:
        chips = [chip for word in host.visible for chip in chips if str(chip.index) == word]
    lines = [_memory(chip) for chip in chips[:num_ranks]]
    if len(chips) < num_ranks:
        lines.append(
            fails(
                check,
                f"{len(chips)} devices are here, but {num_ranks} ranks need one each",
                f"give --ranks {len(chips)}, or add devices to {targets.VISIBLE_DEVICES} or the container",
            )
        )
    return lines


def _memory(chip: Chip) -> CheckLine:
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


HOST_CHECKS: Mapping[str, Callable[[HostState, int], list[CheckLine]]] = {
    "driver": lambda host, ranks: driver_lines(host),
    "versions": lambda host, ranks: version_lines(host),
    "memory": memory_lines,
}
