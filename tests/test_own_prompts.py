"""Environments that give the samples of a group different prompts, from `reset` to the gradient.

The class is called in this process, the engine draws, and what is trained is compared with a model and a loss in NumPy.
Does not prove that environments live in processes of their own, nor anything of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from algorithms import advantages_of, loss_of
from data_sets import MODEL as FOLDER
from distributed.scripted_turns import AnyEnd
from four_turns import numpy_loss
from numpy_model import log_probs
from small_runs import MODEL

from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import FAILED, Request, Rollout, Sample, TrainBatch
from mindgrpo.algorithm.train_batch import compute_advantages
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.shapes import AdamWSettings, SamplingParams
from mindgrpo.data.prompts import PromptForm
from mindgrpo.data.tokenizer import load_tokenizer
from mindgrpo.data.turns import TurnSuffix
from mindgrpo.environments.contract import Opening, Question, Result
from mindgrpo.environments.pool import Episode
from mindgrpo.grpo.scoring import RolloutScorer
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rewards.scores import Scores
from mindgrpo.rollout.conversations import Conversations
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.rollout.environment import EnvironmentTurns
from mindgrpo.rollout.replicas import Replicas
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import UpdateReport, update
from mindgrpo.weights.pretrained import fill_random

GROUP, MAX_PROMPT, MAX_TOKENS, ROW = 4, 44, 48, 256
CONFIG = decoder_config(MODEL, "here")
LAYOUT = Layout.of(Mesh(1, 1), parameter_specs(CONFIG))
LOSS = loss_of(beta=0.05)
PACKED, ALONE = MicroShape(1, ROW), MicroShape(1, ROW, 1)
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS, stop_ids=tuple(range(0, 384, 5)))
TEXTS = {
    "of equal lengths": ("up 1", "up 2", "up 1", "up 3"),
    "of other lengths": ("up 1", "go down", "up 1", "a longer way"),
    "with one that fails": ("up 1", None, "up 1", "up 1"),
}
QUESTIONS = ("begin the game", "and another")


class Levels:
    """Begins each conversation of a group with the next of its texts, and pays for the letters of a turn."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts = texts

    def reset(self, row: Mapping[str, Any]) -> str:
        text = self._texts[row["sample"] % GROUP]
        if text is None:
            raise KeyError("no such level")
        return f"{row['question'][0]} {text}"

    def step(self, completion: str) -> tuple[str, float, bool]:
        return "on", len(completion) % 7 / 7, len(completion) % 4 == 0


class Pool:
    """One object a conversation, in this process."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts, self._episodes = texts, dict[int, Episode]()

    def ask(self, questions: Mapping[int, Question], patience: float) -> dict[int, Result]:
        results = {}
        for sample, question in questions.items():
            if isinstance(question, Opening):
                self._episodes[sample] = Episode(lambda _: Levels(self._texts))
                question = Opening({**question.row, "sample": sample}, question.seed)
            results[sample] = self._episodes[sample].answer(question)
        return results

    def end_all(self) -> None:
        self._episodes.clear()

    def close(self) -> None:
        """Nothing was started."""


class OneByOne:
    """An engine that gets every sample as a request of its own, each in a call of its own: nothing is shared."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine, self.requests = engine, list[Request]()

    @property
    def stats(self) -> Any:
        return self._engine.stats

    def generate(self, requests: Sequence[Request], *arguments: Any) -> list[Sample]:
        made: list[Sample] = []
        for request in requests:
            self.requests.append(request)
            limits = request.max_tokens or (MAX_TOKENS,) * len(request.samples)
            for sample, limit in zip(request.samples, limits, strict=True):
                alone = replace(request, samples=(sample,), max_tokens=(limit,))
                made += self._engine.generate([alone], *arguments)
        return made


class NoFunctions:
    """The environment's rewards alone."""

    names = ()

    def num_done(self) -> int:
        return 0

    def begin(self, *samples: Any) -> Callable[[], Scores]:
        return partial(self.score, *samples)

    def score(self, texts: list[str], *_: Any) -> Scores:
        return Scores({}, np.zeros(len(texts), np.float32), np.zeros(len(texts), bool))


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


@dataclass
class Drawn:
    rollout: Rollout
    batch: TrainBatch
    requests: list[Request]


Draw = Callable[..., Drawn]


@pytest.fixture(scope="module")
def draw(backend: CpuBackend) -> Draw:
    tokenizer = load_tokenizer(FOLDER).with_template("qwen")
    suffix: Any = TurnSuffix(tokenizer, role="user")
    # Random weights hardly ever draw the one token that ends a turn of the template.
    suffix.end_id = AnyEnd()
    cache = KVCacheConfig(8, GROUP, None, MAX_PROMPT + MAX_TOKENS, MAX_TOKENS, goes_on=True)
    engine = EmbeddedEngine(CONFIG, LAYOUT, backend, SAMPLING, cache)
    engine.publish(lambda: fill_random(engine.weights, seed=2, scale=0.15), 0)
    rows = [np.array(tokenizer.encode(q), np.int32) for q in QUESTIONS]
    prompts: list[Any] = [
        SimpleNamespace(
            ids=ids, text=q, question="", answer="", columns={}, row={"question": q}, index=0
        )
        for ids, q in zip(rows, QUESTIONS, strict=True)
    ]

    def of(name: str, shares: bool = True) -> Drawn:
        turns = EnvironmentTurns(Pool(TEXTS[name]))
        conversations = Conversations(
            tokenizer, suffix, turns, 2, PromptForm(tokenizer, MAX_PROMPT)
        )
        asked: Any = engine if shares else OneByOne(engine)
        replicas = Replicas(asked, Mesh(1, 1), backend, conversations)
        rollout = replicas.generate(
            prompts,
            GROUP,
            SAMPLING,
            SeedKey(3, 0, 0),
            0,
        )
        scorer = RolloutScorer(NoFunctions(), tokenizer, backend, 1.0)  # type: ignore[arg-type]
        owners = [prompts[g] for g in rollout.group_ids]
        total = scorer.score(rollout, owners).scores.total
        # What the policy gave before, and what the reference gives: beyond both ends of the clip, too.
        noise = np.random.default_rng(5)
        old, reference = (
            [(p + noise.normal(0, 0.2, p.size)).astype(np.float32) for p in rollout.generator_logps]
            for _ in range(2)
        )
        batch, _ = compute_advantages(rollout, total, advantages_of(GROUP), old, reference)
        return Drawn(rollout, batch, getattr(asked, "requests", []))

    return of


