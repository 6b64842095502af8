"""The engine's process with the real vLLM: weights, log-probs, sampling, memory, and how it ends.

Runs where $MINDGRPO_VLLM_PYTHON or .venv-vllm names a Python that has vLLM. Log-probs are compared with those of
transformers. Does not prove anything of other platforms, nor of a vLLM without the layerwise reload.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import EngineProcess, Oracle, Tensors, engine_python
from small_models import TINY, UNTIED, changed, tiny_tensors, untied_tensors, write_model

pytestmark = pytest.mark.skipif(
    engine_python() is None,
    reason="no environment of vLLM: neither .venv-vllm nor $MINDGRPO_VLLM_PYTHON",
)

EXACT = 1e-4
# bfloat16 in the engine against float32: 2 ** -8 of logits of some 10.
NEAR = 0.3
EMBEDDING = "model.embed_tokens.weight"
ONE = "model.layers.1.mlp.down_proj.weight"
PROMPTS = [[5, 9, 13, 40], [7, 8, 9, 10, 11, 12, 30, 31], [250, 3, 77]]
GONE_SECONDS = 5


class Subject:
    """An engine, the model that it was started with, and the weights that it has by now."""

    def __init__(self, engine: EngineProcess, config: dict[str, Any], tensors: Tensors) -> None:
        self.engine = engine
        self.config = config
        self.tensors = tensors
        self.version = 0

    def publish(self, names: list[str]) -> None:
        """A new version in which only the tensors of these names have changed."""
        self.version += 1
        self.tensors = changed(self.tensors, names, self.version)
        self.engine.publish(self.tensors, self.version)

    def generate(self, requests: list[dict[str, Any]], **sampling: Any) -> list[dict[str, Any]]:
        reply = self.engine.generate(self.version, requests, **sampling)
        assert reply["type"] == "completions", reply
        assert reply["version"] == self.version
        assert reply["versions"] == [self.version] * self.engine.tensor_parallel
        completions: list[dict[str, Any]] = reply["completions"]
        return completions


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


def started(folder: Path, kind: str, tensor_parallel: int = 1, dtype: str = "float32") -> Subject:
    """An engine with the weights of version 1; its folder has the model's configuration only."""
    config = json.loads((TINY / "config.json").read_text("utf-8")) if kind == "tied" else UNTIED
    tensors = tiny_tensors() if kind == "tied" else untied_tensors()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    subject = Subject(EngineProcess(folder, dtype, tensor_parallel), config, tensors)
    before = time.monotonic()
    reply = subject.engine.start()
    assert reply["type"] == "ready", reply
    print(f"{kind} {dtype} tp{tensor_parallel}: start {time.monotonic() - before:.1f} s")
    assert reply["platform"] == "cpu" and len(reply["workers"]) == tensor_parallel
    subject.publish([])
    return subject


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = started(tmp_path_factory.mktemp("tied") / "model", "tied")
    yield subject
    subject.engine.close()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = started(tmp_path_factory.mktemp("untied") / "model", "untied")
    yield subject
    subject.engine.close()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = started(tmp_path_factory.mktemp("split") / "model", "untied", tensor_parallel=2)
    yield subject
    subject.engine.close()


@pytest.fixture(params=["tied", "untied"])
def subject(request: pytest.FixtureRequest) -> Subject:
    chosen: Subject = request.getfixturevalue(request.param)
    return chosen


def requests_of(prompts: list[list[int]], num_samples: int = 2, limit: int = 12) -> list[Any]:
    seeds = range(1 << 40, 1 << 60, 12345678901)
    return [
        {
            "prompt": prompt,
            "samples": [
                {"seed": seeds[number * 100 + sample], "max_tokens": limit}
                for sample in range(num_samples)
            ],
        }
        for number, prompt in enumerate(prompts)
    ]


def gap(subject: Subject, oracle: Oracle, folder: Path, temperature: float = 1.0) -> float:
    """The largest difference of log-probs between the engine and transformers with the same weights."""
    completions = subject.generate(requests_of(PROMPTS), temperature=temperature)
    return gap_of(subject, oracle, folder, temperature, completions)


def expected(
    subject: Subject, oracle: Oracle, folder: Path, temperature: float, completions: list[Any]
) -> list[np.ndarray]:
    """For each completion of requests_of(PROMPTS), transformers' log-probs (tokens, vocabulary)."""
    model = write_model(folder / f"version{subject.version}", subject.config, subject.tensors)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    rows = [prompt + done["tokens"] for prompt, done in zip(prompts, completions, strict=True)]
    tables = oracle.log_probs(model, temperature, rows)
    return [table[len(p) - 1 : -1] for p, table in zip(prompts, tables, strict=True)]


