"""What ranks and threads publish to each other through shared memory is ordered by C11's atomics, on every processor.

ThreadSanitizer follows the rules of C11, not what x86 orders beyond them, so that a release or acquire that is missing
is seen here. Does not prove that no wake-up is lost (a waiter that sleeps looks again by itself, futex.c), nor that a
chunk of a sum needs its own order: the count of sleepers orders those that wait for it in most runs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mindgrpo.backend.kernels.native.library import SOURCES, compiler

RANKS = Path(__file__).with_name("ordering.c")
NAMES = ("collective", "futex", "thread_pool", "kernel")
FLAGS = ("-O1", "-g", "-std=gnu11", "-pthread", "-fsanitize=thread")
# Where to plant a fault: the source, and the call that orders nothing then.
FAULTS = {
    "a post": ("futex", "atomic_store(&cell->value, value)"),
    "a look before sleep": ("futex", "atomic_load_explicit(&cell->value, memory_order_acquire)"),
    "a look in between": ("futex", "atomic_load(&cell->value)"),
    "an arrival": ("collective", "atomic_fetch_add(&c->arrived, 1)"),
    "a thread that is done": ("thread_pool", "atomic_fetch_add(&pool.done, 1)"),
    "threads that meet": ("thread_pool", "atomic_fetch_add(&pool.arrived, 1)"),
    "a look for threads": ("thread_pool", "atomic_load_explicit(count, memory_order_acquire)"),
}


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def _compile(source: Path, folder: Path) -> Path:
    made = folder / f"{source.stem}.o"
    ended = _run([str(compiler()), *FLAGS, f"-I{SOURCES}", "-c", str(source), "-o", str(made)])
    assert ended.returncode == 0, ended.stderr
    return made


def _races(objects: list[Path], folder: Path) -> tuple[str, str]:
    """Returns what the ranks print, and what ThreadSanitizer does."""
    program = folder / "ranks"
    linked = _run([str(compiler()), *FLAGS, *map(str, objects), "-o", str(program), "-lm"])
    assert linked.returncode == 0, linked.stderr
    ended = _run(["env", "OMP_NUM_THREADS=3", str(program)])
    return ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = compiler()
    if (
        found is None
        or not Path(_run([found, "-print-file-name=libtsan.so"]).stdout.strip()).is_file()
    ):
        pytest.skip("no C compiler with ThreadSanitizer on this machine")
    folder = tmp_path_factory.mktemp("ordering")
    sources = [RANKS, *(SOURCES / f"{name}.c" for name in NAMES)]
    return {source.stem: _compile(source, folder) for source in sources}


def test_ranks_and_threads_read_nothing_that_is_not_ordered_behind_its_write(
    objects: dict[str, Path], tmp_path: Path
) -> None:
    assert _races([*objects.values()], tmp_path) == ("right\n", "")


def _relaxed(call: str) -> str:
    name, _, arguments = call.partition("(")
    plain = arguments.rstrip(")").removesuffix(", memory_order_acquire")
    return f"{name.removesuffix('_explicit')}_explicit({plain}, memory_order_relaxed)"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_counter_that_orders_nothing_is_found(
    objects: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    name, call = FAULTS[fault]
    text = (SOURCES / f"{name}.c").read_text()
    assert text.count(call) == 1
    planted = tmp_path / f"{name}.c"
    planted.write_text(text.replace(call, _relaxed(call)))
    _, found = _races([*(objects | {name: _compile(planted, tmp_path)}).values()], tmp_path)
    assert "WARNING: ThreadSanitizer: data race" in found
