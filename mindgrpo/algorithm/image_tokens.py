"""Tokens of images: which image's features stand at which places of a prompt, and at what positions. Pure.

A prompt holds a negative id in the place of each feature of an image. The ids of all images of a run differ, so that
prompts with the same text and different images have different ids: whatever is shared, cached or compared by ids needs
to know nothing of images. An embedding table has no row for them. A token that the policy samples is never negative,
even one that the vocabulary reserves for images.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

# Time, row and column (M-RoPE, arXiv:2409.12191, section 2.1).
AXES = 3
# Ids are int32.
MOST_FEATURES = 2**31 - 1


@dataclass(frozen=True)
class ImagePlace:
    """Image `number` at places [start, start + features) of a prompt."""

    number: int
    start: int


class ImageTable:
    """The images of a run, numbered in the order in which they are added; `grids` are (rows, columns) of features.

    All ranks have to add the same images in the same order.
    """

    def __init__(self) -> None:
        self.grids: list[tuple[int, int]] = []
        # The number of features before each image, and of all.
        self._firsts = [0]

    def __len__(self) -> int:
        return len(self.grids)

    def add(self, rows: int, columns: int) -> int:
        """Adds an image of rows x columns features, and returns its number. Raises ValueError beyond MOST_FEATURES."""
        end = self._firsts[-1] + rows * columns
        if rows < 1 or columns < 1 or end > MOST_FEATURES:
            raise ValueError(f"an image of {rows} x {columns} features does not fit")
        self.grids.append((rows, columns))
        self._firsts.append(end)
        return len(self.grids) - 1

    def num_features(self, number: int) -> int:
        rows, columns = self.grids[number]
        return rows * columns

    def ids(self, number: int) -> np.ndarray:
        """Returns the ids of an image's features in order, int32 [features]."""
        return -1 - np.arange(self._firsts[number], self._firsts[number + 1], dtype=np.int32)

    def locate(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the image of each of the negative `ids` [n], and the feature's index in its image, int64 [n] each."""
        features = -1 - ids.astype(np.int64)
        firsts = np.array(self._firsts)
        numbers = np.searchsorted(firsts, features, "right") - 1
        return numbers, features - firsts[numbers]

    def places(self, ids: np.ndarray) -> list[ImagePlace]:
        """Returns the images of prompt `ids` int32 [n] in order; an image may stand there several times."""
        where = np.flatnonzero(ids < 0)
        numbers, features = self.locate(ids[where])
        starts = features == 0
        pairs = zip(numbers[starts].tolist(), where[starts].tolist(), strict=True)
        return [ImagePlace(number, start) for number, start in pairs]

    def positions(self, ids: np.ndarray) -> tuple[np.ndarray, int]:
        """Returns the position of each token of prompt `ids` [n] on each axis, int32 [n, AXES], and that of the token
        behind the prompt.

        Text counts on, alike on all axes. An image that begins at position s has its features at s, s + row and
        s + column, and is followed by s + max(rows, columns).
        """
        positions = np.empty((len(ids), AXES), np.int32)
        at = following = 0
        for image in self.places(ids):
            text = np.arange(image.start - at, dtype=np.int32) + following
            positions[at : image.start] = text[:, None]
            following += len(text)
            rows, columns = self.grids[image.number]
            at = image.start + rows * columns
            row, column = np.indices((rows, columns), np.int32).reshape(2, -1)
            positions[image.start : at] = following + np.stack([0 * row, row, column], 1)
            following += max(rows, columns)
        text = np.arange(len(ids) - at, dtype=np.int32) + following
        positions[at:] = text[:, None]
        return positions, following + len(text)


class ImageFeatures:
    """Features of images of `table`, float32 [features, width] each, that are in this rank's memory."""

    def __init__(self, table: ImageTable, width: int) -> None:
        self.table, self.width = table, width
        self._by_image: dict[int, np.ndarray] = {}

    def lacking(self, prompts: Iterable[np.ndarray]) -> list[int]:
        """Returns the images of the prompts' ids that have no features here, in order of their numbers."""
        return sorted(self._images_of(prompts) - self._by_image.keys())

    def keep_only(self, prompts: Iterable[np.ndarray]) -> None:
        """Frees the features of images that the prompts do not have."""
        wanted = self._images_of(prompts)
        self._by_image = {i: own for i, own in self._by_image.items() if i in wanted}

    def _images_of(self, prompts: Iterable[np.ndarray]) -> set[int]:
        return {image.number for ids in prompts for image in self.table.places(ids)}

    def add(self, number: int, features: np.ndarray) -> None:
        """Raises ValueError for an array of another shape than that of the image's features."""
        if features.shape != (self.table.num_features(number), self.width):
            raise ValueError(f"image {number} has features {list(features.shape)}")
        self._by_image[number] = features

    @property
    def num_bytes(self) -> int:
        return sum(own.nbytes for own in self._by_image.values())

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Returns the features float32 [..., width] at `ids` int32 [...], zeros for tokens of text.

        Raises KeyError for an image without features.
        """
        rows = np.zeros((*ids.shape, self.width), np.float32)
        is_image = ids < 0
        if is_image.any():
            numbers, features = self.table.locate(ids[is_image])
            own = np.empty((len(numbers), self.width), np.float32)
            for number in np.unique(numbers).tolist():
                of_image = numbers == number
                own[of_image] = self._by_image[number][features[of_image]]
            rows[is_image] = own
        return rows


def section_angles(
    rotary: np.ndarray, positions: np.ndarray, sections: Sequence[int]
) -> np.ndarray:
    """Returns the rotary angles float32 [..., 2 D] of positions int32 [..., axes].

    `rotary` float32 [positions, 2 D] holds cosines, then sines, of the same D / 2 frequencies four times over, of which
    the first sections[0] turn by a token's position on axis 0, and so on.
    """
    axis_of_column = np.tile(np.repeat(np.arange(len(sections)), sections), 4)
    columns = np.arange(rotary.shape[1])
    flat = positions.reshape(-1, positions.shape[-1])
    angles = np.empty((len(flat), rotary.shape[1]), np.float32)
    for axis in range(len(sections)):
        own = columns[axis_of_column == axis]
        angles[:, own] = rotary[flat[:, axis, None], own]
    return angles.reshape(*positions.shape[:-1], -1)
