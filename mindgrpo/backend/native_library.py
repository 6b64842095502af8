"""The C kernels of native/: compiled once for this machine, kept in the user's cache, loaded by path.

Compiled where they run, so that they use what the processor has. Refuses to know what a kernel computes; without a
C compiler there is no library, and the callers go on with MindSpore's own operations.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent / "native"
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mindgrpo"


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def _key(program: str) -> str:
    """Changes with the sources, the flags, the compiler and the processor."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    version = subprocess.run([program, "--version"], capture_output=True, timeout=20)
    digest.update(version.stdout)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    digest.update("\n".join(sorted({x for x in lines if x.startswith(("flags", "Feat"))})).encode())
    return digest.hexdigest()[:16]


@cache
def library_path() -> Path | None:
    """The compiled library; None where there is no compiler or it fails."""
    program = compiler()
    if program is None or os.environ.get("MINDGRPO_NATIVE") == "0":
        return None
    try:
        folder = cache_directory()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"native-{_key(program)}.so"
        with (folder / "native.lock").open("w") as lock:
            # One rank compiles, the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _compile(program, path)
    except (OSError, subprocess.SubprocessError):
        return None
    return path


def _compile(program: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        sources = [str(source) for source in sorted(SOURCES.glob("*.c"))]
        command = [program, *FLAGS, *sources, "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        os.replace(made, path)


@cache
def library() -> ctypes.CDLL | None:
    """For calls outside graphs: the same image that graphs call into, so both see one memory."""
    path = library_path()
    return None if path is None else ctypes.CDLL(str(path))


def operation(symbol: str, out_shape: Callable[..., Any], out_dtype: Callable[..., Any]) -> Any:
    """A graph operation on kernel `symbol`. Raises RuntimeError without a library."""
    from mindspore import ops

    path = library_path()
    if path is None:
        raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
    return ops.Custom(f"{path}:{symbol}", out_shape=out_shape, out_dtype=out_dtype, func_type="aot")
