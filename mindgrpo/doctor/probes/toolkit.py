"""Reads what CANN and the driver leave on a host: version files, variables of set_env.sh, device files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mindgrpo.backend.targets import CANN_FOLDERS

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


def home_of(environment: Mapping[str, str]) -> Path | None:
    """CANN's folder, as set_env.sh names it."""
    named = next(filter(None, (environment.get(name) for name in CANN_FOLDERS)), None)
    return None if named is None else Path(named)


def version_files(home: Path) -> Iterator[Path]:
    """Those that exist, the most exact first."""
    yield from sorted(home.glob("*-linux/ascend_toolkit_install.info"))
    yield from (path for path in [home / "compiler" / "version.info"] if path.is_file())
    yield from (path for path in [home / "version.info"] if path.is_file())


def version_in(text: str) -> str | None:
    """The value of `version=` or `Version=`: 8.5.0, 9.0.0 or 8.3.RC2; of 7.7.0:8.1.RC1, what follows the colon."""
    match = re.search(r"^\s*version\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return match[1].strip('"[]').rpartition(":")[2] if match else None


def version_of(path: Path) -> str | None:
    """What a version file says; None where it says nothing or cannot be read."""
    try:
        return version_in(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def toolkit_version(home: Path) -> tuple[str, Path] | None:
    """CANN's version and the file that has it."""
    for path in version_files(home):
        version = version_of(path)
        if version:
            return version, path
    return None


def missing_variables(environment: Mapping[str, str]) -> list[str]:
    """Of set_env.sh, those that are not set as it sets them."""
    missing = [] if home_of(environment) else [CANN_FOLDERS[0]]
    return missing + [
        name for name, part in VARIABLES.items() if part not in environment.get(name, "")
    ]


def script_of(environment: Mapping[str, str]) -> str:
    """The set_env.sh to source: CANN's own, else the one of a default installation."""
    home = home_of(environment)
    beside = [home / "set_env.sh", home.parent / "set_env.sh"] if home else []
    candidates = [*beside, *map(Path, DEFAULT_SCRIPTS)]
    return str(next((path for path in candidates if path.is_file()), DEFAULT_SCRIPTS[0]))


def device_files(folder: Path) -> list[Path]:
    """/dev/davinci0 and so on, by number."""
    files = [path for path in folder.glob("davinci[0-9]*") if path.name[7:].isdecimal()]
    return sorted(files, key=lambda path: int(path.name[7:]))


def closed_files(folder: Path) -> list[str]:
    """Of the devices' files, those that this user cannot read and write, or that are missing."""
    shared = [folder / name for name in MANAGERS]
    return [
        str(path)
        for path in [*device_files(folder), *shared]
        if not os.access(path, os.R_OK | os.W_OK)
    ]
