"""The samplers against the definition, and against what they should be whatever computes them: the plain graph, and the
kernels for one rank and for ranks that share the vocabulary.

sampling_oracle.py is the definition. Does not prove that real ranks gather what these are given side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sampling_oracle as oracle
from mindspore import Tensor
from scipy.stats import chi2
from slots_by_hand import HIDDEN, Ranks

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import library
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.rollout.embedded import sampling
from mindgrpo.rollout.embedded.sampling import Candidates
from mindgrpo.rollout.noise import ROLLOUT, gumbel, position_keys, sample_keys

ROWS, VOCAB = 128, 67
PLAIN = SamplingParams(stop_ids=(3, 40))

Drawn = tuple[np.ndarray, np.ndarray]
Draw = Callable[..., Drawn]

WITH_C = pytest.mark.skipif(library.library_path() is None, reason="no C compiler on this machine")
KINDS = [0, *(pytest.param(tp_size, marks=WITH_C) for tp_size in (1, 2, 4))]


class Sampler:
    """The graph of one rank and what the host makes of it: all logits are candidates where others are not enough."""

    def __init__(self, settings: SamplingParams, vocab: int) -> None:
        others = CpuBackend({}).group((0,)), Kernels()
        self.settings, self.vocab = settings, vocab
        self.some, self.every = (Candidates(settings, vocab, 0, *others, a) for a in (False, True))

    def __call__(
        self, logits: np.ndarray, keys: np.ndarray, banned: np.ndarray, seen: np.ndarray
    ) -> sampling.Drawn:
        """`keys` are those of positions."""
        drawn = self.of(self.some, logits, keys, banned, seen)
        if drawn.is_complete.all():
            return drawn
        return self.of(self.every, logits, keys, banned, seen)

    def of(
        self,
        graph: Candidates,
        logits: np.ndarray,
        keys: np.ndarray,
        banned: np.ndarray,
        seen: np.ndarray,
    ) -> sampling.Drawn:
        inputs = [array.astype(np.float32) for array in (logits, banned, seen)]
        inputs.insert(1, keys.view(np.int32).reshape(-1, 2))
        columns = graph(*map(Tensor, inputs)).asnumpy()
        return sampling.draw(self.settings, columns, keys, self.vocab)


def plain_sampler() -> Draw:
    graphs: dict[SamplingParams, Sampler] = {}

    def call(
        settings: SamplingParams,
        logits: np.ndarray,
        keys: np.ndarray,
        banned: np.ndarray,
        seen: np.ndarray,
    ) -> sampling.Drawn:
        if settings not in graphs:
            graphs[settings] = Sampler(settings, VOCAB)
        keys = position_keys(keys, np.zeros(len(keys), np.int64))
        return graphs[settings](logits, keys, banned, seen)[:2]

    return call


def kernels(tp_size: int) -> Draw:
    made: dict[SamplingParams, Ranks] = {}

    def of(settings: SamplingParams) -> Ranks:
        if settings not in made:
            made[settings] = Ranks(settings, VOCAB, tp_size, ROWS)
        return made[settings]

    def call(
        settings: SamplingParams,
        logits: np.ndarray,
        keys: np.ndarray,
        banned: np.ndarray,
        seen: np.ndarray,
    ) -> sampling.Drawn:
        prompts = [np.flatnonzero(row).astype(np.int32) for row in seen]
        tokens, logps, _ = of(settings).draw(logits, keys, prompts)
        if settings.min_tokens:
            free = replace(settings, min_tokens=0)
            others = of(free).draw(logits, keys, prompts)
            tokens = np.where(banned > 0, tokens, others[0])
            logps = np.where(banned > 0, logps, others[1])
        return tokens, logps

    return call


@pytest.fixture(scope="module", params=KINDS, ids=["plain", "one rank", "two ranks", "four ranks"])
def draw(request: pytest.FixtureRequest) -> Draw:
    """(settings, logits, keys, banned, seen) -> tokens, log-probs; one graph for each settings."""
    return kernels(request.param) if request.param else plain_sampler()


def case(seed: int) -> tuple[np.ndarray, ...]:
    """(logits, keys, banned, seen) of ROWS rows."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (ROWS, VOCAB)).astype(np.float32)
    banned = (np.arange(ROWS) % 2).astype(np.float32)
    seen = (rng.random((ROWS, VOCAB)) < 0.3).astype(np.float32)
    return logits, rng.integers(0, 2**64, ROWS, np.uint64), banned, seen


