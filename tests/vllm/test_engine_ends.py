"""The engine's process with several workers, how it starts and how it ends, and in bfloat16; with the real vLLM.

Does not prove anything of an engine that is killed while it starts, nor of other platforms.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType

import pytest
from engine_process import LIMITS, PLAIN, EngineProcess, Oracle, send
from engine_subject import (
    EMBEDDING,
    EXACT,
    ONE,
    PROMPTS,
    Subject,
    failed_publish,
    gap,
    needs_vllm,
    requests_of,
    started,
    traces,
)
from mindgrpo_engine.engine import llm_arguments
from mindgrpo_engine.protocol import UserFailure, receive
from small_models import TINY, UNTIED

# vLLM's kernels for x86 without AVX-512 lack the sum over workers in shared memory.
HAS_SHARED_SUMS = platform.machine() != "x86_64" or "avx512f" in Path("/proc/cpuinfo").read_text()

pytestmark = needs_vllm

# bfloat16 in the engine against float32: 2 ** -8 of logits of some 10.
NEAR = 0.3


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = started(tmp_path_factory.mktemp("split") / "model", "untied", tensor_parallel=2)
    yield subject
    subject.engine.close()


def test_two_workers_agree_with_one(
    split: Subject, untied: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    for names in (list(split.tensors), [ONE], [EMBEDDING]):
        split.publish(names)
        assert gap(split, oracle, tmp_path) < EXACT
    untied.tensors = split.tensors
    untied.publish([])
    for temperature in (1.0, 0.7):
        assert gap(split, oracle, tmp_path, temperature) < EXACT
        both = [s.generate(requests_of(PROMPTS), temperature=temperature) for s in (split, untied)]
        assert [done["tokens"] for done in both[0]] == [done["tokens"] for done in both[1]]


def test_a_failure_of_one_worker_leaves_the_answers_in_step(
    split: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    """Only the first worker checks the checksum, so only its answer is an error."""
    reply = failed_publish(split, "crc", 700)
    assert reply["type"] == "error" and ONE in reply["error"]
    split.publish([ONE])
    assert gap(split, oracle, tmp_path) < EXACT


def wait_until_gone(pids: list[int]) -> None:
    """Zombies are gone."""
    while any(map(alive, pids)):
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def orphans() -> set[str]:
    """Names in /dev/shm that no process has open or mapped."""
    names = set(os.listdir("/dev/shm"))
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            maps = (folder / "maps").read_text("utf-8", "replace")
            names = {name for name in names if f"/dev/shm/{name}" not in maps}
        with suppress(OSError):
            names -= {Path(os.readlink(link)).name for link in (folder / "fd").iterdir()}
    return names


def test_workers_of_a_killed_engine_end_and_its_shared_memory_is_known(split: Subject) -> None:
    engine = split.engine
    mine = set(engine.ready["shared_memory"])
    sums = {name for name in mine if "cpushm" in name}
    assert len(sums) == (2 if HAS_SHARED_SUMS else 0) and len(mine) > 2, mine
    assert mine <= set(os.listdir("/dev/shm"))
    engine.process.send_signal(signal.SIGKILL)
    assert engine.process.wait() == -signal.SIGKILL
    wait_until_gone(engine.ready["workers"])
    left = orphans()
    assert sums & left or not HAS_SHARED_SUMS, "nothing was left that could be removed"
    # Engines of others may start beside: only names like this one's are of interest.
    idents = tuple(name.partition("-tp:")[0] for name in sums)
    for name in mine:
        Path("/dev/shm", name).unlink(missing_ok=True)
    shutil.rmtree(engine.ready["folder"])
    assert [name for name in os.listdir("/dev/shm") if name.startswith(idents)] == []
    assert mine.isdisjoint(os.listdir("/dev/shm"))


def test_bfloat16_is_near_and_the_end_of_the_socket_ends_engine_and_workers_while_they_work(
    oracle: Oracle, tmp_path: Path
) -> None:
    subject = started(tmp_path / "model", "untied", tensor_parallel=2, dtype="bfloat16")
    for names in ([ONE], [EMBEDDING]):
        subject.publish(names)
        largest = gap(subject, oracle, tmp_path)
        print(f"bfloat16: gap {largest:.3f}")
        assert largest < NEAR
    engine = subject.engine
    many = requests_of(PROMPTS, num_samples=10_000, limit=100)
    message = {"type": "generate", "version": subject.version, "requests": many}
    send(engine.socket, message | {"sampling": PLAIN})
    reply = receive(engine.socket)
    assert reply is not None and reply["type"] == "progress"
    engine.socket.close()
    engine.process.wait()
    wait_until_gone(engine.ready["workers"])
    assert traces(engine) == []
    engine.close()


def test_the_end_of_the_socket_ends_an_idle_engine() -> None:
    engine = EngineProcess(TINY)
    engine.socket.close()
    assert engine.process.wait() == 1
    engine.close()


def test_sizes_that_vllms_kernels_refuse_are_refused_at_the_start(tmp_path: Path) -> None:
    config = UNTIED | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    engine = EngineProcess(tmp_path)
    reply = engine.start()
    assert reply["type"] == "error" and reply["kind"] == "user", reply
    assert "head_dim=16" in reply["error"], reply
    assert engine.process.wait() == 1
    engine.close()


def test_an_unknown_argument_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for vLLM's class, whose import takes 12 s; every engine above starts by way of the real one."""
    known = make_dataclass("EngineArgs", ["block_size", "max_num_seqs"])
    for name in ("vllm", "vllm.engine", "vllm.engine.arg_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["vllm.engine.arg_utils"], "EngineArgs", known, raising=False)
    with pytest.raises(UserFailure, match="max_num_sequences.* did you mean max_num_seqs"):
        llm_arguments({"arguments": LIMITS | {"max_num_sequences": 4}}, "cpu")
