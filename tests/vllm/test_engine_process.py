"""The engine's process with the real vLLM and one worker: weights, log-probs, sampling, memory.

Runs where $MINDGRPO_VLLM_PYTHON or .venv-vllm names a Python that has vLLM. Log-probs are compared with those of
transformers. Does not prove anything of other platforms, nor of a vLLM without the layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_process import Oracle
from engine_subject import (
    EMBEDDING,
    EXACT,
    ONE,
    PROMPTS,
    Subject,
    expected,
    failed_publish,
    gap,
    gap_of,
    needs_vllm,
    requests_of,
    started,
    traces,
)
from small_models import changed

pytestmark = needs_vllm

# More than the products that oneDNN keeps; sizes of batches, in tokens. Bytes.
NUM_SIZES, MOST_GROWTH = 80, 12 << 20


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    subject = started(tmp_path_factory.mktemp("tied") / "model", "tied")
    yield subject
    subject.engine.close()


@pytest.fixture(params=["tied", "untied"])
def subject(request: pytest.FixtureRequest) -> Subject:
    chosen: Subject = request.getfixturevalue(request.param)
    return chosen


@pytest.mark.parametrize("case", ["all", "one", "embedding", "head"])
def test_log_probs_are_those_of_the_changed_weights(
    subject: Subject, oracle: Oracle, tmp_path: Path, case: str
) -> None:
    names = {"all": list(subject.tensors), "one": [ONE], "embedding": [EMBEDDING]}
    if case == "head" and "lm_head.weight" not in subject.tensors:
        pytest.skip("the tied model's head is its embedding")
    before = subject.generate(requests_of(PROMPTS))
    subject.publish(names.get(case, ["lm_head.weight"]))
    largest = gap(subject, oracle, tmp_path)
    print(f"{case}: gap {largest:.1e}")
    assert largest < EXACT
    assert before != subject.generate(requests_of(PROMPTS)), "the weights made no difference"


def test_a_tied_head_may_come_and_is_not_used(
    tied: Subject, oracle: Oracle, tmp_path: Path
) -> None:
    tied.version += 1
    wrong_head = {"lm_head.weight": -tied.tensors[EMBEDDING]}
    tied.engine.publish(tied.tensors | wrong_head, tied.version)
    assert gap(tied, oracle, tmp_path) < EXACT


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


def test_progress_is_reported_of_requests_that_take_long(tied: Subject) -> None:
    tied.engine.progress.clear()
    # Requests grow until one takes more than a second.
    for num_samples in (100, 1_000, 10_000):
        tied.generate(requests_of(PROMPTS, num_samples=num_samples, limit=100))
        if tied.engine.progress:
            break
    last = tied.engine.progress[-1]
    assert (
        last["of"] == 3 * num_samples and 0 <= last["finished"] <= last["of"] and last["tokens"] > 0
    )


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


def test_memory_does_not_grow_with_the_number_of_sizes_of_batches(tied: Subject) -> None:
    """oneDNN keeps a product for each size that it has seen, as many as it may."""

    def asleep_after(first: int, last: int) -> int:
        for size in range(first, last):
            # None begins as another does: what vLLM has of a prefix is not computed again.
            lengths = [*[100] * (size // 100), size % 100]
            prompts = [[size, 3 + n, *[5] * 98][:length] for n, length in enumerate(lengths)]
            tied.generate(requests_of([p for p in prompts if p], num_samples=1, limit=1))
        asleep: int = tied.engine.ask({"type": "sleep"})["bytes"]
        tied.engine.ask({"type": "wake"})
        return asleep

    before = asleep_after(1, NUM_SIZES)
    after = asleep_after(NUM_SIZES, 3 * NUM_SIZES)
    print(f"asleep: {before / 1e6:.1f} MB, {after / 1e6:.1f} MB after twice as many sizes more")
    assert after < before + MOST_GROWTH


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


def test_stop_leaves_nothing(untied: Subject) -> None:
    """Last: the other tests' engine is gone."""
    assert untied.engine.ask({"type": "stop"}) == {"type": "stopped"}
    assert untied.engine.process.wait() == 0
    assert traces(untied.engine) == []
