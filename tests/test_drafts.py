"""Rows that check guesses, in both decoders: the same tokens, log-probs and routes whatever is guessed.

On one rank with MindSpore's own kernels. Does not prove what an NPU's rows cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
import small_runs
from small_generators import KERNELS, PRECISIONS, kernels_named
from small_mixtures import MIXTURES
from tables import each_row

from mindgrpo.algorithm.sample import Request, Sample
from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded import plain, slots
from mindgrpo.rollout.embedded.drafts import DraftHistory, Drafts, PromptTexts
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.weights.pretrained import fill_random

MODEL = small_runs.MODEL | {"vocab_size": 67, "num_hidden_layers": 2}


def mixture(family: str) -> dict[str, Any]:
    return {"model_type": family, **MIXTURES[family]}


MAX_TOKENS, SLOTS, GROUP = 24, 4, 4
PROMPTS = [np.arange(3, 3 + n, dtype=np.int32) for n in (5, 9, 17)]


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    made = connect(SHARED_MEMORY, {}, RuntimeSettings())
    yield made
    made.close()


@pytest.fixture(params=[*KERNELS, *PRECISIONS])
def kernels(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def engine_of(
    backend: Backend,
    kernels: str,
    sampling: SamplingParams,
    draft_rows: int | Literal["auto"],
    **raw: Any,
) -> EmbeddedEngine:
    config = decoder_config({**MODEL, **raw}, "here")
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    cache = KVCacheConfig(
        SLOTS, GROUP, len(PROMPTS), 20, MAX_TOKENS, draft_rows=draft_rows, draft_history=1 << 20
    )
    engine = EmbeddedEngine(
        config, layout, backend, sampling, cache, kernels_named(kernels), bool(config.moe)
    )
    engine.publish(lambda: fill_random(engine.weights, 0, 0.3), 0)
    return engine


def draw(engine: EmbeddedEngine, sampling: SamplingParams, step: int = 0) -> list[Sample]:
    limits = MAX_TOKENS, 7, 1, 15
    requests = [
        Request(prompt, tuple(range(GROUP * i, GROUP * i + GROUP)), limits if i else None)
        for i, prompt in enumerate(PROMPTS)
    ]
    return engine.generate(requests, sampling, SeedKey(0, ROLLOUT, step), 0)


def assert_same(made: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(made, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logps, other.logps, atol=2e-6)
        assert one.arrays.keys() == other.arrays.keys()
        for name, values in one.arrays.items():
            if name != "logps":
                np.testing.assert_array_equal(np.asarray(values), np.asarray(other.arrays[name]))


@each_row(
    ("what", "sampling", "raw"),
    [
        ("temperature 1", {}, {}),
        ("temperature 0.3", {"temperature": 0.3}, {}),
        ("greedy", {"temperature": 0.0}, {}),
        ("top-k", {"top_k": 5}, {}),
        ("top-p", {"top_p": 0.7}, {}),
        ("min-p", {"min_p": 0.1}, {}),
        ("stops", {"temperature": 0.5, "stop_ids": (7, 11, 20, 33)}, {}),
        ("at least", {"temperature": 0.5, "stop_ids": (7, 11, 20, 33), "min_tokens": 9}, {}),
        ("experts", {"temperature": 0.5}, mixture("qwen3_moe")),
        ("latents", {"temperature": 0.5}, mixture("deepseek_v3")),
    ],
)
def test_guesses_change_nothing_but_the_steps(
    backend: Backend, kernels: str, what: str, sampling: dict[str, Any], raw: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, **sampling)
    without, *both = (engine_of(backend, kernels, params, rows, **raw) for rows in (0, "auto", 6))
    for step in (0, 1):
        expected = draw(without, params, step)
        assert without.stats.drafted == 0
        for drafting in both:
            assert_same(draw(drafting, params, step), expected)
            assert drafting.stats.steps <= without.stats.steps
            assert 0 <= drafting.stats.accepted <= drafting.stats.drafted


class Told(Drafts):
    """Guesses from what samples say in the end, spoilt or not."""

    completions: list[list[int]] = []
    spoil: Any = None

    def guess(self, sample: int, count: int) -> list[int]:
        made = self._read[sample]
        return [self.spoil(token) for token in self.completions[sample][made : made + count]]


@pytest.mark.parametrize("kind", ["right", "wrong", "random"])
def test_right_wrong_and_random_guesses_give_the_tokens_without(
    backend: Backend, kernels: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_ids=(7, 11))
    without, drafting = (engine_of(backend, kernels, params, rows) for rows in (0, 12))
    expected = draw(without, params)
    rng = np.random.default_rng(0)
    spoils = {
        "right": lambda token: token,
        "wrong": lambda token: (token + 1) % 67,
        "random": lambda token: token if rng.random() < 0.5 else (token + 1) % 67,
    }
    monkeypatch.setattr(Told, "completions", [s.tokens.tolist() for s in expected])
    monkeypatch.setattr(Told, "spoil", staticmethod(spoils[kind]))
    for module in (plain, slots):
        monkeypatch.setattr(module, "Drafts", Told)
    assert_same(draw(drafting, params), expected)
    stats = drafting.stats
    assert stats.drafted > 0
    if kind == "right":
        # A guessed stop is right, and its own row is dropped.
        assert stats.drafted - stats.accepted <= len(expected)
        assert 2 * stats.steps < without.stats.steps
    elif kind == "wrong":
        assert stats.accepted == 0 and stats.steps == without.stats.steps


def test_the_last_epochs_completions_are_guessed_again(backend: Backend, kernels: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    engine = engine_of(backend, kernels, params, 8)
    draw(engine, params, 0)
    first = engine.stats
    draw(engine, params, 1)
    assert engine.stats.steps < first.steps
    assert engine.stats.accepted > first.accepted


def test_texts_guess_what_followed_the_longest_match_last() -> None:
    texts = PromptTexts(np.array([1, 2], np.int32))
    first, second = texts.open([5, 6]), texts.open()
    texts.extend(first, [7, 8])
    # Two of the prompt, and what is behind it, a token at a time.
    assert [texts.index(1) for _ in range(8)] == [1] * 6 + [0] * 2
    assert texts.guess(second, 3) == [5, 6, 7]
    texts.extend(second, [5, 6])
    assert texts.guess(second, 9) == [7, 8]
    texts.extend(second, [9])
    texts.index(9)
    assert texts.guess(second, 2) == []


def test_a_history_forgets_the_oldest_prompts() -> None:
    history = DraftHistory(100)
    prompts = [np.full(4, i, np.int32) for i in range(3)]
    for prompt in prompts:
        history.keep(prompt, [np.arange(6, dtype=np.int32)])
    assert [len(history.of(prompt)) for prompt in prompts] == [0, 1, 1]
