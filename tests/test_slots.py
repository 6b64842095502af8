"""Slots in C against plain operations, and against themselves in other company: ragged limits, refilled slots, shared
prompts, prompts in pieces, several tokens a call.

Does not prove that the model is right (test_golden_models.py does), nor anything about several ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_generators import (
    GROUP,
    MAX_PROMPT,
    MAX_TOKENS,
    PRECISIONS,
    SETTINGS,
    VOCAB,
    WITH_C,
    assert_same,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
    room_of,
    run,
)

from mindgrpo.algorithm.sample import Request
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.rollout import LocalModelShape
from mindgrpo.backend.kernels.shapes import Heads, SamplingParams, Vocabulary
from mindgrpo.rollout.embedded import kv_cache as room
from mindgrpo.rollout.embedded import slots
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig, KVCacheSizes
from mindgrpo.weights.local_weights import Weights

pytestmark = WITH_C

DRAWN = {
    "plain": SETTINGS,
    "top_k and top_p": replace(SETTINGS, top_k=12, top_p=0.9),
    "penalty and min_p": replace(SETTINGS, repetition_penalty=1.3, min_tokens=3, min_p=0.1),
    "greedy": replace(SETTINGS, temperature=0.0, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@pytest.fixture(scope="module")
def weights(backend: CpuBackend) -> Weights:
    return random_weights(backend)


@pytest.fixture(scope="module")
def native(backend: CpuBackend, weights: Weights) -> EmbeddedEngine:
    return generator_with(weights, backend, kernels_named("native"))


def ragged(requests: list[Request]) -> list[Request]:
    """Every sample with a limit of its own, from one token to the most."""
    rng = np.random.default_rng(8)
    return [
        replace(r, max_tokens=tuple(rng.integers(1, MAX_TOKENS + 1, len(r.samples)).tolist()))
        for r in requests
    ]


@pytest.mark.parametrize("name", DRAWN)
def test_tokens_are_those_of_plain_operations(
    backend: CpuBackend, weights: Weights, name: str
) -> None:
    """Seven slots, which no number of prompts fits: in C they are refilled one by one, else group by group."""
    made = [
        generator_with(weights, backend, kernels_named(kind), DRAWN[name], slots=7)
        for kind in ("native", "plain")
    ]
    for step in range(2):
        requests = ragged(requests_of()) if step else requests_of()
        assert_same(*(run(generator, requests, step) for generator in made))


@pytest.mark.parametrize("name", ["native", *PRECISIONS])
def test_a_sample_is_bit_for_bit_the_same_in_any_company(
    backend: CpuBackend, weights: Weights, name: str
) -> None:
    requests = ragged(requests_of())
    many = generator_with(weights, backend, kernels_named(name))
    together = run(many, requests)
    few = generator_with(weights, backend, kernels_named(name), slots=3, copies=2)
    assert_same(run(few, requests), together, atol=0)
    one_by_one = [
        completion
        for r in requests
        for sample, limit in zip(r.samples, r.max_tokens or (), strict=True)
        for completion in run(many, [Request(r.prompt, (sample,), (limit,))])
    ]
    assert_same(one_by_one, together, atol=0)


def test_a_shared_prompt_gives_what_a_prompt_for_each_sample_gives(native: EmbeddedEngine) -> None:
    shared = requests_of()
    single = [Request(r.prompt, (sample,)) for r in shared for sample in r.samples]
    together = run(native, shared)
    assert native.stats.prompt_tokens == sum(len(r.prompt) for r in shared)
    assert_same(run(native, single), together, atol=0)
    assert native.stats.prompt_tokens == GROUP * sum(len(r.prompt) for r in shared)


@pytest.mark.parametrize("steps", [1, 3])
def test_the_number_of_tokens_a_call_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
    backend: CpuBackend,
    weights: Weights,
    native: EmbeddedEngine,
    steps: int,
) -> None:
    monkeypatch.setattr(slots, "DECODE_STEPS", steps)
    other = generator_with(weights, backend, kernels_named("native"), slots=5)
    requests = ragged(requests_of())
    assert_same(run(other, requests), run(native, requests), atol=0)


def test_a_prompt_longer_than_a_call_takes_goes_in_pieces(
    monkeypatch: pytest.MonkeyPatch, backend: CpuBackend, weights: Weights
) -> None:
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, VOCAB, n).astype(np.int32) for n in (41, 16, 17, 33, 1)]
    requests = [Request(prompt, (2 * i, 2 * i + 1)) for i, prompt in enumerate(prompts)]
    found = []
    for rows in (16, 512):
        monkeypatch.setattr(room, "PROMPT_ROWS", rows)
        made = generator_with(weights, backend, kernels_named("native"), max_prompt=41, copies=2)
        found.append(run(made, requests))
    assert_same(*found, atol=0)


def test_no_row_is_computed_that_makes_no_token(native: EmbeddedEngine) -> None:
    completions = run(native, ragged(requests_of()))
    usage = native.stats
    assert usage.tokens == usage.rows == sum(len(c.tokens) for c in completions)
    figures = usage.figures()
    assert figures["rollout/wasted_fraction"] == 0.0
    assert 0.5 < figures["rollout/slot_occupancy"] < 1.0


def test_a_cache_that_was_given_up_between_two_rollouts_leaves_no_trace(
    native: EmbeddedEngine,
) -> None:
    requests = requests_of()
    expected = run(native, requests)
    for pool in native.pools["kv_cache"]:
        pool.release()
    assert_same(run(native, requests), expected, atol=0)


def test_weights_that_are_no_numbers_give_log_probs_that_are_none(
    backend: CpuBackend, weights: Weights
) -> None:
    for rules in (SETTINGS, replace(SETTINGS, top_k=5, top_p=0.9), replace(SETTINGS, top_p=0.9)):
        broken = generator_with(weights, backend, kernels_named("native"), rules, slots=4)
        for target in broken.weights.arrays.flat_buffers:
            target[...] = np.nan
        completions = run(broken, requests_of()[:1])
        assert all(np.isnan(completion.logps).all() for completion in completions)


@pytest.mark.parametrize("limits", [(1, 2), (0, 3, 3, 3), (1, 1, 1, MAX_TOKENS + 1)])
def test_limits_that_no_sample_can_have_are_refused(
    native: EmbeddedEngine, limits: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="limits"):
        run(native, [replace(requests_of()[0], max_tokens=limits)])


def test_a_job_takes_no_more_positions_than_there_are() -> None:
    given = KVCacheConfig(slots=32, group=8, prompts=4, max_prompt=100, max_tokens=50)
    for count, group, prompt, tokens in (
        (4, 8, 100, 50),
        (40, 1, 100, 50),
        (9, 3, 12, 50),
        (1, 1, 1, 1),
    ):
        parts = given.partition([prompt] * count, [group] * count, tokens)
        used = parts.slots * parts.slot_size + parts.prefix_blocks * parts.prefix_block_size
        assert used <= given.positions
        assert parts.prefix_blocks >= min(count, -(-parts.slots // group)) and parts.slots >= 1
        assert parts.slot_size >= tokens and parts.prefix_block_size >= prompt - 1
    assert given.partition([100] * 4, [8] * 4, 50).slots == 32


def test_memory_that_is_planned_is_memory_that_is_taken(
    backend: CpuBackend, weights: Weights
) -> None:
    settings = SamplingParams(max_tokens=MAX_TOKENS, repetition_penalty=1.1)
    made = generator_with(weights, backend, kernels_named("native"), settings)
    vocabulary = Vocabulary(0, VOCAB, VOCAB)
    shape = LocalModelShape(2, 32, 48, Heads(4, 2, 8), vocabulary, 1e-6, tp_size=1, tp_rank=0)
    planned = KVCacheSizes.of(room_of(16, GROUP), shape, True)
    num_bytes = planned.num_bytes("float32")
    assert sum(pool.num_bytes for pool in made.pools["kv_cache"]) == num_bytes
    assert made.memory_bytes() == num_bytes + made.weights.num_bytes
    assert num_bytes > 2 * 2 * 16 * room_of(16, GROUP, MAX_PROMPT).positions * 4
