"""A generator draws by other settings than it was made with: as one made with them would, in the graphs it has.

Does not prove that a setting is right (test_sampling.py does) nor anything about several ranks' graphs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from slots_by_hand import Ranks
from small_generators import (
    KERNELS,
    MAX_TOKENS,
    SETTINGS,
    VOCAB,
    WITH_C,
    assert_same,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
    run,
    run_by,
)

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.weights.local_weights import Weights

OTHERS = {
    "greedy": replace(SETTINGS, temperature=0.0),
    "hot": replace(SETTINGS, temperature=1.4),
    "top_p": replace(SETTINGS, top_p=0.7),
    "stops": replace(SETTINGS, stop_ids=(9, 30, 31), min_tokens=3),
}
# Made with these, a generator has all columns that any other rules need.
WIDE = replace(SETTINGS, top_p=0.8, min_p=0.05, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@pytest.fixture(scope="module")
def weights(backend: CpuBackend) -> Weights:
    return random_weights(backend)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "greedy"),
        pytest.param("native", "greedy", marks=WITH_C),
        pytest.param("native", "top_p", marks=WITH_C),
    ],
)
def test_what_is_drawn_is_what_a_generator_of_these_settings_draws(
    backend: CpuBackend, weights: Weights, kind: str, name: str
) -> None:
    kernels: Kernels = kernels_named(kind)
    one = generator_with(weights, backend, kernels)
    other = generator_with(weights, backend, kernels, OTHERS[name])
    before = run(one, requests_of())
    assert_same(run_by(one, OTHERS[name], requests_of()), run(other, requests_of()), atol=0)
    assert_same(run(one, requests_of()), before, atol=0)


@pytest.mark.parametrize("kind", KERNELS)
def test_settings_that_need_room_the_generator_has_not_are_refused(
    backend: CpuBackend, weights: Weights, kind: str
) -> None:
    made = generator_with(weights, backend, kernels_named(kind))
    with pytest.raises(ValueError, match="penalty"):
        run_by(made, replace(SETTINGS, repetition_penalty=1.1), requests_of())
    with pytest.raises(ValueError, match=f"{MAX_TOKENS + 1} tokens"):
        run_by(made, replace(SETTINGS, max_tokens=MAX_TOKENS + 1), requests_of())


@WITH_C
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("made_with", ["plain", "wide", "top_k"])
def test_greedy_takes_the_first_of_the_largest_on_whichever_rank_it_is(
    tp_size: int, made_with: str
) -> None:
    """Rows with one largest logit, and with several that lie on different ranks, in slots made for other rules."""
    made = {"plain": SETTINGS, "wide": WIDE, "top_k": replace(SETTINGS, top_k=7, top_p=0.5)}
    rows = 64
    rng = np.random.default_rng(tp_size)
    logits = rng.standard_normal((rows, VOCAB)).astype(np.float32)
    logits[::2] = np.round(logits[::2])  # many ties
    prompts = [np.array([1], np.int32)] * rows
    ranks = Ranks(replace(made[made_with], stop_ids=()), VOCAB, tp_size, rows)
    greedy = SamplingParams(temperature=0.0, stop_ids=())
    tokens, logps, _ = ranks.draw(logits, np.arange(rows, dtype=np.uint64), prompts, greedy)
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logps, exact.max(axis=1), rtol=0, atol=1e-5)
