"""Looks at driver, toolkit, versions and device memory of this host; needs no MindSpore, and calls npu-smi alone.

What `npu-smi info` prints has two lines a chip, the second with the bus id, then a table of processes. Tables of the
generations differ in columns (910A has memory and HBM, 910B an HBM column, A3 two chips an NPU with a physical id
each), but not in this.

CANN and driver versions are judged as of November 2026 by mindformers/VERSION_MAP.json of MindFormers 2.0.0, and by
MindSpore's AscendEnvChecker for the releases of CANN that it takes without a warning. No source says which older driver
still serves a CANN release, nor which driver is too new: one older than the published one fails here, a newer one
passes and is said to be untried.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mindgrpo.backend import targets
from mindgrpo.backend.targets import CANN_FOLDERS
from mindgrpo.doctor.jobs import CheckLine, fails, ok, skipped
from mindgrpo.run.machine_checks import Numbers, installed_version, needs, release

# Where MindSpore's own check of CANN refers to.
PAGE = "https://www.mindspore.cn/install"
# CANN and the driver that are published together.
TOGETHER = {
    "9.1.0": "26.1.0",
    "9.0.0": "26.0.RC1",
    "8.5.0": "25.5.0",
    "8.3.RC1": "25.3.RC1",
    "8.2.RC1": "25.2.0",
}
# By MindSpore, the newest first: CANN that is published with it, and the releases of CANN that it takes.
CANN_OF: dict[Numbers, tuple[str, tuple[str, ...]]] = {
    (2, 10): ("9.1.0", ("8.2", "8.3", "8.5", "9.0", "9.1")),
    (2, 9): ("9.0.0", ("8.2", "8.3", "8.5", "9.0")),
}
_VERSION = re.compile(r"npu-smi\s+\S+\s+Version:\s*(\S+)")
_NAME = re.compile(r"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|")
_CHIP = re.compile(r"^\|\s*(\d+)\s+(\S+)?\s*\|\s*[0-9A-Fa-f]{4}:\S+\s*\|(.*)\|\s*$")
_MEMORY = re.compile(r"(\d+)\s*/\s*(\d+)")
_PROCESS = re.compile(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|\s*(.*?)\s*\|\s*(\d+)\s*\|\s*$")
# What set_env.sh leaves, as MindSpore looks for it (mindspore/run_check/_check_version.py): a variable, and a part of
# its value.
VARIABLES = {
    "ASCEND_OPP_PATH": "/opp",
    "PYTHONPATH": "opp/built-in/op_impl/ai_core/tbe",
    "LD_LIBRARY_PATH": "/lib64",
}
# Where the installers put set_env.sh by default: CANN before 8.5, and since.
DEFAULT_SCRIPTS = tuple(f"/usr/local/Ascend/{own}/set_env.sh" for own in ("ascend-toolkit", "cann"))
# Shared by all devices of a host.
MANAGERS = ("davinci_manager", "devmm_svm", "hisi_hdc")
IMPORTS = "import mindgrpo.backend.kernels.ascend"
TOOL, TOOL_SECONDS = "npu-smi", 30.0
FIRMWARE = Path("/usr/local/Ascend/firmware/version.info")
# A chip that nobody uses has up to 3.4 of 64 GiB taken by its own system, 2.9 of 32 GiB the smaller one.
IDLE_SHARE = 0.15
MISSING = f"{TOOL} is not on PATH"
NO_DEVICE = "there is no NPU here: no npu-smi, no /dev/davinci* and no CANN"


@dataclass(frozen=True)
class Chip:
    """Describes chip number `index` of this host, counted over all chips in the order of the table.

    `holders` names the processes that have some of its memory.
    """

    index: int
    name: str
    health: str
    used_mib: int
    total_mib: int
    holders: tuple[str, ...]


class SmiTable(NamedTuple):
    version: str
    chips: tuple[Chip, ...]


def read_smi(text: str) -> SmiTable:
    """Reads what `npu-smi info` prints. Raises ValueError for a text that names no version or no chip."""
    version = _VERSION.search(text)
    holders: dict[tuple[str, str], list[str]] = {}
    for process in filter(None, map(_PROCESS.match, text.splitlines())):
        npu, number, pid, name, mib = process.groups()
        holders.setdefault((npu, number), []).append(
            f"{pid} ({name or 'no name shown'}, {mib} MiB)"
        )
    chips: list[Chip] = []
    named = ("", "", "")
    for line in text.splitlines():
        if second := _CHIP.match(line):
            # Of several pairs the last one is the memory that models are in; an absent kind is 0 / 0.
            pairs = [(int(used), int(total)) for used, total in _MEMORY.findall(second[3])]
            used, total = next((pair for pair in reversed(pairs) if pair[1]), (0, 0))
            npu, *words = named
            own = tuple(holders.get((npu, second[1]), ()))
            chips.append(Chip(len(chips), words[0], words[1], used, total, own))
        elif first := _NAME.match(line):
            named = first[1], first[2], first[3]
    if version is None or not chips:
        raise ValueError("it names no version" if version is None else "it lists no device")
    return SmiTable(version[1], tuple(chips))


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


@dataclass(frozen=True)
class HostState:
    """Holds what was seen of this host; `trouble` says why there is no `table`."""

    environment: Mapping[str, str]
    table: SmiTable | None
    trouble: str

    @classmethod
    def look(cls, environment: Mapping[str, str]) -> HostState:
        return cls(environment, *_table(environment))

    @property
    def home(self) -> Path | None:
        """Returns CANN's folder, as set_env.sh names it."""
        named = next(filter(None, map(self.environment.get, CANN_FOLDERS)), None)
        return None if named is None else Path(named)

    @property
    def visible(self) -> list[str]:
        """Lists the devices that the environment makes visible, as it names them; empty for all."""
        words = self.environment.get(targets.VISIBLE_DEVICES, "").split(",")
        return [word.strip() for word in words if word.strip()]

    @property
    def num_devices(self) -> int:
        """Counts the devices that a process of this host can use, as far as files and variables say."""
        files = len(targets.device_files())
        return min(files, len(self.visible)) if self.visible else files

    @property
    def toolkit(self) -> tuple[str, Path] | None:
        """Returns CANN's version and the file that has it, the most exact one."""
        if self.home is None:
            return None
        installed = sorted(self.home.glob("*-linux/ascend_toolkit_install.info"))
        files = [*installed, self.home / "compiler" / "version.info", self.home / "version.info"]
        read = ((version_of(path), path) for path in files)
        return next(((version, path) for version, path in read if version), None)

    @property
    def script(self) -> str:
        """Returns the set_env.sh to source: CANN's own, else the one of a default installation."""
        beside = [self.home, self.home.parent] if self.home else []
        candidates = [*(path / "set_env.sh" for path in beside), *map(Path, DEFAULT_SCRIPTS)]
        return str(next((path for path in candidates if path.is_file()), DEFAULT_SCRIPTS[0]))


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


