"""Compiles the C kernels of this folder, loads them, and calls them inside and outside graphs.

They are compiled on the machine that runs them, to use all instructions of its CPU, and cached in the user's cache
folder. Without a C compiler there is no library, and callers fall back to plain MindSpore operations.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.errors import UserError, show
from mindgrpo.processes.job import STATUS_VARIABLE

SOURCES = Path(__file__).resolve().parent
FLAGS = (
    "-O3",
    "-march=native",
    "-std=gnu11",
    "-fopenmp-simd",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    *shlex.split(os.environ.get("MINDGRPO_NATIVE_FLAGS", "")),  # as scripts/sanitize.sh gives them
)
# From kernel.h: the error kind of a failed malloc, and the maximum size of an error message in bytes.
OUT_OF_MEMORY, SENTENCE_BYTES = 2, 512
# After this time a build reports that it is compiling.
SILENT_SECONDS = 10.0


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "mindgrpo"


def make_cache_directory() -> Path:
    """Creates the cache folder, writable by this user only, since its contents are executed. Raises OSError."""
    folder = cache_directory()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_own(folder):
        raise PermissionError(errno.EPERM, "it belongs to another user")
    folder.chmod(0o700)
    return folder


def _is_own(path: Path) -> bool:
    return path.exists() and path.stat().st_uid == os.geteuid()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc")


def may_build() -> bool:
    """Returns whether the library is enabled and a compiler exists; compiling may still fail."""
    return os.environ.get("MINDGRPO_NATIVE") != "0" and compiler() is not None


def _key(program: str) -> str:
    """Returns a cache key that changes with the sources, the flags, the compiler and the CPU."""
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


class Unavailable(Exception):
    """Raised if there is no library; `what` describes the problem, and `remedy` the fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy


@cache
def library_path() -> Path | None:
    """Returns the path of the compiled library; None without a compiler or if it fails."""
    try:
        return build()
    except Unavailable:
        return None


@cache
def build() -> Path:
    """Returns the path of the library, compiling it first if it is not cached. Raises Unavailable."""
    if os.environ.get("MINDGRPO_NATIVE") == "0":
        raise Unavailable("the C kernels are switched off by MINDGRPO_NATIVE=0", "unset it")
    program = compiler()
    if program is None:
        raise Unavailable("there is no C compiler for the kernels", "install gcc")
    folder = cache_directory()
    try:
        make_cache_directory()
        path = folder / f"native-{_key(program)}.so"
        with (folder / "native.lock").open("w") as lock:
            # One rank compiles while the others wait for it, however long it takes.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_own(path):
                with _said_when_slow(
                    f"compiling the C kernels with {program}, once for this machine"
                ):
                    _compile(program, path)
    except subprocess.SubprocessError as error:
        output = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise Unavailable(
            f"{program} cannot compile the C kernels ({output.splitlines()[0] if output else error})",
            "install gcc with its libraries (gcc, libc6-dev)",
        ) from None
    except OSError as error:
        raise Unavailable(
            f"{folder} cannot hold the C kernels ({error.strerror or error})",
            "set XDG_CACHE_HOME to a folder of your own that can be written",
        ) from None
    return path


