"""The rank's hold on its engine's process, with a process of the test's own that speaks the same protocol.

Does not prove anything of vLLM: that is tests/vllm.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from small_generators import LAYOUT

from mindgrpo.algorithm.sample import LENGTH, STOPPED, Request
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.errors import UserError
from mindgrpo.health.failure import read_failure
from mindgrpo.processes.job import JobProcesses
from mindgrpo.processes.linux import is_alive
from mindgrpo.rollout.engine import SeedKey, StaleWeights
from mindgrpo.rollout.noise import sample_keys
from mindgrpo.rollout.vllm import process
from mindgrpo.rollout.vllm.child.mindgrpo_engine import protocol
from mindgrpo.rollout.vllm.child.mindgrpo_engine.protocol import Message
from mindgrpo.rollout.vllm.engine import VllmEngine
from mindgrpo.rollout.vllm.process import EngineFailed, EngineLost
from mindgrpo.rollout.vllm.settings import VllmSettings
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random

DOUBLE = Path(__file__).with_name("engine_double")
SAMPLING = SamplingParams(temperature=0.7, top_k=-1, top_p=0.9, max_tokens=5, stop_ids=(2, 9))
KEY = SeedKey(seed=3, purpose=0, step=4)
REQUESTS = [
    Request(np.array([5, 6, 7], np.int32), (4, 5)),
    Request(np.array([8], np.int32), (6,), max_tokens=(1,), turn=2),
]


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CHILD", DOUBLE)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend({})


def engine_of(
    backend: CpuBackend,
    folder: Path,
    misbehave: str = "",
    seconds: float = 30.0,
    start_seconds: float = 30.0,
) -> VllmEngine:
    arguments = {"max_num_seqs": 8} | ({"misbehave": misbehave} if misbehave else {})
    limits = start_seconds, seconds
    settings = VllmSettings(Path(sys.executable), str(folder), "float32", 64, 0, *limits, arguments)
    return VllmEngine(LAYOUT, backend, settings)


def publish(engine: VllmEngine, backend: CpuBackend, version: int) -> Weights:
    policy = Weights(LAYOUT, 0, backend, "policy")
    fill_random(policy, seed=version, scale=0.25)
    engine.publish(engine.transfer_from(policy, None).run, version)
    return policy


@pytest.fixture
def engine(backend: CpuBackend, tmp_path: Path) -> Iterator[VllmEngine]:
    made = engine_of(backend, tmp_path)
    yield made
    made.close()


def names_in_shared_memory() -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob("mindgrpo-double-*"))


def test_the_engine_gets_the_policys_bits(
    engine: VllmEngine, backend: CpuBackend, tmp_path: Path
) -> None:
    for version in (1, 2):
        policy = publish(engine, backend, version)
        assert engine.version == version
        tensors = json.loads((tmp_path / "tensors.json").read_text())
        assert tensors.keys() == policy.arrays.hf_views.keys()
        for name, (shape, transposed) in tensors.items():
            stored = np.fromfile(tmp_path / f"{name}.bin", np.float32)
            values = stored.reshape(shape[::-1]).T if transposed else stored.reshape(shape)
            np.testing.assert_array_equal(values, policy.arrays.hf_views[name], err_msg=name)


def test_the_bucket_is_given_up_after_a_publish(engine: VllmEngine, backend: CpuBackend) -> None:
    publish(engine, backend, 1)
    bucket = engine.transfer_from(Weights(LAYOUT, 0, backend), None).host_copies[0]
    assert os.fstat(bucket.descriptor).st_blocks == 0


def test_what_is_asked_for_reaches_the_engine_and_what_it_answers_the_caller(
    engine: VllmEngine, backend: CpuBackend, tmp_path: Path
) -> None:
    publish(engine, backend, 1)
    made = engine.generate(REQUESTS, SAMPLING, KEY, 1)
    asked = json.loads((tmp_path / "generate.json").read_text())
    seeds = [*sample_keys(3, 0, 4, [4, 5]).tolist(), *sample_keys(3, 0, 4, [6], 2).tolist()]
    assert [row["prompt"] for row in asked["requests"]] == [[5, 6, 7], [8]]
    assert [s["seed"] for row in asked["requests"] for s in row["samples"]] == seeds
    assert [s["max_tokens"] for row in asked["requests"] for s in row["samples"]] == [5, 5, 1]
    assert asked["sampling"] == {
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 0.9,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "max_tokens": 5,
        "stop_ids": [2, 9],
    }
    assert [one.number for one in made] == [4, 5, 6]
    assert [one.tokens.tolist() for one in made] == [
        [seeds[0] % 97, 3],
        [seeds[1] % 97, 3],
        [seeds[2] % 97],
    ]
    assert [one.finish_reason for one in made] == [STOPPED, STOPPED, LENGTH]
    assert made[0].logps.tolist() == [-0.5, -0.25] and made[0].versions.tolist() == [1, 1]
    assert engine.stats.tokens == 5 and engine.stats.prompt_tokens == 7
    assert (engine.stats.drafted, engine.stats.accepted) == (3, 2)
    assert engine.capabilities.release == "9.9"
    start = json.loads((tmp_path / "start.json").read_text())
    assert start["tensor_parallel"] == 1 and start["arguments"] == {"max_num_seqs": 8}
    assert start["max_model_len"] == 64 and start["dtype"] == "float32"


def test_no_variable_of_ranks_reaches_the_engine_but_the_jobs_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK_ID", "3")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    (tmp_path / "status").mkdir()
    backend = CpuBackend({"MINDGRPO_STATUS_DIR": str(tmp_path / "status")})
    engine = engine_of(backend, tmp_path)
    publish(engine, backend, 1)
    engine.close()
    backend.health.end_checks()
    seen = json.loads((tmp_path / "environment.json").read_text())
    assert not {"RANK_ID", "MS_ROLE"} & seen.keys()
    # By this the launcher knows the processes of its job.
    assert seen["MINDGRPO_STATUS_DIR"] == str(tmp_path / "status")
    assert seen["OMP_NUM_THREADS"] == "3", "a worker has the cores of its rank"
    assert seen["VLLM_LOGGING_LEVEL"] == "ERROR" and seen["PYTHONPATH"] == str(DOUBLE)


def test_other_versions_than_the_engines_are_refused(
    engine: VllmEngine, backend: CpuBackend
) -> None:
    with pytest.raises(StaleWeights, match="vLLM has weights None, the policy 1"):
        engine.generate(REQUESTS, SAMPLING, KEY, 1)
    publish(engine, backend, 1)
    with pytest.raises(StaleWeights, match="vLLM has weights 1, the policy 2"):
        engine.generate(REQUESTS, SAMPLING, KEY, 2)
    engine.sleep()
    engine.wake()
    assert len(engine.generate(REQUESTS, SAMPLING, KEY, 1)) == 3


def test_a_worker_with_other_weights_is_found(backend: CpuBackend, tmp_path: Path) -> None:
    engine = engine_of(backend, tmp_path, "stale_worker")
    with pytest.raises(StaleWeights, match=r"workers have weights \[0\], the policy 1"):
        publish(engine, backend, 1)
    assert engine.version is None
    engine.close()


def test_a_publish_that_fails_leaves_no_version(engine: VllmEngine, backend: CpuBackend) -> None:
    publish(engine, backend, 1)
    with pytest.raises(
        EngineFailed, match="commit_weights: lacks lm_head|commit_weights: lacks model"
    ):
        engine.publish(lambda: None, 2)
    with pytest.raises(StaleWeights):
        engine.generate(REQUESTS, SAMPLING, KEY, 2)
    publish(engine, backend, 3)
    assert len(engine.generate(REQUESTS, SAMPLING, KEY, 3)) == 3


def test_damage_between_the_processes_is_found(
    monkeypatch: pytest.MonkeyPatch, engine: VllmEngine, backend: CpuBackend
) -> None:
    from mindgrpo.rollout.vllm import engine as engine_module

    original = engine_module.checksum
    monkeypatch.setattr(engine_module, "checksum", lambda tensor: original(tensor) ^ 1)
    with pytest.raises(EngineFailed, match="damaged model.embed_tokens.weight"):
        publish(engine, backend, 1)


def test_the_users_mistake_is_the_users_sentence(backend: CpuBackend, tmp_path: Path) -> None:
    engine = engine_of(backend, tmp_path, "user_error")
    with pytest.raises(UserError, match="vLLM: max_num_sequences is no argument"):
        publish(engine, backend, 1)
    engine.close()


def test_an_engine_that_is_killed_is_told_with_its_last_words(
    backend: CpuBackend, tmp_path: Path
) -> None:
    engine = engine_of(backend, tmp_path, "dies")
    publish(engine, backend, 1)
    words = "engine of rank 0 was killed by signal 9 in generate: its last words are: something terrible"
    with pytest.raises(EngineLost, match=words):
        engine.generate(REQUESTS, SAMPLING, KEY, 1)
    engine.close()
    assert not names_in_shared_memory()


def test_an_engine_that_says_nothing_is_lost(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_SECONDS", 0.1)
    engine = engine_of(backend, tmp_path, "silent", seconds=2.0)
    publish(engine, backend, 1)
    assert engine._process is not None
    child = engine._process._process
    with pytest.raises(EngineLost, match="sent nothing for 2 s in generate"):
        engine.generate(REQUESTS, SAMPLING, KEY, 1)
    # Asleep for an hour.
    assert child.poll() is None
    engine.close()
    assert child.wait() == -signal.SIGKILL


def test_an_engine_may_take_longer_to_start_than_to_answer(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: dict[str, float | None] = {}

    def send(connection: socket.socket, message: Message) -> None:
        limits[message["type"]] = connection.gettimeout()
        protocol.send(connection, message)

    monkeypatch.setattr(process, "send", send)
    engine = engine_of(backend, tmp_path, seconds=30.0, start_seconds=60.0)
    publish(engine, backend, 1)
    assert len(engine.generate(REQUESTS, SAMPLING, KEY, 1)) == 3
    assert limits.pop("start") == 60.0 and {*limits.values()} == {30.0}
    engine.close()


def test_an_engine_that_takes_too_long_to_start_is_lost(
    backend: CpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "END_SECONDS", 0.1)
    engine = engine_of(backend, tmp_path, "never_starts", start_seconds=2.0)
    with pytest.raises(EngineLost, match="sent nothing for 2 s in start"):
        publish(engine, backend, 1)
    engine.close()


def test_nothing_is_left_of_an_engine_that_was_closed(backend: CpuBackend, tmp_path: Path) -> None:
    engine = engine_of(backend, tmp_path)
    publish(engine, backend, 1)
    assert len(names_in_shared_memory()) == 1
    assert engine._process is not None
    child = engine._process._process
    engine.close()
    assert child.returncode == 0 and not names_in_shared_memory()


def test_nothing_is_left_of_an_engine_that_never_was_ready(
    backend: CpuBackend, tmp_path: Path
) -> None:
    engine = engine_of(backend, tmp_path, "never_ready")
    with pytest.raises(EngineFailed, match="in start: no kernel for this"):
        publish(engine, backend, 1)
    assert len(names_in_shared_memory()) == 1
    assert engine._process is not None
    engine._process._kill()
    assert not names_in_shared_memory()


RANK = """
import sys, time
from pathlib import Path
sys.path[:0] = [{tests!r}]
from small_generators import LAYOUT
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.rollout.vllm import process
from test_vllm_process import DOUBLE, engine_of, publish
process.CHILD = DOUBLE
import os
backend = CpuBackend(dict(os.environ))
engine = engine_of(backend, Path({folder!r}))
publish(engine, backend, 1)
print(engine._process._process.pid, flush=True)
{then}
"""
CLOSE = """
owned = engine._process
wait = owned._process.wait
def and_a_beat(*arguments):
    code = wait(*arguments)
    owned._check()
    return code