def reference(settings: SamplingParams, *arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    drawn = [
        oracle.draw(settings, logits, int(key), float(banned), seen)
        for logits, key, banned, seen in zip(*arrays, strict=True)
    ]
    tokens, logps = zip(*drawn, strict=True)
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
    "top_k_and_top_p": replace(PLAIN, top_k=12, top_p=0.8),
    "top_k_and_min_p": replace(PLAIN, top_k=30, min_p=0.2),
    "all_but_top_k": SamplingParams(
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
    "everything": SamplingParams(
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


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "top_k_and_top_p", "all_but_top_k"])
def test_candidates_that_are_too_few_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one candidate beyond top-k, and four where only a mass says how many are kept; many logits are equal."""
    monkeypatch.setattr(sampling, "SPARE", 1)
    monkeypatch.setattr(sampling, "BY_MASS", 4)
    settings = SETTINGS[name]
    sampler = Sampler(settings, VOCAB)
    for seed in (0, 1):
        logits, keys, banned, seen = case(seed)
        logits = np.round(logits * 2) / 2
        at_first = position_keys(keys, np.zeros(ROWS, np.int64))
        tokens, logps, is_complete = sampler.of(sampler.some, logits, at_first, banned, seen)
        expected_tokens, expected_logps = reference(settings, logits, keys, banned, seen)
        assert is_complete.any()
        if name in ("top_k", "top_p", "top_k_and_top_p"):
            assert not is_complete.all()
        np.testing.assert_array_equal(tokens[is_complete], expected_tokens[is_complete])
        np.testing.assert_allclose(logps[is_complete], expected_logps[is_complete], atol=1e-5)
        all_tokens = sampler(logits, at_first, banned, seen).tokens
        np.testing.assert_array_equal(all_tokens, expected_tokens)


FEW, LONGEST = 24, 1024
FREE = SamplingParams()
OFTEN = {
    "plain": FREE,
    "top_k": replace(FREE, top_k=5),
    "top_p": replace(FREE, top_p=0.7),
    "min_p": replace(FREE, min_p=0.1),
    "all": replace(FREE, top_k=12, top_p=0.9, min_p=0.02, min_tokens=LONGEST, stop_ids=(3, 9)),
}


def few_logits() -> np.ndarray:
    return np.random.default_rng(4).normal(0, 1.5, FEW).astype(np.float32)


def drawn_by_kernels(
    settings: SamplingParams, logits: np.ndarray, positions: int = LONGEST
) -> np.ndarray:
    """int32 [LONGEST samples, positions]."""
    ranks = Ranks(settings, FEW, 1, LONGEST, hidden=16)
    return ranks.draw_many(logits[None], sample_keys(0, ROLLOUT, 0, range(LONGEST)), positions)


@WITH_C
@pytest.mark.parametrize("name", OFTEN)
def test_of_a_million_draws_every_token_has_its_share(name: str) -> None:
    """Chi-square against the exact distribution, over positions and samples as a run numbers them."""
    settings, logits = OFTEN[name], few_logits()
    counts = np.bincount(drawn_by_kernels(settings, logits).reshape(-1), minlength=FEW)
    assert counts.sum() == LONGEST**2 > 1e6
    p = oracle.distribution(settings, logits, 1.0, np.zeros(FEW))
    assert not counts[p == 0].any() and (p > 0).sum() > 2
    counts, expected = counts[p > 0], p[p > 0] * counts.sum()
    assert expected.min() > 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert chi2.sf(statistic, len(counts) - 1) > 1e-3


@WITH_C
def test_the_graph_numbers_its_draws_as_the_kernels_do() -> None:
    """Each draws what the definition does, so a million draws of one of them tell of both."""
    settings, logits, positions = OFTEN["all"], few_logits(), 16
    keys = sample_keys(0, ROLLOUT, 0, range(LONGEST))[:, None]
    keys = position_keys(keys, np.arange(positions)[None]).reshape(-1)
    every, banned = np.tile(logits, (len(keys), 1)), np.ones(len(keys))
    drawn = Sampler(settings, FEW)(every, keys, banned, every).tokens
    expected = drawn_by_kernels(settings, logits, positions)
    np.testing.assert_array_equal(drawn.reshape(LONGEST, positions), expected)


@pytest.mark.parametrize("name", ["plain", "top_k", "greedy"])
def test_huge_logits_and_impossible_tokens_give_finite_log_probs(draw: Draw, name: str) -> None:
    logits, keys, banned, seen = case(6)
    logits[:, ::2] = -1e30
    logits[:, 1] = 500.0
    tokens, logps = draw(SETTINGS[name], logits, keys, banned, seen)
    np.testing.assert_array_equal(tokens, 1)
    np.testing.assert_allclose(logps, 0.0, atol=1e-5)


def test_the_likeliest_of_equal_tokens_is_the_first(draw: Draw) -> None:
    logits, keys, banned, seen = case(7)
    logits[:, [9, 20, 66]] = 50.0
    tokens, logps = draw(SETTINGS["greedy"], logits, keys, banned, seen)
    np.testing.assert_array_equal(tokens, 9)
    np.testing.assert_allclose(logps, -np.log(3), atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p"])
def test_of_equal_scores_the_lowest_token_is_drawn(draw: Draw, name: str) -> None:
    """Beside 1e9 the noise is less than half a unit in the last place."""
    logits, keys, banned, seen = case(7)
    logits[:, 9:] = 1e9
    tokens, _ = draw(SETTINGS[name], logits, keys, banned, seen)
    np.testing.assert_array_equal(tokens, 9)


def test_ties_at_the_border_of_top_k_are_all_kept(draw: Draw) -> None:
    logits, keys, banned, seen = case(8)
    logits[:] = -20.0
    logits[:, :4] = 5.0
    logits[:, 10:14] = 4.0
    tokens, _ = draw(SETTINGS["top_k"], logits, keys, banned, seen)
    assert set(tokens) == {0, 1, 2, 3, 10, 11, 12, 13}


@pytest.mark.parametrize("name", ["top_k_ties", "top_p_ties"])
def test_ties_count_for_top_p_as_they_are_kept(draw: Draw, name: str) -> None:
    """40 equal logits at the border of top-k 5: top-p 0.3 of all that is kept, not of five."""
    top_k = 5 if name == "top_k_ties" else 0
    settings = replace(PLAIN, top_k=top_k, top_p=0.3, stop_ids=())
    logits, *others = case(8)
    logits[:] = -20.0
    logits[:, :2] = 4.5
    logits[:, 20:60] = 4.0
    tokens, _ = draw(settings, logits, *others)
    expected, _ = reference(settings, logits, *others)
    np.testing.assert_array_equal(tokens, expected)
    assert {0, 1} < set(tokens) <= {0, 1, *range(20, 60)}


def test_stop_ids_are_drawn_again_once_they_are_no_longer_banned(draw: Draw) -> None:
    logits, keys, _, seen = case(9)
    logits[:, [3, 40]] = 30.0
    settings = SETTINGS["min_tokens"]
    banned_tokens, _ = draw(settings, logits, keys, np.ones(ROWS), seen)
    free_tokens, _ = draw(settings, logits, keys, np.zeros(ROWS), seen)
    assert not set(banned_tokens) & {3, 40}
    assert set(free_tokens) == {3, 40}


def rows_of_kernels(settings: SamplingParams, logits: np.ndarray, tp_size: int) -> np.ndarray:
    """The tokens that `tp_size` ranks draw, one for each row of logits, with the same keys whatever `tp_size` is."""
    rows, vocab = logits.shape
    keys = sample_keys(3, ROLLOUT, 0, range(rows))
    prompts = [np.zeros(1, np.int32)] * HIDDEN
    ranks = Ranks(settings, vocab, tp_size, HIDDEN)
    batches = [slice(i, i + HIDDEN) for i in range(0, rows, HIDDEN)]
    return np.concatenate([ranks.draw(logits[b], keys[b], prompts)[0] for b in batches])


SHAPES: dict[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "flat": lambda rng, shape: rng.normal(0, 1, shape),
    "peaked": lambda rng, shape: rng.normal(0, 6, shape),
    "one value": lambda rng, shape: np.zeros(shape),
    "far from zero": lambda rng, shape: rng.normal(3000, 2, shape),
    "steps": lambda rng, shape: np.round(rng.normal(0, 2, shape)),
    "a few tokens": lambda rng, shape: np.where(rng.random(shape) < 0.002, 8.0, -1e30),
}


@WITH_C
@pytest.mark.parametrize("tp_size", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["plain", "hot", "min_p"])
def test_no_block_that_needs_no_noise_has_the_winner(name: str, shape: str, tp_size: int) -> None:
    """Against the noise of every token, over a vocabulary of many blocks with a last one that is not full."""
    settings = replace(SETTINGS[name], stop_ids=())
    logits = SHAPES[shape](np.random.default_rng(5), (512, 5000)).astype(np.float32)
    tokens = rows_of_kernels(settings, logits, tp_size)
    keys = position_keys(sample_keys(3, ROLLOUT, 0, range(512)), np.zeros(512, np.int64))
    x = logits * np.float32(1 / settings.trainer_temperature)
    kept = x >= x.max(axis=1, keepdims=True) + np.log(np.float32(settings.min_p or 1e-30))
    scores = np.where(kept, x + gumbel(keys, 0, 5000), -np.inf)
    np.testing.assert_array_equal(tokens, scores.argmax(axis=1))


@WITH_C
@pytest.mark.parametrize(
    ("name", "scale"), [("plain", 1.0), ("top_k", 1.0), ("top_p", 6.0), ("min_p", 6.0)]
)
def test_layouts_draw_the_same_tokens_of_a_real_vocabulary(name: str, scale: float) -> None:
    """Each layout's logits differ from another's by rounding, here taken as up to 3e-6 of each logit.

    Two scores lie within that of each other once in some 20,000 draws; the inverse of the cumulative distribution
    changes one token of 400, so some 4 of these.
    """
    rng = np.random.default_rng(11)
    settings = replace(SETTINGS[name], stop_ids=())
    logits = rng.normal(0, scale, (512, 49152)).astype(np.float32)
    alone = rows_of_kernels(settings, logits, 1)
    assert len(set(alone.tolist())) > 400
    different = 0
    for tp_size in (2, 3, 4):
        rounding = rng.uniform(-3e-6, 3e-6, logits.shape).astype(np.float32)
        others = rows_of_kernels(settings, logits + logits * rounding, tp_size)
        different += (others != alone).sum()
    assert different <= 1


@WITH_C
@pytest.mark.parametrize("name", ["plain", "top_k_and_top_p", "top_p_and_min_p"])
def test_a_library_for_another_processor_draws_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logits = np.random.default_rng(2).normal(0, 2, (1024, 5000)).astype(np.float32)
    here = rows_of_kernels(SETTINGS[name], logits, 1)
    flags = [flag for flag in library.FLAGS if flag not in ("-O3", "-march=native")]
    monkeypatch.setattr(library, "FLAGS", (*flags, "-O1", "-march=x86-64", "-Wno-psabi"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    caches = (library.library_path, library.library)
    try:
        for cached in caches:
            cached.cache_clear()
        there = rows_of_kernels(SETTINGS[name], logits, 1)
    finally:
        for cached in caches:
            cached.cache_clear()
    np.testing.assert_array_equal(there, here)
