"""Conversations that go on from keys in the cache: the tokens and log-probs of those whose prompts are computed again.

One process, random weights, C kernels. Several ranks: the distributed case "tools".
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_generators import (
    CONFIG,
    GROUP,
    LAYOUT,
    MAX_PROMPT,
    MAX_TOKENS,
    SETTINGS,
    VERSION,
    VOCAB,
    WITH_C,
    kernels_named,
    random_weights,
    requests_of,
)

from mindgrpo.algorithm.sample import Request, Sample
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.rollout.embedded import slots as kept_module
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.weights.local_weights import Weights

pytestmark = WITH_C
TURN, LONGEST = 3, MAX_PROMPT + MAX_TOKENS


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@pytest.fixture(scope="module")
def weights(backend: CpuBackend) -> Weights:
    return random_weights(backend)


def engine(
    backend: CpuBackend,
    weights: Weights,
    sampling: SamplingParams,
    goes_on: bool,
    slots: int = 32,
    draft_rows: int = 0,
) -> EmbeddedEngine:
    room = KVCacheConfig(slots, GROUP, None, LONGEST, MAX_TOKENS, goes_on, draft_rows, 1 << 16)
    made = EmbeddedEngine(CONFIG, LAYOUT, backend, sampling, room, kernels_named("native"))

    def copy() -> None:
        pairs = zip(made.weights.arrays.flat_buffers, weights.arrays.flat_buffers, strict=True)
        for target, source in pairs:
            target[...] = source

    made.publish(copy, VERSION)
    return made


def after(completion: Sample, turn: int) -> list[int]:
    """What is written between two turns: none to two tokens, a function of the turn before."""
    number = int(completion.tokens[-1]) + turn
    return [1 + (number + i) % (VOCAB - 1) for i in range(number % 3)]


def converse(made: EmbeddedEngine) -> tuple[list[list[Sample]], list[int]]:
    """The completions of each round, and the prompt tokens that were computed for it; samples drop out."""
    rounds: list[list[Sample]] = []
    computed = []
    requests = [replace(r, max_tokens=(MAX_TOKENS,) * GROUP) for r in requests_of()]
    room = {sample: MAX_TOKENS for r in requests for sample in r.samples}
    prompt_of = {sample: r.prompt for r in requests for sample in r.samples}
    for turn in range(4):
        completions = made.generate(requests, made.sampling, SeedKey(1, 0, 0), VERSION)
        rounds.append(completions)
        computed.append(made.stats.prompt_tokens)
        requests = []
        for one in completions:
            context = [*prompt_of[one.number], *one.tokens.tolist(), *after(one, turn)]
            room[one.number] -= len(context) - len(prompt_of[one.number])
            prompt_of[one.number] = np.array(context, np.int32)
            if room[one.number] > 0 and one.number % 5 != turn:
                limits = (room[one.number],)
                requests.append(Request(prompt_of[one.number], (one.number,), limits, turn + 1))
    return rounds, computed


@pytest.mark.parametrize("draft_rows", [0, 9])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3, "min_tokens": 1},
        {"top_k": 9},
        {"top_p": 0.8},
        {"temperature": 0.0},
    ],
    ids=lambda changed: " ".join(changed) or "plain",
)
def test_a_conversation_from_kept_keys_is_the_one_that_is_computed_again(
    backend: CpuBackend,
    weights: Weights,
    settings: dict[str, float],
    draft_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_module, "FULL_STEP_ROWS", 1)  # also where few go on
    # Every other token ends a turn.
    sampling = replace(SETTINGS, stop_ids=tuple(range(0, VOCAB, 2)), **settings)
    kept, again = (
        engine(backend, weights, sampling, True, draft_rows=draft_rows),
        engine(backend, weights, sampling, False),
    )
    (ours, computed), (expected, _) = converse(kept), converse(again)
    assert computed[0] > 0 and computed[1:] == [0] * 3
    assert len(expected[1]) > 3 and expected[2]
    for round_, other in zip(ours, expected, strict=True):
        for one, two in zip(round_, other, strict=True):
            assert (one.number, one.finish_reason) == (two.number, two.finish_reason)
            np.testing.assert_array_equal(one.tokens, two.tokens)
            np.testing.assert_array_equal(one.logps, two.logps)


def test_with_fewer_slots_than_samples_prompts_are_computed_again(
    backend: CpuBackend, weights: Weights
) -> None:
    sampling = replace(SETTINGS, stop_ids=tuple(range(0, VOCAB, 2)))
    few, many = (engine(backend, weights, sampling, True, slots) for slots in (8, 32))
    (ours, computed), (expected, _) = converse(few), converse(many)
    assert computed[1] > 0
    for round_, other in zip(ours, expected, strict=True):
        for one, two in zip(round_, other, strict=True):
            np.testing.assert_array_equal(one.tokens, two.tokens)


def test_keys_of_other_weights_or_of_another_text_are_not_used(
    backend: CpuBackend, weights: Weights
) -> None:
    sampling = replace(SETTINGS, stop_ids=tuple(range(0, VOCAB, 2)))
    made = engine(backend, weights, sampling, True)
    for change in ("weights", "text"):
        requests = [replace(r, max_tokens=(TURN,) * GROUP) for r in requests_of()]
        completions = made.generate(requests, sampling, SeedKey(1, 0, 0), VERSION)
        prompts = [r.prompt for r in requests for _ in r.samples]
        further = []
        for prompt, one in zip(prompts, completions, strict=True):
            tokens = one.tokens if change == "weights" else (one.tokens + 1) % VOCAB
            context = np.concatenate([prompt, tokens]).astype(np.int32)
            further.append(Request(context, (one.number,), (2,), turn=1))
        if change == "weights":
            made.publish(lambda: None, VERSION)
        made.generate(further, sampling, SeedKey(1, 0, 0), VERSION)
        assert made.stats.prompt_tokens == sum(len(request.prompt) for request in further)
