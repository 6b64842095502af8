"""Finds the Python that has vLLM, reads its versions, and makes the environment of a process that it runs.

Imports the standard library only: it also runs where nothing is installed yet.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import engine_variables

KEY = "generate_config.vllm.python"
VARIABLE = "MINDGRPO_VLLM_PYTHON"
FOLDER = ".venv-vllm"
INSTALL = "bash scripts/setup_env.sh --vllm, or mindgrpo engine install"
# In an environment that install.py made: the digest of its lock file, and until it is complete something else.
MARK = ".mindgrpo-engine"
DIGEST = re.compile(r"[0-9a-f]{64}\n")
REPOSITORY = Path(__file__).resolve().parents[3]
TRIED = Path(__file__).with_name("tried.json")
READ_SECONDS = 60

# By metadata, which takes a tenth of a second where an import takes six. Not isolated (-I): packages may be the user's.
READ_VERSIONS = """
import sys
sys.path[:] = filter(None, sys.path)
import json, os, platform
from importlib import metadata
versions = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
"""

# What says which rank of which job the parent is, and what Python and MindSpore it runs.
OF_THE_PARENT = re.compile(
    r"(MS|MSRUN|RANK|MINDGRPO|GLOG|MINDSPORE)_.*"
    r"|(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|DEVICE_ID|logger_(maxBytes|backupCount)"
    r"|PYTHON(PATH|HOME|STARTUP|SAFEPATH)|VIRTUAL_ENV(_PROMPT)?|CONDA_PREFIX|LD_PRELOAD"
    r"|PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
)
OF_MINDSPORE = re.compile(r"/(site|dist)-packages/mindspore(/|$)")
# The launcher lists here what it set for ranks where the user had set nothing.
SET_BY_LAUNCHER = "MINDGRPO_DEFAULTS"


class NotInstalled(UserError):
    """Nobody has named or made an environment with vLLM."""


@dataclass(frozen=True)
class Versions:
    """What an environment has installed; None: nothing. `distribution` is the name that vLLM is installed under."""

    distribution: str
    vllm: str
    torch: str | None
    transformers: str | None
    vllm_ascend: str | None
    vllm_mindspore: str | None
    python: str
    system: str
    machine: str

    def __str__(self) -> str:
        packages = [f"{self.distribution} {self.vllm}"]
        for field in fields(self)[2:6]:
            version = getattr(self, field.name)
            packages += [f"{field.name.replace('_', '-')} {version}"] if version else []
        return f"{', '.join(packages)}, Python {self.python} on {self.system} {self.machine}"


@cache
def tried() -> dict[str, Any]:
    """Reads tried.json. `tried`: the versions that were run; `others`: packages to name beside vLLM, in the order of
    Versions; `lock`: the file with every version, the build of torch and the Pythons that it is for."""
    content: dict[str, Any] = json.loads(TRIED.read_text(encoding="utf-8"))
    return content


def tried_in_words() -> str:
    """Names the versions that were run, for messages."""
    rows = tried()["tried"]
    return " or ".join(
        f"{row['distribution']} {row['vllm']} with torch {row['torch']} on {row['system']} {row['machine']}, "
        f"{row['device']}"
        for row in rows
    )


def find_python(
    configured: str | None, environment: Mapping[str, str], folder: Path | None = None
) -> Path:
    """Finds the interpreter of engine processes: `configured` (generate_config.vllm.python), else
    $MINDGRPO_VLLM_PYTHON, else `.venv-vllm` in `folder` (default: the present one) or in the repository. Raises
    UserError where there is none."""
    for value, origin in ((configured, KEY), (environment.get(VARIABLE), VARIABLE)):
        if value:
            return _named_python(value, origin, environment)
    folders = [(folder or Path.cwd()) / FOLDER]
    if REPOSITORY.name not in ("site-packages", "dist-packages"):
        folders.append(REPOSITORY / FOLDER)
    unfinished = None
    for candidate in dict.fromkeys(folders):
        # Not resolved: Python knows its environment by the path of the link.
        python = candidate / "bin" / "python"
        if is_unfinished(candidate):
            unfinished = unfinished or candidate
        elif os.access(python, os.X_OK):
            return python.absolute()
    if unfinished is not None:
        raise UserError(f"{unfinished} was not installed to its end: run {INSTALL} again.")
    searched = " or ".join(str(one.parent) for one in dict.fromkeys(folders))
    raise NotInstalled(
        f"there is no environment with vLLM: {KEY} and {VARIABLE} are not set, and {searched} has no {FOLDER}; run "
        f"{INSTALL}, or set {KEY} to a Python that has vLLM."
    )


def is_unfinished(folder: Path) -> bool:
    """Returns whether an install into it was begun and not ended; what a user made by hand counts as complete."""
    try:
        return DIGEST.fullmatch((folder / MARK).read_text(errors="replace")) is None
    except OSError:
        return False


def _named_python(value: str, origin: str, environment: Mapping[str, str]) -> Path:
    path = os.path.expanduser(value)
    if os.sep not in path:
        path = shutil.which(path, path=environment.get("PATH", os.defpath)) or path
    if os.path.isfile(path) and os.access(path, os.X_OK):
        return Path(path).absolute()
    inside = Path(path) / "bin" / "python"
    remedy = f"set it to {inside}" if inside.is_file() else "set it to a Python that has vLLM"
    raise UserError(
        f"{origin} is '{value}', which is not a program that can be run; {remedy}, or unset it and run {INSTALL}."
    )


def read_versions(python: Path) -> Versions:
    """Asks the interpreter, without an import of vLLM. Raises UserError where it does not run or has no vLLM."""
    distributions = [*dict.fromkeys(row["distribution"] for row in tried()["tried"]), "vllm"]
    optional: list[str] = tried()["others"]
    command = [str(python), "-c", READ_VERSIONS, *distributions, *optional]
    try:
        ended = subprocess.run(
            command,
            env=child_environment(os.environ, python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=READ_SECONDS,
        )
        if ended.returncode != 0:
            raise ValueError((ended.stderr.strip().splitlines() or [f"{ended.returncode}"])[-1])
        versions: dict[str, str] = json.loads(ended.stdout.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{python} does not run as a Python that could have vLLM ({error}); set {KEY} or {VARIABLE} to one that "
            f"does, or run {INSTALL}."
        ) from None
    names = [name for name in distributions if name in versions]
    if not names:
        raise UserError(
            f"{python} (Python {versions['python']}) has no vLLM; install it there, set {KEY} or {VARIABLE} to a "
            f"Python that has it, or run {INSTALL}."
        )
    others: dict[str, Any] = {
        field.name: versions.get(field.name.replace("_", "-")) for field in fields(Versions)[2:]
    }
    return Versions(names[0], versions[names[0]], **others)


def untried(versions: Versions) -> str | None:
    """Returns the warning for versions that were never run with mindgrpo; None for those that were."""
    own = vars(versions) | {"torch": (versions.torch or "").partition("+")[0]}
    is_plain = versions.vllm_ascend is None and versions.vllm_mindspore is None
    for row in tried()["tried"] if is_plain else []:
        if all(own.get(key, value) == value for key, value in row.items()):
            return None
    return (
        f"{versions} was never tried with mindgrpo (tried: {tried_in_words()}): compare the generator's and the "
        "trainer's log-probabilities in the first steps."
    )


def child_environment(environment: Mapping[str, str], python: Path) -> dict[str, str]:
    """Makes the variables of an engine process: `environment` without what is the parent's own, with vLLM's defaults.

    What the user set stays, for vLLM, Hugging Face, drivers and proxies alike; an empty variable counts as not set
    where there is a default. The number of OpenMP threads is the user's or none. The launcher finds the processes of
    its job by MINDGRPO_STATUS_DIR, which is not here either: whoever starts a process has to see to its end.
    """
    of_launcher = environment.get(SET_BY_LAUNCHER, "").split()
    ours = {
        name: value
        for name, value in environment.items()
        if name not in of_launcher and not OF_THE_PARENT.fullmatch(name)
    }
    for name in ("LD_LIBRARY_PATH", "ASCEND_CUSTOM_OPP_PATH"):
        folders = ours.get(name, "").split(os.pathsep)
        kept = [folder for folder in folders if not OF_MINDSPORE.search(folder)]
        if kept != folders:
            ours[name] = os.pathsep.join(kept)
            if not any(kept):
                del ours[name]
    ours["PATH"] = _search_path(environment, python)
    return ours | engine_variables(ours)


def _search_path(environment: Mapping[str, str], python: Path) -> str:
    """Returns PATH with programs of the engine's environment first, and none of the parent's."""
    of_parent = os.path.join(environment.get("VIRTUAL_ENV") or os.devnull, "bin")
    folders = environment.get("PATH", os.defpath).split(os.pathsep)
    kept = [folder for folder in folders if os.path.normpath(folder or ".") != of_parent]
    own = str(python.parent)
    return os.pathsep.join(kept if own in kept else [own, *kept])
