"""Checks the machine for anything that would stop a run.

Versions are read from the installed packages' metadata, so this works even where an import would crash.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from mindgrpo.backend.targets import BOARD_FOLDERS, device_state
from mindgrpo.errors import UserError, whole_number
from mindgrpo.monitor.host_memory import format_bytes, host_memory
from mindgrpo.rollout.vllm.environment import (
    INSTALL,
    VARIABLE,
    NotInstalled,
    find_python,
    read_versions,
    tried_in_words,
    untried,
)

Level = Literal["ok", "warn", "error"]
Numbers = tuple[int, ...]

# For the few pages that ranks find each other by; the memory they share needs no folder.
MEETING_ROOM = 2**20
MIN_MEMORY = 4 * 2**30
MIN_DISK = 2**30
MIN_DESCRIPTORS = 1024
# package: versions that work, from and below, and what pip is to install.
NEEDED = {
    "mindspore": ((2, 9), (2, 11), "mindspore>=2.9,<2.11"),
    "numpy": ((1,), (2,), "numpy<2"),  # mindspore is built against numpy 1
    "transformers": ((4, 52), (6,), "transformers==4.57.1"),  # renders chat templates
}
# Variables of the environment that a run reads.
COUNTS = ("OMP_NUM_THREADS", "MINDGRPO_STOP_SECONDS", "MALLOC_MMAP_THRESHOLD_", "MS_NODE_TIMEOUT")
SWITCHES = ("MINDGRPO_FORK", "MINDGRPO_NATIVE")


@dataclass(frozen=True)
class Finding:
    """The result of one check; `remedy` says what to do if `level` is not ok."""

    level: Level
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"  ->  {self.remedy}" if self.level != "ok" else ""
        return f"{self.level:<5}  {self.what}{remedy}"


def findings() -> list[Finding]:
    """Runs all checks; a run can work if no finding has the level `error`."""
    return [
        *needs(),
        _device(os.environ),
        _kernels(),
        _engine(os.environ),
        _launcher(),
        _port(os.environ.get("MINDGRPO_PORT")),
        *_capacity(),
    ]


def needs() -> list[Finding]:
    """Runs the checks that apply to every run, which preflight runs, too."""
    version = ".".join(map(str, sys.version_info[:3]))
    level: Level = "ok" if (3, 10) <= sys.version_info[:2] < (3, 13) else "error"
    python = Finding(level, f"Python {version}", "use Python 3.10, 3.11 or 3.12")
    wrong = wrong_variables(os.environ)
    remedy = "correct or unset it in the environment"
    variables = [Finding("error", what, remedy) for what in wrong]
    if not wrong:
        variables = [Finding("ok", "the environment's variables can be used")]
    packages = [_package(name, *versions) for name, versions in NEEDED.items()]
    return [python, *packages, _meeting_folder(), *variables]


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def release(version: str) -> Numbers:
    """Returns the first two numbers: 8.5 of 8.5.0, 8.3 of 8.3.RC2."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _package(name: str, first: Numbers, end: Numbers, install: str) -> Finding:
    version, remedy = installed_version(name), f"pip install '{install}'"
    if version is None:
        return Finding("error", f"{name} is not installed", remedy)
    if first <= release(version) < end:
        return Finding("ok", f"{name} {version}")
    # Another MindSpore may well work.
    level: Level = "warn" if name == "mindspore" else "error"
    return Finding(level, f"{name} {version} is none that was tested", remedy)


def wrong_variables(environment: Mapping[str, str]) -> list[str]:
    """Returns a message for each environment variable with an invalid value; empty counts as unset."""
    wrong = []
    for name in COUNTS:
        value = environment.get(name, "")
        # OpenMP takes a list of counts, one a level.
        counts = value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if value and not all(count.strip().isdecimal() and int(count[:12]) > 0 for count in counts):
            wrong.append(f"{name} is {value!r}, but must be a whole number above 0")
    for name in SWITCHES:
        value = environment.get(name, "")
        if value not in ("", "0", "1"):
            wrong.append(f"{name} is {value!r}, but must be 0 or 1")
    folder = environment.get("TMPDIR", "")
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        wrong.append(f"TMPDIR is {folder!r}, but must be a folder that can be written")
    return wrong


