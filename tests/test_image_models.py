"""A language model that sees images against transformers: positions, logits, log-probs and every gradient.

Features are those of transformers; test_vision_tower.py compares the encoder. Prompts: an image; three images, two of
them adjacent and one repeated; text alone; an image, and a completion with the token that stands for images in text.
Does not prove anything about runs (test_image_runs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from algorithms import loss_of
from golden_images import SAMPLES, GoldenImages, read_golden_images
from golden_models import BOUNDS, all_in_one_row, each_in_its_row, loaded_weights, train
from mindspore import Tensor, nn

from mindgrpo.algorithm.image_tokens import ImageFeatures, ImageTable
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import LENGTH, Request, Rollout
from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import AdamWSettings, SamplingParams
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder import KEEP_ALL, Head, Stage
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.pipeline import ForwardPipeline, by_sample, compute_log_probs
from mindgrpo.models.rotary import PositionAngles
from mindgrpo.models.shard import Shard
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import SeedKey
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import fill_random, load_weights

PLAIN = ("matmul", "rms_norm", "add_rms_norm", "glu", "attention", "embedding")


@pytest.fixture(scope="module")
def golden() -> GoldenImages:
    return read_golden_images()


@pytest.fixture(params=["native", "plain"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    settings = RuntimeSettings(matmul_precision="highest")
    if request.param == "plain":
        settings = RuntimeSettings(plain_kernels=PLAIN)
    made = connect(SHARED_MEMORY, {}, settings)
    yield made
    made.close()


def test_positions_are_those_of_transformers(golden: GoldenImages) -> None:
    for sample in range(SAMPLES):
        expected, prompt = golden.values[f"positions/{sample}"], golden.prompt(sample)
        positions, following = golden.table.positions(prompt)
        np.testing.assert_array_equal(positions, expected[: len(prompt)])
        completion = np.arange(len(expected) - len(prompt))[:, None] + following
        np.testing.assert_array_equal(np.repeat(completion, 3, 1), expected[len(prompt) :])


def test_prompts_with_other_images_share_nothing() -> None:
    """Equal text, and images of equal sizes."""
    table = ImageTable()
    prompts = [np.concatenate([[5, 6], table.ids(table.add(2, 2)), [7]]) for _ in range(2)]
    prompts += prompts
    ones = [np.ones(3, np.int32)] * 4
    rollout = Rollout.single_turn(
        prompts, ones, [LENGTH] * 4, [np.zeros(3, np.float32)] * 4, [0, 1, 0, 1]
    )
    (row,) = PackedRollout(rollout, table).rows(MicroShape(1, 64))
    starts = {placed.sample: placed.prompt_start for placed in row}
    assert starts[0] == starts[2] != starts[1] == starts[3]


class Logits(nn.Cell):
    def __init__(self, shard: Shard, num_positions: int) -> None:
        super().__init__()
        self.stage, self.head = Stage(shard, num_positions), Head(shard)

    def construct(self, tokens: Any, *inputs: Any) -> Any:
        return self.head(self.stage.compute(tokens, inputs))


def test_logits_are_those_of_transformers(golden: GoldenImages, backend: Backend) -> None:
    length = max(len(golden.values[f"positions/{k}"]) for k in range(SAMPLES))
    shard = Shard(golden.config, loaded_weights(golden, backend), backend)
    cell = Logits(shard, length)
    angles = PositionAngles(golden.config, length)
    for sample in range(SAMPLES):
        ids = np.concatenate([golden.prompt(sample), golden.values[f"completion/{sample}"]])
        tokens = np.zeros((1, length), np.int32)
        positions = np.zeros((1, length, 3), np.int32)
        tokens[0, : len(ids)] = ids
        positions[0, : len(ids)] = golden.values[f"positions/{sample}"]
        spans, columns = np.zeros((1, length, 3), np.int32), np.arange(length, dtype=np.int32)
        inputs = angles.of(positions), spans, columns[None, None], golden.images.rows(tokens)
        ours = cell(Tensor(tokens), *map(Tensor, inputs)).asnumpy()[: len(ids)]
        theirs = golden.values[f"logits/{sample}"]
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("rows", [each_in_its_row, all_in_one_row])
def test_log_probs_and_every_gradient_are_those_of_transformers(
    golden: GoldenImages, backend: Backend, rows: Any
) -> None:
    policy, logps = train(golden, backend, rows(golden.rollout), images=golden.images)
    for sample, own in logps.items():
        assert np.abs(own - golden.log_probs(sample)).max() < BOUNDS.logps
    with policy.gradients.on_host() as host:
        views = host.hf_views
        assert views.keys() == golden.gradients.keys()
        for name, expected in golden.gradients.items():
            gap = np.abs(views[name] - expected).max()
            assert gap < 1e-5 * np.abs(expected).max(), name


def engine_of(
    golden: GoldenImages, backend: Backend, sampling: SamplingParams, kernels: Kernels | None = None
) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        golden.config,
        golden.layout,
        backend,
        sampling,
        # Prompts longer than a call computes at once, and fewer prefix blocks than prompts.
        KVCacheConfig(6, 4, None, 96, sampling.max_tokens),
        kernels,
        images=golden.images,
    )
    engine.load(str(golden.directory), 0)
    return engine


@pytest.mark.parametrize("decoder", ["loop", "plain"])
def test_greedy_tokens_are_those_of_transformers(golden: GoldenImages, decoder: str) -> None:
    """One of them draws the token that stands for images in text."""
    alone = connect(SHARED_MEMORY, {}, RuntimeSettings(matmul_precision="highest"))
    sampling = SamplingParams(temperature=0.0, max_tokens=12)
    engine = engine_of(golden, alone, sampling, Kernels() if decoder == "plain" else None)
    chosen = [k for k in range(SAMPLES) if f"greedy/{k}" in golden.values]
    requests = [Request(golden.prompt(k), (k,)) for k in chosen]
    samples = engine.generate(requests, sampling, SeedKey(0, 0, 0), 0)
    for k, sample in zip(chosen, samples, strict=True):
        assert sample.tokens.tolist() == golden.values[f"greedy/{k}"].tolist()
    alone.close()


@pytest.mark.parametrize("precision", ["highest", "medium"])
def test_generator_and_trainer_agree_in_every_bit(golden: GoldenImages, precision: Any) -> None:
    alone = connect(SHARED_MEMORY, {}, RuntimeSettings(matmul_precision=precision))
    alone.kernels.batch_invariant = True
    sampling = SamplingParams(max_tokens=12, stop_ids=(94,))
    engine = engine_of(golden, alone, sampling)
    requests = [Request(golden.prompt(k), tuple(range(4 * k, 4 * k + 4))) for k in range(SAMPLES)]
    samples = engine.generate(requests, sampling, SeedKey(0, 0, 1), 0)
    rollout = Rollout(tuple(samples), tuple(i // 4 for i in range(len(samples))))
    shape = MicroShape(2, 192)
    adamw = AdamWSettings(0.9, 0.95, 1e-8, 0.0)
    settings = UpdateSettings(shape, 192, 1.0, KEEP_ALL, loss_of(), 1.0, adamw)
    policy = Policy(golden.config, golden.layout, alone, settings, images=golden.images)
    load_weights(policy.weights, golden.directory)
    batches = PackedRollout(rollout, golden.table).micro_batches(shape, 1, 0)
    results, _ = policy.pipeline.log_probs(batches)
    logps = by_sample(batches, results, policy.shard.context_group)
    for i, sample in enumerate(samples):
        np.testing.assert_array_equal(logps[i][0], sample.logps)
    alone.close()


def test_a_critic_values_the_tokens_behind_an_image_by_what_it_shows(
    golden: GoldenImages, backend: Backend
) -> None:
    config = golden.config.with_scalar_head()
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    values = []
    for scale in (1.0, 0.0):
        images = ImageFeatures(golden.table, config.hidden_size)
        for number, features in enumerate(golden.features):
            images.add(number, scale * features)
        weights = Weights(layout, 0, backend)
        fill_random(weights, 0)
        pipeline = ForwardPipeline(
            Shard(config, weights, backend),
            backend,
            "values",
            MicroShape(2, 192),
            192,
            1.0,
            images=images,
        )
        packed = PackedRollout(golden.rollout, golden.table)
        values.append(compute_log_probs(pipeline, layout.mesh, backend, packed))
    has_image = [bool((golden.prompt(k) < 0).any()) for k in range(SAMPLES)]
    assert True in has_image and False in has_image
    for shown, (seen, blank) in zip(has_image, zip(*values, strict=True), strict=True):
        assert np.array_equal(seen, blank) != shown