owned._process.wait = and_a_beat
engine.close()
"""


def rank_with_engine(folder: Path, then: str = "time.sleep(3600)") -> subprocess.Popen[str]:
    words = RANK.format(tests=str(DOUBLE.parent), folder=str(folder), then=then)
    environment = os.environ | {"MINDGRPO_STATUS_DIR": str(folder / "status")}
    (folder / "status").mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, text=True, env=environment
    )


def test_an_engine_that_ends_while_nobody_asks_ends_its_rank(tmp_path: Path) -> None:
    rank = rank_with_engine(tmp_path)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    assert rank.wait() == 1
    failure = read_failure(tmp_path / "status", 0)
    assert failure is not None and failure.rank == 0
    assert "vLLM's engine of rank 0 was killed by signal 9" in failure.message
    assert not names_in_shared_memory()


def test_an_engine_that_was_asked_to_end_does_not_end_its_rank(tmp_path: Path) -> None:
    rank = rank_with_engine(tmp_path, CLOSE)
    assert rank.wait() == 0
    assert read_failure(tmp_path / "status", 0) is None


def test_the_launcher_hears_what_a_killed_rank_leaves_in_shared_memory(tmp_path: Path) -> None:
    rank = rank_with_engine(tmp_path)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    listed = (tmp_path / "status" / "left_behind_0").read_text().splitlines()
    assert listed == [f"/dev/shm/mindgrpo-double-{pid}"]
    rank.kill()
    rank.wait()
    while is_alive(pid):  # the double ends when its connection does
        time.sleep(0.1)
    assert names_in_shared_memory() == [f"mindgrpo-double-{pid}"]
    JobProcesses("job", tmp_path / "status").end_all()
    assert not names_in_shared_memory()