def gap_of(
    subject: Subject, oracle: Oracle, folder: Path, temperature: float, completions: list[Any]
) -> float:
    tables = expected(subject, oracle, folder, temperature, completions)
    gaps = [
        np.abs(table[np.arange(len(done["tokens"])), done["tokens"]] - done["logps"]).max()
        for done, table in zip(completions, tables, strict=True)
    ]
    return float(max(gaps))


@pytest.mark.parametrize("case", ["all", "one", "embedding", "head"])
def test_log_probs_are_those_of_the_changed_weights(
    subject: Subject, oracle: Oracle, tmp_path: Path, case: str
) -> None:
    names = {"all": list(subject.tensors), "one": [ONE], "embedding": [EMBEDDING]}
    if case == "head" and "lm_head.weight" not in subject.tensors:
        pytest.skip("the tied model's head is its embedding")
    before = subject.generate(requests_of(PROMPTS))
    started_at = time.monotonic()
    subject.publish(names.get(case, ["lm_head.weight"]))
    seconds = time.monotonic() - started_at
    largest = gap(subject, oracle, tmp_path)
    print(f"{case}: gap {largest:.1e}, publish {seconds:.3f} s")
    assert largest < EXACT
    assert before != subject.generate(requests_of(PROMPTS)), "the weights made no difference"


def test_a_tied_head_may_come_and_is_not_used(
    tied: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    tied.version += 1
    wrong_head = {"lm_head.weight": -tied.tensors[EMBEDDING]}
    tied.engine.publish(tied.tensors | wrong_head, tied.version)
    assert gap(tied, oracle, tmp_path) < EXACT


def failed_publish(subject: Subject, case: str, version: int) -> dict[str, Any]:
    """The reply at which a publish of the subject's weights fails."""
    engine, tensors = subject.engine, subject.tensors
    if case == "missing":
        less = {name: array for name, array in tensors.items() if name != ONE}
        return engine.begin(less, version)
    if case == "extra":
        return engine.begin(tensors | {"model.extra.weight": np.ones(3, np.float32)}, version)
    if case == "shape":
        return engine.begin(tensors | {ONE: tensors[ONE].T.copy()}, version)
    assert engine.begin(tensors, version)["type"] == "begun"
    if case == "crc":
        return next(r for r in engine.load_all(tensors, ONE) if r["type"] == "error")
    if case == "twice":
        engine.load({ONE: tensors[ONE]})
        return engine.load({ONE: tensors[ONE]})
    engine.load({name: tensors[name] for name in list(tensors)[:5]})
    return engine.commit(version)


@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("missing", ONE),
        ("extra", "model.extra.weight"),
        ("shape", ONE),
        ("crc", ONE),
        ("twice", ONE),
        ("incomplete", "have not been loaded"),
    ],
)
def test_after_a_failed_publish_nothing_is_generated_until_one_succeeds(
    subject: Subject, oracle: Oracle, tmp_path: Path, case: str, named: str
) -> None:
    wanted, subject.tensors = subject.tensors, changed(subject.tensors, list(subject.tensors), 99)
    reply = failed_publish(subject, case, 500)
    assert reply["type"] == "error" and reply["kind"] == "engine" and named in reply["error"], reply
    for version in (subject.version, 500):
        refused = subject.engine.generate(version, requests_of(PROMPTS))
        assert refused["type"] == "error" and "no weights" in refused["error"], refused
    subject.tensors = wanted
    subject.publish([ONE])
    assert gap(subject, oracle, tmp_path) < EXACT


