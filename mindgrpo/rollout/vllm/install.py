"""Makes the environment with vLLM: a folder, Python's venv and the versions of the lock file; complete or not usable.

Runs on a bare Python with the standard library: pip is that of the environment which is made.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mindgrpo.errors import UserError
from mindgrpo.processes.linux import remove_left_behind
from mindgrpo.rollout.vllm.environment import MARK, child_environment, tried

LOCK = Path(__file__).with_name(tried()["lock"]["file"])
IMAGES = Path(__file__).with_name("requirements-images.txt")
# Free bytes that are asked for: the packages take 1.8 GB with torch's small build, several with another one.
SMALL_ROOM, LARGE_ROOM = 3 * 10**9, 12 * 10**9
ASK_PYTHON = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
# As engines import it; a package that is missing or too new shows here. `from vllm import LLM` would hide which.
IMPORT = "import vllm; vllm.LLM"
# In the environment; child/mindgrpo_engine/images.py names it too.
IMAGES_FOLDER = "images"
INDEX_REMEDY = "check the network and the index that pip is set to ('pip config list'), then run the command again"
# What makes a Python another one than its path says, and what keeps it from writing bytecode: an engine compiles all
# that it imports, 12 s of a processor, where the import that tries the environment left none.
FOREIGN = (
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "PYTHONDONTWRITEBYTECODE"),
)


def install(target: Path, environment: Mapping[str, str], lock: Path = LOCK) -> None:
    """Makes `target` an environment with what `lock` lists, or does nothing where it is one; prints what it does.

    `environment`: PYTHON, PATH and pip's variables are read. What an earlier install left in `target` goes first.
    Raises UserError, and leaves nothing in `target` then.
    """
    target, own = target.absolute(), target.absolute() / "bin" / "python"
    digest = f"{hashlib.sha256(lock.read_bytes() + IMAGES.read_bytes()).hexdigest()}\n"
    mark = target / MARK
    if own.exists() and mark.exists() and mark.read_text(errors="replace") == digest:
        return _say(f"{target} has vLLM already, as {lock.name} lists it")
    python, version = choose_python(environment)
    _check_room(target, SMALL_ROOM)
    with _claimed(target):
        _say(f"making {target} with Python {version}")
        remedy = "set PYTHON to another Python, or --target to another folder"
        command = [python, "-m", "venv", str(target)]
        _run(command, environment, f"{python} could not make {target}", remedy)
        _install_packages(str(own), environment, lock)
        _install_for_images(str(own), environment, target / IMAGES_FOLDER)
        problem = f"vLLM was installed into {target}, but cannot be imported"
        remedy = "install what it misses on this machine, then run the command again"
        _run([str(own), "-c", IMPORT], child_environment(environment, own), problem, remedy)
        mark.write_text(digest)
    size = int(subprocess.check_output(["du", "-sk", str(target)]).split()[0]) << 10
    _say(f"{target} has vLLM, and takes {size / 1e9:.1f} GB")


def choose_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Finds an interpreter for the lock file, and its version: $PYTHON, this one or one on PATH. Raises UserError."""
    allowed: list[str] = tried()["lock"]["pythons"]
    asked = environment.get("PYTHON")
    names = [asked] if asked else [sys.executable, *(f"python{one}" for one in allowed), "python3"]
    seen: dict[str, None] = {}
    for path in (shutil.which(name, path=environment.get("PATH", os.defpath)) for name in names):
        try:  # a shim on PATH may have no Python behind it
            version = path and _run([path, "-I", "-c", ASK_PYTHON], environment, "", "").strip()
        except UserError:
            continue
        if path and version in allowed:
            return path, version
        seen |= {version: None} if version else {}
    needed = " or ".join(allowed)
    which = f"PYTHON={asked} is" if asked else "what is on PATH is"
    raise UserError(
        f"vLLM needs Python {needed} with its modules venv and ensurepip, but {which} "
        f"{'Python ' + ' and '.join(seen) if seen else 'no such Python that runs'}: install one, for example with "
        f"'apt-get install python{allowed[0]} python{allowed[0]}-venv', or set PYTHON to one."
    )


def _check_room(target: Path, needed: int) -> None:
    present = next(folder for folder in (target, *target.parents) if folder.exists())
    free = shutil.disk_usage(present).free
    if free < needed:
        raise UserError(
            f"{present} has {free / 1e9:.1f} GB of disk space free, but vLLM needs {needed / 1e9:.0f} GB: free some, "
            "or give a folder on another disk with --target."
        )


