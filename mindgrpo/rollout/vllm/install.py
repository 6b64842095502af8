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
from mindgrpo.rollout.vllm.environment import MARK, child_environment, tried

LOCK = Path(__file__).with_name(tried()["lock"]["file"])
# Free bytes that are asked for: the packages take 1.8 GB with torch's small build, several with another one.
SMALL_ROOM, LARGE_ROOM = 3 * 10**9, 12 * 10**9
ASK_PYTHON = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
QUIET = ("--quiet", "--disable-pip-version-check", "--no-input")
# As engines import it; a package that is missing or too new shows here. `from vllm import LLM` would hide which.
IMPORT = "import vllm; vllm.LLM"


def install(target: Path, environment: Mapping[str, str], lock: Path = LOCK) -> None:
    """Makes `target` an environment with what `lock` lists, or does nothing where it is one; prints what it does.

    `environment`: PYTHON, PATH and pip's variables are read. What an earlier install left in `target` goes first.
    Raises UserError, and leaves nothing in `target` then.
    """
    target = target.absolute()
    digest = f"{hashlib.sha256(lock.read_bytes()).hexdigest()}\n"
    if is_installed(target, digest):
        return _say(f"{target} has vLLM already, as {lock.name} lists it")
    python, version = choose_python(environment)
    _check_target(target)
    _check_room(target, SMALL_ROOM)
    with _claimed(target) as mark:
        _say(f"making {target} with Python {version}")
        _run(
            [python, "-m", "venv", str(target)],
            environment,
            f"{python} could not make {target}",
            "set PYTHON to another Python, or --target to another folder",
        )
        own = target / "bin" / "python"
        build = _choose_torch(own, environment, lock)
        _install_packages(own, environment, lock, build)
        _run(
            [str(own), "-c", IMPORT],
            child_environment(environment, own),
            f"vLLM was installed into {target}, but cannot be imported",
            "install what it misses on this machine, then run the command again",
        )
        mark.write_text(digest)
    _say(f"{target} has vLLM, and takes {_size(target) / 1e9:.1f} GB")


def is_installed(target: Path, digest: str) -> bool:
    try:
        return (target / MARK).read_text() == digest and (target / "bin" / "python").exists()
    except OSError:
        return False


def choose_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Finds an interpreter for the lock file, and its version: $PYTHON, this one or one on PATH. Raises UserError."""
    allowed: list[str] = tried()["lock"]["pythons"]
    asked = environment.get("PYTHON")
    names = [asked] if asked else [sys.executable, *(f"python{one}" for one in allowed), "python3"]
    seen = []
    for name in names:
        path = shutil.which(name, path=environment.get("PATH", os.defpath))
        version = _python_version(path, environment) if path else None
        if path and version in allowed:
            return path, version
        if version and version not in seen:
            seen.append(version)
    needed = " or ".join(allowed)
    of_asked = f"PYTHON={asked} is " if asked else "what is on PATH is "
    raise UserError(
        f"vLLM needs Python {needed} with its modules venv and ensurepip, but {of_asked}"
        f"{'Python ' + ' and '.join(seen) if seen else 'no such Python that runs'}: install one, for example with "
        f"'apt-get install python{allowed[0]} python{allowed[0]}-venv', or set PYTHON to one."
    )


def _python_version(path: str, environment: Mapping[str, str]) -> str | None:
    """Returns the version of an interpreter that can make environments; a shim on PATH may have no Python behind it."""
    command = [path, "-I", "-c", ASK_PYTHON]
    try:
        ended = subprocess.run(
            command, env=_plain(environment), capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout.strip() if ended.returncode == 0 else None


def _check_target(target: Path) -> None:
    """Raises UserError where `target` holds anything of a user's, so that nothing of it is removed."""
    if target.is_dir():
        if (target / MARK).exists() or not any(target.iterdir()):
            return
        reason = "holds something else than an environment that this command made"
    elif target.exists() or target.is_symlink():
        reason = "is not a folder"
    else:
        return
    raise UserError(f"{target} {reason}: move it away, or give another folder with --target.")


def _check_room(target: Path, needed: int) -> None:
    present = next(folder for folder in (target, *target.parents) if folder.exists())
    free = shutil.disk_usage(present).free
    if free < needed:
        raise UserError(
            f"{present} has {free / 1e9:.1f} GB of disk space free, but vLLM needs {needed / 1e9:.0f} GB: free some, "
            "or give a folder on another disk with --target."
        )


