"""The vision-language model of tests/golden/, its images and prompts, for tests that compare it with something else.

Refuses to compare. tests/golden/make_images.py made the model and the values of transformers beside it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from golden_models import Golden
from mindspore import Tensor

from mindgrpo.algorithm.image_patches import encoder_row, share_rows
from mindgrpo.algorithm.image_tokens import ImageFeatures, ImageTable
from mindgrpo.algorithm.sample import LENGTH, Rollout
from mindgrpo.backend.contract import Backend
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.data.pixels import PixelRule
from mindgrpo.models.vision_config import vision_layout
from mindgrpo.models.vision_tower import VisionTower, vision_angles
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.pretrained import load_weights

SAMPLES = 4


class GoldenImages(Golden):
    @cached_property
    def patches(self) -> list[np.ndarray]:
        """As make_images.py draws them first."""
        rng = np.random.default_rng(1)
        grids = self.values["grids"].tolist()
        return [rng.normal(size=(h * w, 96)).astype(np.float32) for h, w in grids]

    @cached_property
    def grids(self) -> list[tuple[int, int]]:
        """Of features."""
        return [(h // 2, w // 2) for h, w in self.values["grids"].tolist()]

    @cached_property
    def table(self) -> ImageTable:
        table = ImageTable()
        for grid in self.grids:
            table.add(*grid)
        return table

    @property
    def features(self) -> list[np.ndarray]:
        return [self.values[f"features/{i}"] for i in range(len(self.grids))]

    @property
    def images(self) -> ImageFeatures:
        """The features of transformers, in the places of the prompts' ids."""
        images = ImageFeatures(self.table, self.config.hidden_size)
        for number, features in enumerate(self.features):
            images.add(number, features)
        return images

    @property
    def rollout(self) -> Rollout:
        """The prompts and completions that the golden log-probs are of."""
        completions = [self.values[f"completion/{k}"] for k in range(SAMPLES)]
        return Rollout.single_turn(
            [self.prompt(k) for k in range(SAMPLES)],
            completions,
            [LENGTH] * SAMPLES,
            [np.zeros(len(own), np.float32) for own in completions],
            list(range(SAMPLES)),
        )

    def log_probs(self, sample: int) -> np.ndarray:
        return self.values[f"logps/{sample}"]

    @property
    def run_images(self) -> RunImages:
        """Of images that need no file."""
        return Drawn(self)

    def prompt(self, sample: int) -> np.ndarray:
        """Ids, with an image's own in its places."""
        ids = self.values[f"prompt/{sample}"].copy()
        images = self.values[f"images/{sample}"].tolist()
        if images:
            ids[ids == self.config.vision.image_token] = np.concatenate(
                [self.table.ids(i) for i in images]
            )
        return ids


class Drawn(RunImages):
    def __init__(self, golden: GoldenImages) -> None:
        super().__init__(PixelRule(), golden.config.vision.image_token, golden.table)
        self.drawn = golden.patches

    def patches(self, number: int) -> np.ndarray:
        return self.drawn[number]


def read_golden_images() -> GoldenImages:
    return GoldenImages.read("qwen2_5_vl")


def encoded(
    golden: GoldenImages, backend: Backend, images: list[int], length: int
) -> list[np.ndarray]:
    """What the encoder makes of `images`, in rows of `length` patches."""
    vision = golden.config.vision
    weights = Weights(vision_layout(vision, 1), backend.rank, backend, "vision")
    weights.pool.load()
    load_weights(weights, golden.directory)
    tower = backend.graph(VisionTower(vision, weights, backend.kernels), "vision")
    features: list[np.ndarray | None] = [None] * len(images)
    grids = [golden.grids[i] for i in images]
    for members in share_rows(grids, vision.merge_size, length):
        row = encoder_row(
            [grids[i] for i in members], vision.merge_size, vision.window_side, length
        )
        patches = np.zeros((length, vision.patch_values), np.float32)
        own = np.concatenate([golden.patches[images[i]] for i in members])[row.order]
        patches[: len(own)] = own
        angles = vision_angles(vision, row.positions)[None]
        inputs = patches, angles, row.windows[None], row.images[None]
        made = tower(*map(Tensor, inputs)).asnumpy()
        for i, rows in zip(members, row.features, strict=True):
            features[i] = made[rows]
    return features