@contextmanager
def _claimed(target: Path) -> Iterator[None]:
    """Empties the folder for one process, and removes it where the caller fails. Raises UserError for a user's folder.

    A process that is killed leaves a mark without a digest, and its pip the lock of the mark.
    """
    mark = target / MARK
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(target.iterdir()):
            raise UserError(
                f"{target} holds something else than an environment that this command made: move it away, or give "
                "another folder with --target."
            )
        file = mark.open("a")
        os.set_inheritable(file.fileno(), True)  # for a pip that outlives this process
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileExistsError:
        raise UserError(
            f"{target} is not a folder: move it away, or give another folder with --target."
        ) from None
    except BlockingIOError:
        raise UserError(
            f"{target} is being installed by another process: wait for its end."
        ) from None
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): give another folder with --target."
        ) from None
    with file:
        try:
            mark.write_text("unfinished\n")
            remove_left_behind(path for path in target.iterdir() if path != mark)
            yield
        except BaseException:
            # The mark last: whoever is interrupted here leaves no folder that looks like a user's.
            remove_left_behind(path for path in target.iterdir() if path != mark)
            shutil.rmtree(target, ignore_errors=True)
            raise


def _install_packages(python: str, environment: Mapping[str, str], lock: Path) -> None:
    """Takes torch's small build; where the index has only another one, which may be large, that."""
    build = tried()["lock"]["build"]
    quiet = ["--disable-pip-version-check", "--no-input"]
    match = re.search(r"^torch==(\S+)$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    assert match is not None
    small = f"{match[1]}+{build}"
    command = [python, "-m", "pip", "index", "versions", "torch", *quiet]
    listed = _run(command, environment, "pip's index lists no torch", INDEX_REMEDY)
    pip = [python, "-m", "pip", "install", "--quiet", *quiet]
    problem, more = f"pip could not install what {lock} lists", [f"torch=={small}"]
    is_small = re.search(rf"(?<![\w.]){re.escape(small)}(?![\w.])", listed) is not None
    if not is_small:
        index = f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{build}"
        _say(
            f"pip's indexes have no torch {small}: another build is taken, which may be several GB ({index} offers "
            "the small one)"
        )
        _check_room(Path(python), LARGE_ROOM)
    _say("installing vLLM (once; one to three minutes where the index is near)")
    if not is_small:
        # A build for accelerators does not load without the libraries that it requires, which the lock has not.
        large, more = [*pip, f"torch=={match[1]}", "--constraint", str(lock)], []
        _run(large, environment, problem, INDEX_REMEDY)
    # Its own requirements exclude each other's newest versions; the lock is what worked.
    # Uncompiled: most of their modules are never imported, and Python compiles the others when they are.
    command = [*pip, "--no-compile", "--no-deps", "--requirement", str(lock), *more]
    _run(command, environment, problem, INDEX_REMEDY)


def _install_for_images(python: str, environment: Mapping[str, str], folder: Path) -> None:
    quiet = ["--disable-pip-version-check", "--no-input", "--quiet"]
    command = [python, "-m", "pip", "install", *quiet, "--no-compile", "--no-deps"]
    command += ["--target", str(folder), "--requirement", str(IMAGES)]
    _run(command, environment, f"pip could not install what {IMAGES} lists", INDEX_REMEDY)


def _run(command: list[str], environment: Mapping[str, str], problem: str, remedy: str) -> str:
    """Returns standard output. Raises UserError with `problem`, the last error that was printed, and `remedy`."""
    plain = {name: value for name, value in environment.items() if name not in FOREIGN}
    ended = subprocess.run(
        command,
        # Modules of the present folder must not replace those that are installed.
        env={**plain, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        close_fds=False,
    )
    if ended.returncode == 0:
        return ended.stdout
    if "No space left on device" in ended.stderr:
        raise UserError(
            f"{problem}: no space is left on the disk; free some, then run the command again."
        )
    lines = [line for line in (ended.stdout + "\n" + ended.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    words = errors[-1].removeprefix("ERROR:").strip() if errors else f"status {ended.returncode}"
    raise UserError(f"{problem} ({words}): {remedy}.")


def _say(sentence: str) -> None:
    print(f"mindgrpo: {sentence}", flush=True)