@contextmanager
def _claimed(target: Path) -> Iterator[Path]:
    """Empties the folder for one process; what it holds is removed where the caller fails. Raises UserError.

    A process that is killed leaves a mark without a digest, and its pip the lock of the mark.
    """
    mark = target / MARK
    try:
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(mark, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written ({error.strerror}): give another folder with --target."
        ) from None
    try:
        # Inherited, for a pip that outlives this process.
        os.set_inheritable(descriptor, True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{target} is being installed by another process: wait for its end."
            ) from None
        mark.write_text("unfinished\n")
        try:
            _empty(target, mark)
            yield mark
        except BaseException:
            _empty(target, mark)
            shutil.rmtree(target, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _empty(target: Path, mark: Path) -> None:
    """Empties the folder but for the mark: whoever is interrupted here leaves no folder that looks like a user's."""
    for path in target.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != mark:
            path.unlink()


def _choose_torch(python: Path, environment: Mapping[str, str], lock: Path) -> str | None:
    """Returns the requirement of torch's small build; None where the index has only another one, which may be large."""
    version, label = _locked_version(lock, "torch"), tried()["lock"]["build"]
    listed = _run(
        [str(python), "-m", "pip", "index", "versions", "torch", *QUIET[1:]],
        environment,
        "pip's index lists no torch",
        "check the network and the index that pip is set to ('pip config list'), then run the command again",
    )
    if re.search(rf"(?<![\w.]){re.escape(version)}\+{label}(?![\w.])", listed):
        return f"torch=={version}+{label}"
    index = f"PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/{label}"
    _say(
        f"pip's indexes have no torch {version}+{label}: another build is taken, which may be several GB ({index} "
        "offers the small one)"
    )
    _check_room(python, LARGE_ROOM)
    return None


def _locked_version(lock: Path, package: str) -> str:
    match = re.search(rf"^{package}==(\S+)$", lock.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise UserError(f"{lock} lists no version of {package}; get the file again.")
    return match[1]


def _install_packages(
    python: Path, environment: Mapping[str, str], lock: Path, small_torch: str | None
) -> None:
    _say("installing vLLM (once; one to three minutes where the index is near)")
    pip = [str(python), "-m", "pip", "install", *QUIET]
    problem = f"pip could not install what {lock} lists"
    remedy = "check the network and the index that pip is set to ('pip config list'), then run the command again"
    if small_torch is None:
        # A build for accelerators does not load without the libraries that it requires, which the lock has not.
        large = [*pip, f"torch=={_locked_version(lock, 'torch')}", "--constraint", str(lock)]
        _run(large, environment, problem, remedy)
    # Its own requirements exclude each other's newest versions; the lock is what worked.
    # Uncompiled: most of their modules are never imported, and Python compiles the others when they are.
    command = [*pip, "--no-compile", "--no-deps", "--requirement", str(lock)]
    _run([*command, *filter(None, [small_torch])], environment, problem, remedy)


def _run(command: list[str], environment: Mapping[str, str], problem: str, remedy: str) -> str:
    """Returns standard output. Raises UserError with `problem`, the last error that was printed, and `remedy`."""
    ended = subprocess.run(
        command,
        # Modules of the present folder must not replace those that are installed.
        env={**_plain(environment), "PYTHONSAFEPATH": "1"},
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
    lines = [
        line for line in ended.stderr.splitlines() if line.strip()
    ] or ended.stdout.splitlines()
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    words = errors[-1].removeprefix("ERROR:").strip() if errors else f"status {ended.returncode}"
    raise UserError(f"{problem} ({words}): {remedy}.")


def _plain(environment: Mapping[str, str]) -> dict[str, str]:
    """Drops what makes a Python another one than its path says, and what keeps it from writing bytecode.

    An engine compiles all that it imports, 12 s of a processor, where the import that tries the environment left none.
    """
    foreign = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "__PYVENV_LAUNCHER__",
        "PYTHONDONTWRITEBYTECODE",
    )
    return {name: value for name, value in environment.items() if name not in foreign}


def _size(folder: Path) -> int:
    """Counts bytes on the disk; files with two names count once."""
    sizes = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            state = os.lstat(os.path.join(parent, name))
            sizes[state.st_ino] = state.st_blocks * 512
    return sum(sizes.values())


def _say(sentence: str) -> None:
    print(f"mindgrpo: {sentence}", flush=True)