@pytest.fixture(scope="module")
def policy_of(backend: CpuBackend) -> Callable[[MicroShape], Policy]:
    made: dict[MicroShape, Policy] = {}
    adamw = AdamWSettings(0.9, 0.95, 1e-8, 0.0)

    def of(shape: MicroShape) -> Policy:
        if shape not in made:
            settings = UpdateSettings(shape, ROW, 1.0, KEEP_ALL, LOSS, 1.0, adamw)
            made[shape] = Policy(CONFIG, LAYOUT, backend, settings)
            fill_random(made[shape].weights, seed=2, scale=0.15)
        return made[shape]

    return of


def gradient_of(
    policy: Policy, batch: TrainBatch, monkeypatch: pytest.MonkeyPatch
) -> tuple[UpdateReport, dict[str, np.ndarray]]:
    """Of one update, which is not applied."""
    policy.clear_gradients()
    monkeypatch.setattr(policy, "apply", lambda norm, lr: None)
    report = update(policy, batch, PackedRollout(batch.rollout), range(len(batch)), 1e-2)
    return report, {n: g.astype(np.float64) for n, g in policy.gradients.arrays.hf_views.items()}


def numpys(weights: Mapping[str, np.ndarray], batch: TrainBatch) -> tuple[list[np.ndarray], float]:
    """Log-probs by sample, each computed by itself, and the loss."""
    rollout = batch.rollout
    pairs = zip(rollout.prompt_ids, rollout.completion_ids, strict=True)
    logps = [log_probs(weights, MODEL, prompt, completion) for prompt, completion in pairs]
    return logps, numpy_loss(LOSS, batch, logps)[0]


@pytest.mark.parametrize("name", TEXTS)
def test_every_sample_is_trained_on_the_prompt_that_it_was_given(
    draw: Draw,
    policy_of: Callable[[MicroShape], Policy],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    batch = draw(name).batch
    rows = PackedRollout(batch.rollout)
    assert max(map(len, rows.rows(PACKED))) > 3 and max(map(len, rows.rows(ALONE))) == 1
    weights = {n: w.astype(np.float64) for n, w in policy_of(ALONE).weights.arrays.hf_views.items()}
    logps, loss = numpys(weights, batch)
    assert np.abs(batch.advantages).max() > 0.5
    for shape in (PACKED, ALONE):
        report, gradient = gradient_of(policy_of(shape), batch, monkeypatch)
        for i, expected in enumerate(logps):
            np.testing.assert_allclose(report.logps[i], expected, rtol=0, atol=2e-5)
        # Terms of both signs cancel nearly.
        assert report.loss == pytest.approx(loss, abs=1e-5)
        size = sum(float((g * g).sum()) for g in gradient.values()) ** 0.5
        draws = np.random.default_rng(0)
        noise = {n: draws.normal(size=g.shape) for n, g in gradient.items()}
        mixed = {n: 3 * g / size + noise[n] / 100 for n, g in gradient.items()}
        for direction in (gradient, mixed):
            length = sum(float((d * d).sum()) for d in direction.values()) ** 0.5
            step = 1e-4 / length
            ends = [
                numpys({n: w + s * direction[n] for n, w in weights.items()}, batch)[1]
                for s in (step, -step)
            ]
            slope = sum(float((g * direction[n]).sum()) for n, g in gradient.items())
            assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("name", TEXTS)
def test_prompts_that_are_shared_draw_what_each_sample_draws_by_itself(
    draw: Draw, name: str
) -> None:
    shared, alone = draw(name), draw(name, shares=False)
    # Those of equal prompts are one request, and the others are not.
    sizes = [len(request.samples) for request in alone.requests]
    assert 1 < max(sizes) < GROUP and min(sizes) == 1
    for name_of in ("prompt_ids", "completion_ids", "action_mask"):
        pairs = zip(getattr(shared.rollout, name_of), getattr(alone.rollout, name_of), strict=True)
        for one, other in pairs:
            np.testing.assert_array_equal(one, other)
    pairs = zip(shared.rollout.generator_logps, alone.rollout.generator_logps, strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_a_reset_that_fails_leaves_its_sample_a_token_after_the_rows_own_prompt(draw: Draw) -> None:
    drawn = draw("with one that fails")
    failed = [i for i, r in enumerate(drawn.rollout.finish_reasons) if r == FAILED]
    assert failed == [1, GROUP + 1]
    prompts = drawn.rollout.prompt_ids
    for i in failed:
        assert len(drawn.rollout.completion_ids[i]) == 1
        assert len(prompts[i]) != len(prompts[i - 1])
        assert drawn.batch.advantages[i] == pytest.approx(0.0, abs=1e-6)