def _driver(check: str, host: HostState) -> CheckLine:
    if host.table is None:
        return fails(
            check,
            host.trouble,
            "install driver and firmware, or in a container mount npu-smi and /usr/local/Ascend/driver, as Ascend's "
            "Docker runtime does",
        )
    chips = host.table.chips
    firmware = version_of(FIRMWARE) or "unknown"
    seen = f"{host.table.version}, firmware {firmware}, {len(chips)} x {chips[0].name}"
    sick = [f"device {chip.index} is {chip.health}" for chip in chips if chip.health != "OK"]
    if sick:
        remedy = f"ask {TOOL} info -t health -i NUMBER for why"
        return fails(check, f"{seen}; {', '.join(sick)}", remedy)
    return ok(check, f"{seen}, all healthy")


def _files(check: str, host: HostState) -> CheckLine:
    folder, files = targets.DEVICE_FILES, targets.device_files()
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
    if host.home is None:
        seen = f"{CANN_FOLDERS[0]} is not set"
        return fails(check, seen, f"install CANN, then: source {host.script}")
    if host.toolkit is None:
        remedy = f"set {CANN_FOLDERS[0]} by sourcing the set_env.sh of an installation of CANN"
        return fails(check, f"{host.home} has no version file", remedy)
    return toolkit_line(check, *host.toolkit, installed_version("mindspore"))


def toolkit_line(check: str, version: str, path: Path, mindspore: str | None) -> CheckLine:
    """Judges CANN's version beside MindSpore's, which another check judges: an unknown one counts as the newest."""
    known = release(mindspore or "")
    known = known if known in CANN_OF else next(iter(CANN_OF))
    published, taken = CANN_OF[known]
    named = "MindSpore " + ".".join(map(str, known))
    if release(version) in map(release, taken):
        return ok(check, f"{version} ({path}); published with {named}: {published}")
    seen = f"{version}, but {named} takes {', '.join(taken)}"
    remedy = f"install CANN {published} (toolkit and kernels) and source its set_env.sh: {PAGE}"
    return fails(check, seen, remedy)