def _device(environment: Mapping[str, str]) -> Finding:
    what, remedy = device_state(environment)
    return Finding("error" if remedy else "ok", what, remedy)


def _kernels() -> Finding:
    try:
        from mindgrpo.backend.kernels.native import library as native_library
    except ImportError as error:
        what = f"whether C kernels can be compiled is not known ({error})"
        return Finding("warn", what, "mend what is missing first")
    try:
        return Finding("ok", f"C kernels are compiled: {native_library.build()}")
    except native_library.Unavailable as why:
        # Steps are correct without it, but take several times as long.
        return Finding("warn", f"{why.what}: steps will be slow", why.remedy)


def _engine(environment: Mapping[str, str]) -> Finding:
    """Checks the separate environment of vLLM, which only runs with use_vllm need."""
    try:
        python = find_python(None, environment)
        versions = read_versions(python)
    except UserError as error:
        if environment.get(VARIABLE):
            return Finding("warn", f"vLLM cannot be used: {error}", f"correct or unset {VARIABLE}")
        if isinstance(error, NotInstalled):
            return Finding("ok", f"vLLM is not installed (optional: another generator): {INSTALL}")
        return Finding("warn", f"vLLM cannot be used: {error}", INSTALL)
    what, warning = f"vLLM runs with {python}: {versions}", untried(versions)
    if warning is None:
        return Finding("ok", f"{what}; tried")
    return Finding("warn", f"{what}; not tried", f"{INSTALL} for {tried_in_words()}")


def _launcher() -> Finding:
    if path := shutil.which("msrun"):
        return Finding("ok", f"msrun is {path}")
    remedy = "run `source scripts/setup_env.sh`, or put mindspore's programs on PATH"
    return Finding("error", "msrun is not on PATH", remedy)


def _port(asked: str | None) -> Finding:
    if asked is not None and not 1024 <= (whole_number(asked) or 0) <= 65535:
        what = f"MINDGRPO_PORT={asked} is not a port"
        return Finding("error", what, "set 1024 to 65535 or unset it")
    port = int(asked or 0)
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            what = f"port {asked or 'of any number'} cannot be taken ({error.strerror})"
            return Finding("error", what, "set MINDGRPO_PORT to a free port or unset it")
    return Finding("ok", f"port {asked} is free" if asked else "a port can be taken on 127.0.0.1")


def _meeting_folder() -> Finding:
    reasons = []
    for folder in BOARD_FOLDERS:
        try:
            free = shutil.disk_usage(folder).free
        except OSError:
            reasons.append(f"{folder} is missing")
            continue
        if not os.access(folder, os.W_OK):
            reasons.append(f"{folder} is not writable")
        elif free < MEETING_ROOM:
            reasons.append(f"{folder} has {format_bytes(free)} free")
        else:
            return Finding("ok", f"ranks can meet in {folder}, {format_bytes(free)} free")
    remedy = f"free {format_bytes(MEETING_ROOM)} or mount a tmpfs at {BOARD_FOLDERS[0]}"
    return Finding("error", f"ranks cannot meet: {', '.join(reasons)}", remedy)


def _capacity() -> list[Finding]:
    """Reports cores, memory, disk and open files; preflight compares the last three with the plan's needs."""
    cores, memory = len(os.sched_getaffinity(0)), host_memory()
    free = shutil.disk_usage(".").free  # of the folder that runs write to by default
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = files != resource.RLIM_INFINITY and files < MIN_DESCRIPTORS
    in_words = f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    turns = "expect several ranks to take turns; use --ranks 1 to be quick"
    checks = [
        (cores < 2, f"{cores} cores", turns),
        (
            memory.available < MIN_MEMORY,
            f"memory {in_words}",
            "end other programs or use fewer ranks",
        ),
        (
            free < MIN_DISK,
            f"disk here {format_bytes(free)} free",
            "free some, or start runs with an --output_dir elsewhere",
        ),
        (few, f"a process may open {files} files", f"run 'ulimit -n {MIN_DESCRIPTORS}' before"),
    ]
    return [Finding("warn" if is_low else "ok", what, remedy) for is_low, what, remedy in checks]
