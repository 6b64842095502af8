"""Encodes the images of prompts, each once, into features that generator, reference and trainer all get.

The vision encoder is a role of the run: whole on every rank, frozen, and on the device only while it encodes. Images
are dealt over the ranks by their sizes, and features are gathered to the host memory of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from mindspore import Tensor

from mindgrpo.algorithm.image_patches import encoder_row, row_length, share_rows
from mindgrpo.algorithm.image_tokens import ImageFeatures
from mindgrpo.backend.contract import Backend
from mindgrpo.data.image_prompts import RunImages
from mindgrpo.errors import UserError
from mindgrpo.memory.residency import VISION
from mindgrpo.models.vision_config import VisionConfig, vision_layout
from mindgrpo.models.vision_tower import VisionTower, vision_angles
from mindgrpo.weights.local_weights import Weights


class ImageEncoder:
    """`features` are those of the images that were encoded last, on every rank alike."""

    def __init__(self, vision: VisionConfig, images: RunImages, backend: Backend) -> None:
        self._vision, self._images, self._backend = vision, images, backend
        layout = vision_layout(vision, backend.world.size)
        self.weights = Weights(layout, backend.rank, backend, VISION, dtype=backend.compute_dtype)
        self.features = ImageFeatures(images.table, vision.out_hidden_size)

    @cached_property
    def _graph(self) -> Any:
        tower = VisionTower(self._vision, self.weights, self._backend.kernels)
        return self._backend.graph(tower, "images")

    @cached_property
    def _length(self) -> int:
        """Returns the number of patches of a row: no image of the run's data is larger."""
        largest = max(rows * columns for rows, columns in self._images.table.grids)
        return row_length(largest, self._vision.merged)

    def encode(self, prompts: Sequence[np.ndarray], keeps: bool, enter: Callable[[], None]) -> int:
        """Encodes the images of the prompts that have no features yet; returns their number of features.

        Frees the features of other images unless it `keeps` them. `enter` brings the encoder to the device. Collective.
        Raises UserError on all ranks for an image that one rank cannot read.
        """
        if not keeps:
            self.features.keep_only(prompts)
        waiting = self.features.lacking(prompts)
        if not waiting:
            return 0
        enter()
        world, refusal, encoded = self._backend.world, None, dict[int, np.ndarray]()
        try:
            encoded = self._encoded(self._dealt(waiting)[world.index])
        except UserError as error:
            refusal = str(error)
        by_rank = world.gather_objects((refusal, encoded))
        for refused, _ in by_rank:
            if refused is not None:
                raise UserError(refused)
        for _, features in by_rank:
            for number, rows in features.items():
                self.features.add(number, rows)
        return sum(map(self._images.table.num_features, waiting))

    def _dealt(self, images: Sequence[int]) -> list[list[int]]:
        """Deals images over the ranks: the largest first, to the rank that has fewest features."""
        table = self._images.table
        shares: list[list[int]] = [[] for _ in range(self._backend.world.size)]
        load = [0] * len(shares)
        for number in sorted(images, key=lambda i: (-table.num_features(i), i)):
            rank = load.index(min(load))
            shares[rank].append(number)
            load[rank] += table.num_features(number)
        return shares

    def _encoded(self, images: Sequence[int]) -> dict[int, np.ndarray]:
        if not images:
            return {}
        vision, features = self._vision, dict[int, np.ndarray]()
        grids = [self._images.table.grids[number] for number in images]
        for members in share_rows(grids, vision.merge_size, self._length):
            own = [grids[i] for i in members]
            row = encoder_row(own, vision.merge_size, vision.window_side, self._length)
            patches = np.zeros((self._length, vision.patch_values), np.float32)
            drawn = np.concatenate([self._images.patches(images[i]) for i in members])
            patches[: len(drawn)] = drawn[row.order]
            angles = vision_angles(vision, row.positions)
            inputs = patches, angles[None], row.windows[None], row.images[None]
            made = self._graph(*map(Tensor, inputs)).float().asnumpy()
            for i, rows in zip(members, row.features, strict=True):
                features[images[i]] = made[rows]
        return features