def test_a_new_begin_drops_what_an_interrupted_publish_has_loaded(
    subject: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    others = changed(subject.tensors, list(subject.tensors), 98)
    assert subject.engine.begin(others, 600) == {"type": "begun"}
    # Half of a layer, so that vLLM has not packed it yet.
    assert (
        subject.engine.load({name: others[name] for name in list(others)[:5]})["type"] == "loaded"
    )
    assert "no weights" in subject.engine.generate(600, requests_of(PROMPTS))["error"]
    subject.publish([EMBEDDING])
    assert gap(subject, oracle, tmp_path) < EXACT


def test_another_version_is_refused(subject: Subject) -> None:
    refused = subject.engine.generate(subject.version + 1, requests_of(PROMPTS))
    assert (
        refused["kind"] == "engine" and f"there are version {subject.version}" in refused["error"]
    )


@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_log_probs_are_untruncated_and_tokens_within_the_truncation(
    tied: Subject, oracle: Oracle, tmp_path: Path, temperature: float
) -> None:
    limits = {"temperature": temperature, "top_p": 0.9, "top_k": 20}
    completions = tied.generate(requests_of(PROMPTS), **limits)
    assert gap_of(tied, oracle, tmp_path, temperature, completions) < EXACT
    tables = expected(tied, oracle, tmp_path, temperature, completions)
    for done, table in zip(completions, tables, strict=True):
        for token, row in zip(done["tokens"], table, strict=True):
            probs = np.exp(np.sort(row)[::-1][:20])
            kept = int(np.searchsorted(np.cumsum(probs / probs.sum()), 0.9)) + 1
            assert row[token] >= np.log(probs[kept - 1]) - EXACT
    assert completions != tied.generate(requests_of(PROMPTS), temperature=temperature)


def test_penalty_and_min_p_do_not_change_what_is_reported(
    tied: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    keys = {"temperature": 0.8, "repetition_penalty": 1.5, "min_p": 0.05}
    completions = tied.generate(requests_of(PROMPTS), **keys)
    assert gap_of(tied, oracle, tmp_path, 0.8, completions) < EXACT


def test_temperature_0_is_greedy_with_log_probs_at_1(
    tied: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    tied.generate(requests_of(PROMPTS), temperature=0.5)
    completions = tied.generate(requests_of(PROMPTS), temperature=0.0)
    assert gap_of(tied, oracle, tmp_path, 1.0, completions) < EXACT
    for done, table in zip(
        completions, expected(tied, oracle, tmp_path, 1.0, completions), strict=True
    ):
        assert done["tokens"] == table.argmax(-1).tolist()


def test_seeds_fix_tokens_whatever_runs_beside(subject: Subject) -> None:
    requests = requests_of(PROMPTS, num_samples=4)
    together = subject.generate(requests)
    assert together == subject.generate(requests)
    alone = [
        subject.generate([{"prompt": request["prompt"], "samples": [sample]}])[0]["tokens"]
        for request in requests
        for sample in request["samples"]
    ]
    assert alone == [done["tokens"] for done in together]
    assert len({tuple(tokens) for tokens in alone}) == len(alone), "seeds make no difference"


def test_prompts_that_fill_a_batch_are_not_cut(tied: Subject) -> None:
    """Those that do not fit wait: vLLM fails where it cuts a prompt of a sample with a seed."""
    prompts = [[3 + (number + i) % 300 for i in range(110)] for number in range(45)]
    completions = tied.generate(requests_of(prompts, num_samples=1, limit=2))
    assert [len(done["tokens"]) for done in completions] == [2] * 45


def test_stop_ids_min_tokens_and_limits(tied: Subject) -> None:
    free = tied.generate(requests_of(PROMPTS))
    assert all(len(done["tokens"]) == 12 and not done["stopped"] for done in free)
    stop = free[0]["tokens"][3]
    ended = tied.generate(requests_of(PROMPTS), stop_ids=[stop])
    first = free[0]["tokens"].index(stop) + 1
    assert ended[0]["tokens"] == free[0]["tokens"][:first] and ended[0]["stopped"]
    assert len(ended[0]["logps"]) == first
    later = tied.generate(requests_of(PROMPTS), stop_ids=[stop], min_tokens=first + 2)
    assert stop not in later[0]["tokens"][: first + 1]
    requests = requests_of(PROMPTS)
    for number, request in enumerate(requests):
        for sample, limit in zip(request["samples"], (number + 1, 7), strict=True):
            sample["max_tokens"] = limit
    lengths = [len(done["tokens"]) for done in tied.generate(requests)]
    assert lengths == [1, 7, 2, 7, 3, 7]


def test_the_models_own_end_of_text_does_not_end_a_sample(tied: Subject) -> None:
    """Only the stop ids of the request do."""
    completions = tied.generate(requests_of(PROMPTS, num_samples=8, limit=60))
    assert any(2 in done["tokens"][:-1] for done in completions), "2 was never sampled"
    assert all(len(done["tokens"]) == 60 and not done["stopped"] for done in completions)


def test_progress_is_reported_at_most_once_a_second(tied: Subject) -> None:
    tied.engine.progress.clear()
    before = time.monotonic()
    while not tied.engine.progress:
        tied.generate(requests_of(PROMPTS, num_samples=100, limit=100))
        assert time.monotonic() - before < 60
    seconds = time.monotonic() - before
    assert len(tied.engine.progress) <= seconds
    last = tied.engine.progress[-1]
    assert last["of"] == 300 and 0 <= last["finished"] <= 300 and last["tokens"] > 0


def test_sleep_gives_memory_back_and_tokens_are_the_same_afterwards(tied: Subject) -> None:
    # The cache takes memory as it is written: fill some of it.
    tied.generate(requests_of([[n, n + 1] * 40 for n in range(3, 90)], 2, 20))
    before = tied.generate(requests_of(PROMPTS))
    memory = tied.engine.ask({"type": "memory"})
    asleep = tied.engine.ask({"type": "sleep"})
    print(f"memory {memory}, asleep {asleep['bytes']}")
    assert asleep["type"] == "asleep" and asleep["bytes"] < memory["rss"] - (4 << 20)
    assert 1 << 29 < memory["kv_cache"] <= 1 << 30 and memory["weights"] > 0
    assert tied.engine.ask({"type": "memory"})["kv_cache"] == 0
    assert "asleep" in tied.engine.generate(tied.version, requests_of(PROMPTS))["error"]
    assert tied.engine.ask({"type": "wake"})["type"] == "awake"
    assert tied.generate(requests_of(PROMPTS)) == before


@pytest.mark.parametrize(
    ("sampling", "words"),
    [({"top_p": 7.0}, "top_p"), ({"top_q": 1}, "top_q"), ({"temperature": -1.0}, "negative")],
)
def test_wrong_sampling_is_the_users_and_the_engine_goes_on(
    tied: Subject, sampling: dict[str, Any], words: str
) -> None:
    before = tied.generate(requests_of(PROMPTS))
    refused = tied.engine.generate(tied.version, requests_of(PROMPTS), **sampling)
    assert refused["kind"] == "user" and words in refused["error"], refused
    assert tied.generate(requests_of(PROMPTS)) == before


def test_a_sample_that_is_refused_gives_up_those_before_it(tied: Subject) -> None:
    long = {"prompt": [4] * 500, "samples": [{"seed": 1, "max_tokens": 4}]}
    refused = tied.engine.generate(tied.version, [*requests_of(PROMPTS), long])
    assert refused["kind"] == "user", refused
    # The prefix cache is not reset while a request is running.
    assert tied.engine.ask({"type": "sleep"})["type"] == "asleep"
    assert tied.engine.ask({"type": "wake"})["type"] == "awake"


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


def wait_until_gone(pids: list[int], seconds: float = GONE_SECONDS) -> list[int]:
    """Those of the processes that are still there after these seconds; zombies are gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(alive, pids)):
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def traces(engine: EngineProcess) -> list[str]:
    """What of the engine's is still there: its folder, and its names in /dev/shm."""
    left = [name for name in engine.ready["shared_memory"] if Path("/dev/shm", name).exists()]
    return left + [path for path in [engine.ready["folder"]] if Path(path).exists()]


def test_workers_of_a_killed_engine_end_and_its_shared_memory_is_known(split: Subject) -> None:
    engine = split.engine
    mine = set(engine.ready["shared_memory"])
    assert sum("cpushm" in name for name in mine) == 2 and len(mine) > 2, mine
    assert mine == {name for name in os.listdir("/dev/shm") if name in mine}
    engine.process.send_signal(signal.SIGKILL)
    assert engine.process.wait(GONE_SECONDS) == -signal.SIGKILL
    assert wait_until_gone(engine.ready["workers"]) == []


def test_the_end_of_the_socket_ends_engine_and_workers_while_they_work(tmp_path: Path) -> None:
    subject = started(tmp_path / "model", "untied", tensor_parallel=2)
    engine = subject.engine
    many = requests_of(PROMPTS, num_samples=100, limit=100)
    message = {"type": "generate", "version": 1, "requests": many}
    from engine_process import PLAIN, send

    send(engine.socket, message | {"sampling": PLAIN})
    time.sleep(1)
    engine.socket.close()
    engine.process.wait(GONE_SECONDS)
    assert wait_until_gone(engine.ready["workers"]) == []
    assert traces(engine) == []
    engine.close()


def test_bfloat16_is_near_and_stop_leaves_nothing(oracle: Oracle, tmp_path: Path) -> None:
    subject = started(tmp_path / "model", "tied", dtype="bfloat16")
    for names in ([ONE], [EMBEDDING]):
        subject.publish(names)
        largest = gap(subject, oracle, tmp_path)
        print(f"bfloat16: gap {largest:.3f}")
        assert largest < NEAR
    assert subject.engine.ask({"type": "stop"}) == {"type": "stopped"}
    assert subject.engine.process.wait(10) == 0
    assert traces(subject.engine) == []
    subject.engine.close()


def test_sizes_that_vllms_kernels_refuse_are_refused_at_the_start(tmp_path: Path) -> None:
    config = UNTIED | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    engine = EngineProcess(tmp_path)
    reply = engine.start()
    assert reply["type"] == "error" and reply["kind"] == "user", reply
    assert "head_dim=16" in reply["error"], reply
    assert engine.process.wait(10) == 1
    engine.close()


def test_an_unknown_argument_is_named_and_ends_the_process(tied: Subject, tmp_path: Path) -> None:
    engine = EngineProcess(tied.engine.model)
    reply = engine.start(max_num_sequences=4)
    assert reply["type"] == "error" and reply["kind"] == "user", reply
    assert "max_num_sequences" in reply["error"] and "max_num_seqs" in reply["error"]
    assert engine.process.wait(10) == 1
    engine.close()
