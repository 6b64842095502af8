"""Lays out patches of images in rows for a vision encoder: windows, spans and positions. Pure.

Patches arrive in blocks of merge x merge neighbours, which become one feature, block after block, row by row of the
image. The encoder gets the blocks window by window, so that a window is a run of neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

# (rows, columns) of features of an image.
Grid = tuple[int, int]


# A row has at least so many patches, so that small images share one.
LEAST_PATCHES, PATCHES_UNIT = 1024, 256


def row_length(largest: int, merged: int) -> int:
    """Returns the patches of a row for images of at most `largest` features of `merged` patches each."""
    return max(LEAST_PATCHES, -(-largest * merged // PATCHES_UNIT) * PATCHES_UNIT)


@dataclass(frozen=True)
class EncoderRow:
    """A row of P patches: patches `order` int [p] of its images' patches, one after another, followed by padding.

    `positions` int32 [P, 2] are a patch's row and column in its image; `windows` and `images` int32 [P, 3] are spans
    (backend/kernels/contract.py). The features of image i are rows `features[i]` of what the encoder returns.
    """

    order: np.ndarray
    positions: np.ndarray
    windows: np.ndarray
    images: np.ndarray
    features: tuple[np.ndarray, ...]


def share_rows(grids: Sequence[Grid], merge: int, length: int) -> list[list[int]]:
    """Packs images into rows of `length` patches, by the first row that has room; returns each row's images.

    Raises ValueError for an image that is larger than a row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i, (height, width) in enumerate(grids):
        size = height * width * merge**2
        if size > length:
            raise ValueError(f"an image of {size} patches does not fit a row of {length}")
        at = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if at == len(rows):
            rows.append([])
            room.append(length)
        rows[at].append(i)
        room[at] -= size
    return rows


def encoder_row(grids: Sequence[Grid], merge: int, window: int, length: int) -> EncoderRow:
    """Lays out images in a row of `length` patches; windows have `window` x `window` features."""
    order, positions, windows, images, features = [], [], [], [], []
    patches = blocks = 0
    for grid in grids:
        own = _layout(grid, merge, window)
        size = len(own.order)
        order.append(own.order + patches)
        positions.append(own.positions)
        windows.append(own.window_sizes)
        images.append(np.array([size]))
        features.append(own.features + blocks)
        patches, blocks = patches + size, blocks + size // merge**2
    alone = np.ones(length - patches, np.int64)
    positions.append(np.zeros((len(alone), 2), np.int32))
    return EncoderRow(
        np.concatenate([*order, np.zeros(0, np.int64)]),
        np.concatenate(positions),
        whole_spans(np.concatenate([*windows, alone])),
        whole_spans(np.concatenate([*images, alone])),
        tuple(features),
    )


def whole_spans(sizes: np.ndarray) -> np.ndarray:
    """Returns the spans int32 [sum of sizes, 3] of runs that see all of themselves."""
    starts = np.cumsum(sizes) - sizes
    return np.repeat(np.stack([starts, sizes, starts], 1), sizes, 0).astype(np.int32)


@dataclass(frozen=True)
class _ImageLayout:
    order: np.ndarray
    positions: np.ndarray
    window_sizes: np.ndarray
    features: np.ndarray


@lru_cache(maxsize=256)
def _layout(grid: Grid, merge: int, window: int) -> _ImageLayout:
    rows, columns = grid
    row, column = np.indices(grid).reshape(2, -1)
    window_of = row // window * -(-columns // window) + column // window
    by_window = np.argsort(window_of, kind="stable")
    features = np.empty(rows * columns, np.int64)
    features[by_window] = np.arange(rows * columns)
    unit = merge**2
    order = (by_window[:, None] * unit + np.arange(unit)).reshape(-1)
    inner = np.indices((merge, merge)).reshape(2, -1)
    positions = np.stack(
        [own[:, None] * merge + inside for own, inside in zip((row, column), inner, strict=True)], 2
    ).reshape(-1, 2)
    return _ImageLayout(
        order, positions[order].astype(np.int32), np.bincount(window_of) * unit, features
    )