def _variables(check: str, host: HostState) -> CheckLine:
    missing = [] if host.home else [CANN_FOLDERS[0]]
    missing += [
        name for name, part in VARIABLES.items() if part not in host.environment.get(name, "")
    ]
    if missing:
        seen = f"{', '.join(missing)} lack what it sets"
        return fails(check, seen, f"source {host.script} in the shell that starts ranks")
    return ok(check, "its variables are set")


def _driver_version(check: str, host: HostState) -> CheckLine:
    if host.table is None:
        return skipped(check, host.trouble)
    return driver_line(check, host.table.version, host.toolkit[0] if host.toolkit else "")


def driver_line(check: str, driver: str, cann: str) -> CheckLine:
    """Judges the driver's version; `cann` empty: not known."""
    known = {release(own): published for own, published in TOGETHER.items()}
    wanted = known.get(release(cann))
    if wanted is None:
        return skipped(check, f"{driver}; which CANN {cann or '(unknown)'} needs is not known")
    if release(driver) < release(wanted):
        return fails(
            check,
            f"{driver}, older than {wanted}, which is published with CANN {cann}",
            f"install driver and firmware {wanted} (the host's administrator; then restart it): {PAGE}",
        )
    newer = " (newer than the published one, untried)" if release(driver) > release(wanted) else ""
    return ok(check, f"{driver}, published with CANN {cann}: {wanted}{newer}")


def _imports(environment: Mapping[str, str]) -> CheckLine:
    command = [sys.executable, "-c", IMPORTS]
    ended = subprocess.run(command, env={**environment}, capture_output=True, text=True)
    if ended.returncode == 0:
        return ok("imports", "MindSpore, and the functions of it that kernels call")
    last = (ended.stderr.strip().splitlines() or ["without a word"])[-1][:300]
    remedy = "install MindSpore and CANN that fit each other, as the table of the page says"
    return fails("imports", f"status {ended.returncode}: {last}", remedy)


def version_lines(host: HostState, num_ranks: int) -> list[CheckLine]:
    """Checks what needs no device: Python and packages, CANN's version and variables."""
    packages = [
        ok("machine", own.what) if own.level == "ok" else fails("machine", own.what, own.remedy)
        for own in needs()
    ]
    packages.append(_imports(host.environment))
    return packages + _looked(host, {"CANN": _toolkit, "set_env.sh": _variables})


def device_lines(host: HostState, num_ranks: int) -> list[CheckLine]:
    """Checks the driver, the device files, and the memory of the devices that `num_ranks` ranks would use."""
    checks = {"driver": _driver, "driver's version": _driver_version, "device files": _files}
    return _looked(host, checks) + _memory_lines(host, num_ranks)


def _looked(
    host: HostState, checks: Mapping[str, Callable[[str, HostState], CheckLine]]
) -> list[CheckLine]:
    if host.trouble == MISSING and not targets.device_files() and host.home is None:
        return [skipped(check, NO_DEVICE) for check in checks]
    return [look(check, host) for check, look in checks.items()]


def _memory_lines(host: HostState, num_ranks: int) -> list[CheckLine]:
    """Looks at the first of the devices that are visible."""
    check = "device memory"
    if host.table is None:
        return [skipped(check, host.trouble)]
    chips: Sequence[Chip] = host.table.chips
    if host.visible:
        chips = [chip for word in host.visible for chip in chips if str(chip.index) == word]
    lines = [_memory(chip) for chip in chips[:num_ranks]]
    if len(chips) < num_ranks:
        seen = f"{len(chips)} devices are here, but {num_ranks} ranks need one each"
        remedy = f"give --ranks {len(chips)}, or add devices to {targets.VISIBLE_DEVICES} or the container"
        lines.append(fails(check, seen, remedy))
    return lines


def _memory(chip: Chip) -> CheckLine:
    check = f"memory of device {chip.index}"
    free = chip.total_mib - chip.used_mib
    seen = f"{free / 1024:.1f} of {chip.total_mib / 1024:.1f} GiB free"
    others = f"end them, or leave device {chip.index} out of {targets.VISIBLE_DEVICES}"
    if chip.holders:
        return fails(check, f"{seen}; held by process {', '.join(chip.holders)}", others)
    if chip.used_mib > IDLE_SHARE * chip.total_mib:
        remedy = f"look on the host, outside of this container, for who holds it: {others}"
        return fails(check, f"{seen}, and no process is shown", remedy)
    return ok(check, f"{seen}, no process")


HOST_CHECKS = {"versions": version_lines, "devices": device_lines}
