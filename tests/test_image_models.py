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
from golden_images import SAMPLES, GoldenImages, read_golden_images
from golden_models import BOUNDS, all_in_one_row, each_in_its_row, loaded_weights, train
from mindspore import Tensor, nn

from mindgrpo.algorithm.image_tokens import ImageTable
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.backend.connect import RuntimeSettings, connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder import Head, Stage
from mindgrpo.models.rotary import PositionAngles
from mindgrpo.models.shard import Shard

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
    from mindgrpo.algorithm.sample import LENGTH, Rollout

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
        assert np.abs(own - golden.values[f"logps/{sample}"]).max() < BOUNDS.logps
    with policy.gradients.on_host() as host:
        views = host.hf_views
        assert views.keys() == golden.gradients.keys()
        for name, expected in golden.gradients.items():
            gap = np.abs(views[name] - expected).max()
            assert gap < 1e-5 * np.abs(expected).max(), name
