"""The samplers against numpy, from the definitions of each rule, in float64: the plain graph, and the kernels for one
rank and for ranks that share the vocabulary.

Does not prove that real ranks gather what these are given side by side, nor that the noise is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from mindspore import Tensor
from slots_by_hand import Ranks

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.rollout.embedded.sampling import Sampler
from mindgrpo.rollout.sampling_params import SamplingSettings

ROWS, VOCAB = 128, 67
PLAIN = SamplingSettings(stop_ids=(3, 40))

Drawn = tuple[np.ndarray, np.ndarray]
Draw = Callable[..., Drawn]


WITHOUT_C = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")
KINDS = [0, *(pytest.param(ways, marks=WITHOUT_C) for ways in (1, 2, 4))]


def plain_sampler() -> Draw:
    backend = CpuBackend({}, "shared_memory")
    graphs: dict[SamplingSettings, Sampler] = {}

    def call(settings: SamplingSettings, *arrays: np.ndarray) -> Drawn:
        if settings not in graphs:
            graphs[settings] = Sampler(settings, VOCAB, 0, backend.group((0,)))
        tokens, logps = graphs[settings](*(Tensor(a.astype(np.float32)) for a in arrays))
        return tokens.asnumpy(), logps.asnumpy()

    return call


def kernels(ways: int) -> Draw:
    made: dict[SamplingSettings, Ranks] = {}

    def of(settings: SamplingSettings) -> Ranks:
        if settings not in made:
            made[settings] = Ranks(settings, VOCAB, ways, ROWS)
        return made[settings]

    def call(
        settings: SamplingSettings,
        logits: np.ndarray,
        uniforms: np.ndarray,
        banned: np.ndarray,
        seen: np.ndarray,
    ) -> Drawn:
        prompts = [np.flatnonzero(row).astype(np.int32) for row in seen]
        tokens, logps, _ = of(settings).draw(logits, uniforms.astype(np.float32), prompts)
        if settings.min_tokens:
            free = replace(settings, min_tokens=0)
            others = of(free).draw(logits, uniforms.astype(np.float32), prompts)
            tokens = np.where(banned > 0, tokens, others[0])
            logps = np.where(banned > 0, logps, others[1])
        return tokens, logps

    return call


@pytest.fixture(scope="module", params=KINDS, ids=["plain", "one rank", "two ranks", "four ranks"])
def draw(request: pytest.FixtureRequest) -> Draw:
    """(settings, logits, uniforms, banned, seen) -> tokens, log-probs; one graph for each settings."""
    return kernels(request.param) if request.param else plain_sampler()


def case(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    banned = (np.arange(ROWS) % 2).astype(np.float32)
    seen = (rng.random((ROWS, VOCAB)) < 0.3).astype(np.float32)
    return logits, rng.random(ROWS).astype(np.float32), banned, seen


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def distribution(
    settings: SamplingSettings, logits: np.ndarray, banned: float, seen: np.ndarray
) -> np.ndarray:
    """What one token is drawn from: penalty, temperature, ban, top-k, top-p, min-p, in this order."""
    x = logits.astype(np.float64)
    penalised = np.where(x > 0, x / settings.repetition_penalty, x * settings.repetition_penalty)
    x = np.where(seen > 0, penalised, x) / settings.trainer_temperature
    if banned and settings.min_tokens:
        x[list(settings.stop_ids)] = -np.inf
    if settings.top_k and settings.top_k < len(x):
        x[x < np.sort(x)[-settings.top_k]] = -np.inf
    p = np.exp(log_softmax(x))
    if settings.top_p < 1:
        values, where = np.unique(x, return_inverse=True)
        mass = np.bincount(where, p)
        above = mass[::-1].cumsum()[::-1] - mass
        p[(above >= settings.top_p)[where]] = 0.0
        p /= p.sum()
    p[p < settings.min_p * p.max()] = 0.0
    if settings.temperature == 0:
        p = (np.arange(len(p)) == p.argmax()).astype(np.float64)
    return p / p.sum()


def reference(settings: SamplingSettings, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    tokens, logps = [], []
    for logits, uniform, banned, seen in zip(*arrays, strict=True):
        p = distribution(settings, logits, float(banned), seen)
        token = int(np.argmax(np.cumsum(p) > float(uniform)))
        tokens.append(token)
        logps.append(log_softmax(logits.astype(np.float64) / settings.trainer_temperature)[token])
    return np.array(tokens), np.array(logps)


SETTINGS = {
    "plain": PLAIN,
    "cold": replace(PLAIN, temperature=0.6),
    "hot": replace(PLAIN, temperature=1.7),
    "top_k": replace(PLAIN, top_k=5),
    "top_k_1": replace(PLAIN, top_k=1),
    "top_k_above_the_vocabulary": replace(PLAIN, top_k=500),
    "top_p": replace(PLAIN, top_p=0.7),
    "top_p_tiny": replace(PLAIN, top_p=1e-6),
    "min_p": replace(PLAIN, min_p=0.1),
    "penalty": replace(PLAIN, repetition_penalty=1.4),
    "top_p_and_min_p": replace(PLAIN, top_p=0.9, min_p=0.05),
    "top_k_and_min_p": replace(PLAIN, top_k=30, min_p=0.2),
    "all_but_top_k": SamplingSettings(
        temperature=0.9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        min_tokens=2,
        stop_ids=(3, 40),
    ),
    "min_tokens": replace(PLAIN, min_tokens=2, temperature=2.0),
    "greedy": replace(PLAIN, temperature=0.0),
    "greedy_penalty": replace(PLAIN, temperature=0.0, repetition_penalty=2.0, min_tokens=2),
    "everything": SamplingSettings(
        temperature=0.9,
        top_k=20,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        min_tokens=2,
        stop_ids=(3, 40),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_token_and_log_prob_is_that_of_the_definition(draw: Draw, name: str) -> None:
    settings = SETTINGS[name]
    for seed in (0, 1):
        arrays = case(seed)
        tokens, logps = draw(settings, *arrays)
        expected_tokens, expected_logps = reference(settings, *arrays)
        np.testing.assert_array_equal(tokens, expected_tokens)
        np.testing.assert_allclose(logps, expected_logps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "hot", "top_k", "top_p", "min_p", "everything"])
def test_an_even_grid_of_uniforms_draws_every_token_as_often_as_its_probability(
    draw: Draw, name: str
) -> None:
    settings = SETTINGS[name]
    logits, _, _, seen = case(4)
    grid = ((np.arange(64 * ROWS) + 0.5) / (64 * ROWS)).astype(np.float32).reshape(64, ROWS)
    counts = np.zeros(VOCAB)
    one_row, one_seen = np.tile(logits[:1], (ROWS, 1)), np.tile(seen[:1], (ROWS, 1))
    for uniforms in grid:
        tokens, _ = draw(settings, one_row, uniforms, np.ones(ROWS), one_seen)
        counts += np.bincount(tokens, minlength=VOCAB)
    p = distribution(settings, logits[0], 1.0, seen[0])
    assert not counts[p == 0].any()
    # A token owns one interval of uniforms, so the grid may miss at each end by one point.
    np.testing.assert_allclose(counts, p * grid.size, rtol=0, atol=2)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "everything"])
@pytest.mark.parametrize("uniform", [0.0, float(np.nextafter(np.float32(1), np.float32(0)))])
def test_the_smallest_and_largest_uniform_draw_tokens_that_can_be_drawn(
    draw: Draw, name: str, uniform: float
) -> None:
    settings = SETTINGS[name]
    logits, _, banned, seen = case(5)
    tokens, _ = draw(settings, logits, np.full(ROWS, uniform), banned, seen)
    for row, token in enumerate(tokens):
        p = distribution(settings, logits[row], float(banned[row]), seen[row])
        possible = np.flatnonzero(p)
        if uniform == 0.0:
            assert token == possible[0]
        else:
            assert p[token] > 0


@pytest.mark.parametrize("name", ["plain", "top_k", "greedy"])
def test_huge_logits_and_impossible_tokens_give_finite_log_probs(draw: Draw, name: str) -> None:
    logits, uniforms, banned, seen = case(6)
    logits[:, ::2] = -1e30
    logits[:, 1] = 500.0
    tokens, logps = draw(SETTINGS[name], logits, uniforms, banned, seen)
    np.testing.assert_array_equal(tokens, 1)
    np.testing.assert_allclose(logps, 0.0, atol=1e-5)


def test_the_likeliest_of_equal_tokens_is_the_first(draw: Draw) -> None:
    logits, uniforms, banned, seen = case(7)
    logits[:, [9, 20, 66]] = 50.0
    tokens, logps = draw(SETTINGS["greedy"], logits, uniforms, banned, seen)
    np.testing.assert_array_equal(tokens, 9)
    np.testing.assert_allclose(logps, -np.log(3), atol=1e-5)


def test_ties_at_the_border_of_top_k_are_all_kept(draw: Draw) -> None:
    logits, _, banned, seen = case(8)
    logits[:] = -20.0
    logits[:, :4] = 5.0
    logits[:, 10:14] = 4.0
    uniforms = (np.arange(ROWS) + 0.5) / ROWS
    tokens, _ = draw(SETTINGS["top_k"], logits, uniforms, banned, seen)
    assert set(tokens) == {0, 1, 2, 3, 10, 11, 12, 13}


@pytest.mark.parametrize("name", ["top_k_ties", "top_p_ties"])
def test_ties_count_for_top_p_as_they_are_kept(draw: Draw, name: str) -> None:
    """40 equal logits at the border of top-k 5: top-p 0.3 of all that is kept, not of five."""
    top_k = 5 if name == "top_k_ties" else 0
    settings = replace(PLAIN, top_k=top_k, top_p=0.3, stop_ids=())
    logits, _, banned, seen = case(8)
    logits[:] = -20.0
    logits[:, :2] = 4.5
    logits[:, 20:60] = 4.0
    uniforms = (np.arange(ROWS) + 0.5) / ROWS
    tokens, _ = draw(settings, logits, uniforms, banned, seen)
    expected, _ = reference(settings, logits, uniforms, banned, seen)
    np.testing.assert_array_equal(tokens, expected)
    assert {0, 1} < set(tokens) <= {0, 1, *range(20, 60)}


def test_stop_ids_are_drawn_again_once_they_are_no_longer_banned(draw: Draw) -> None:
    logits, uniforms, _, seen = case(9)
    logits[:, [3, 40]] = 30.0
    settings = SETTINGS["min_tokens"]
    banned_tokens, _ = draw(settings, logits, uniforms, np.ones(ROWS), seen)
    free_tokens, _ = draw(settings, logits, uniforms, np.zeros(ROWS), seen)
    assert not set(banned_tokens) & {3, 40}
    assert set(free_tokens) == {3, 40}