def _compile(program: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        sources = sorted(SOURCES.glob("*.c"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        commands = [
            [program, *FLAGS, "-c", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as side_by_side:
            list(side_by_side.map(_run, commands))
        made = Path(folder) / path.name
        _run([program, *FLAGS, "-shared", *map(str, objects), "-o", str(made), "-lm"])
        os.replace(made, path)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def _said_when_slow(what: str) -> Iterator[None]:
    timer = threading.Timer(SILENT_SECONDS, _say, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _say(what: str) -> None:
    """Prints a line; in a job of the launcher on the launcher's screen, since the output of ranks goes to log files."""
    line = f"mindgrpo: {what}; a slow machine takes minutes\n"
    folder = os.environ.get(STATUS_VARIABLE)
    try:
        with Path(folder or "/nowhere", "messages").open("a", encoding="utf-8") as screen:
            screen.write(line)
    except OSError:
        show(sys.stderr, line)


@cache
def library() -> ctypes.CDLL | None:
    """Loads the library for calls outside graphs. Graphs call the same loaded image, so both share its state."""
    path = library_path()
    return None if path is None else ctypes.CDLL(str(path))


def has_bfloat16() -> bool:
    """Returns whether oneDNN has bfloat16 GEMMs on this CPU: on x86 with AVX-512, on Arm with BF16.

    Returns False without the library, and before MindSpore, which contains oneDNN, has been imported.
    """
    native = library()
    return bool(native is not None and native.has_bfloat16_products())


def operation(
    symbol: str,
    out_shape: Callable[..., Any],
    out_dtype: Callable[..., Any],
    bprop: Callable[..., Any] | None = None,
    variant: int = 0,
) -> Any:
    """Makes a graph operation that calls kernel `symbol`, with gradient `bprop`. Raises RuntimeError without a library.

    Operations with the same kernel but different gradients need different `variant`s: in some graphs, MindSpore uses
    the first gradient that it saw for all operations with equal attributes.
    """
    from mindspore import ops

    path = library_path()
    if path is None:
        raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
    made = ops.Custom(f"{path}:{symbol}", out_shape, out_dtype, "aot", bprop)
    return made.add_prim_attr("variant", variant)


def kernel_error() -> Exception | None:
    """Returns the error of the first kernel that failed inside a graph since the last call (see `_error`), or None.

    A failing graph itself reports only a status number.
    """
    loaded = library()
    sentence = ctypes.create_string_buffer(SENTENCE_BYTES)
    kind = 0 if loaded is None else int(loaded.kernel_take_error(sentence))
    return _error(kind, sentence) if kind else None


def _error(kind: int, sentence: Any) -> Exception:
    """Returns a UserError if memory was exhausted, or a RuntimeError for a call that the kernel rejected."""
    text = sentence.value.decode(errors="replace") or f"a kernel ended with {kind}"
    if kind == OUT_OF_MEMORY:
        return UserError(
            f"{text}: the memory of this machine is used up; take fewer or shorter samples at a time, or fewer ranks."
        )
    return RuntimeError(text)


def call_kernel(symbol: str, *arrays: np.ndarray) -> None:
    """Calls a kernel like a graph does, with input arrays, then output arrays, which it fills.

    Raises UserError if memory is exhausted, RuntimeError for a call that the kernel rejects, and ValueError for an
    array that is not contiguous.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
    if not all(array.flags.c_contiguous for array in arrays):
        raise ValueError("a kernel needs memory without gaps")
    count = len(arrays)
    shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
    sentence = ctypes.create_string_buffer(SENTENCE_BYTES)
    status = getattr(loaded, symbol)(
        count,
        (ctypes.c_void_p * count)(*(array.ctypes.data for array in arrays)),
        (ctypes.c_int * count)(*(array.ndim for array in arrays)),
        (ctypes.c_void_p * count)(*(ctypes.addressof(shape) for shape in shapes)),
        (ctypes.c_char_p * count)(*(array.dtype.name.encode() for array in arrays)),
        sentence,
        None,
    )
    if status:
        raise _error(status, sentence)


def float32_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns a b, float32 [m, n], of float32 a [m, k] and b [k, n], bitwise as in runs.

    Without the library it uses NumPy, whose last bits may differ.
    """
    if library() is None:
        return np.asarray(a @ b)
    product = np.empty((len(a), b.shape[1]), np.float32)
    factors = map(np.ascontiguousarray, (a, b))
    call_kernel("product", *factors, np.array([0, 1], np.int32), product)
    return product


def as_first(first: Any, *others: Any) -> Any:
    return first


def as_first_two(first: Any, second: Any, *others: Any) -> Any:
    return first, second


def as_first_twice(first: Any, *others: Any) -> Any:
    return first, first
