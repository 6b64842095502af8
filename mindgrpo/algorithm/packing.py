"""Samples into fixed rows, rows into micro-batches, and per-token results back to samples. Pure.

A row holds whole samples one after another, numbered from 1; positions restart with each. Index t of a row predicts
its label, the token after it. Refuses to cut a sample or to drop one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.samples import Samples
from mindgrpo.errors import UserError


@dataclass(frozen=True)
class Placed:
    """Sample `sample` starts at column `start` of its row; `prompt` and `completion` are lengths."""

    sample: int
    start: int
    prompt: int
    completion: int

    @property
    def predictions(self) -> slice:
        """The columns whose labels are the completion's tokens."""
        first = self.start + self.prompt - 1
        return slice(first, first + self.completion)


Row = tuple[Placed, ...]


def pack(
    samples: Samples, members: Sequence[int], row_length: int, max_per_row: int | None
) -> list[Row]:
    """`members` into as few rows as first-fit by falling length finds; ties in sample order."""
    lengths = samples.total_lengths
    order = sorted(members, key=lambda i: (-int(lengths[i]), i))
    rows: list[list[Placed]] = []
    used: list[int] = []
    for i in order:
        length = int(lengths[i])
        if length > row_length:
            raise UserError(
                f"A sample of {length} tokens does not fit rl_config.seq_length {row_length}; raise seq_length or "
                "lower generate_config.sampling_config.max_tokens."
            )
        for index, row in enumerate(rows):
            if used[index] + length <= row_length and len(row) < (max_per_row or len(lengths)):
                break
        else:
            index = len(rows)
            rows.append([])
            used.append(0)
        prompt = len(samples.prompts[i])
        rows[index].append(Placed(i, used[index], prompt, length - prompt))
        used[index] += length
    return [tuple(row) for row in rows]


@dataclass(frozen=True)
class MicroBatch:
    """int32 [R, T]: `segments` is 0 on padding, `labels` is 0 where nothing is predicted."""

    rows: tuple[Row, ...]
    tokens: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    labels: np.ndarray

    def spread(self, values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Per-sample scalars or per-token arrays -> float32 [R * T] at the predicting columns, 0 elsewhere."""
        out = np.zeros(self.tokens.shape, np.float32)
        for row, placed in enumerate_placed(self.rows):
            out[row, placed.predictions] = values[placed.sample]
        return out.reshape(-1)

    def gather(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """float32 [R * T] -> per-token arrays by sample."""
        grid = values.reshape(self.tokens.shape)
        return {
            placed.sample: grid[row, placed.predictions].copy()
            for row, placed in enumerate_placed(self.rows)
        }


def enumerate_placed(rows: Sequence[Row]) -> list[tuple[int, Placed]]:
    return [(index, placed) for index, row in enumerate(rows) for placed in row]


def micro_batches(
    samples: Samples, rows: Sequence[Row], row_length: int, batch_rows: int, ways: int, index: int
) -> list[MicroBatch]:
    """The share of data-parallel rank `index` of `ways`; every rank gets equally many, padded with empty rows."""
    count = max(1, -(-len(rows) // (batch_rows * ways)))
    mine = list(rows[index::ways])
    mine += [()] * (count * batch_rows - len(mine))
    return [
        _arrays(samples, tuple(mine[start : start + batch_rows]), row_length)
        for start in range(0, count * batch_rows, batch_rows)
    ]


def _arrays(samples: Samples, rows: tuple[Row, ...], row_length: int) -> MicroBatch:
    shape = (len(rows), row_length)
    tokens, positions, segments, labels = (np.zeros(shape, np.int32) for _ in range(4))
    for index, row in enumerate(rows):
        for number, placed in enumerate(row, 1):
            sequence = samples.sequence(placed.sample)
            columns = slice(placed.start, placed.start + len(sequence))
            tokens[index, columns] = sequence
            positions[index, columns] = np.arange(len(sequence))
            segments[index, columns] = number
            labels[index, placed.start : columns.stop - 1] = sequence[1:]
    return MicroBatch(rows, tokens, positions, segments, labels)


def padding_share(rows: Sequence[Row], row_length: int, num_rows: int) -> float:
    """The share of the graph's tokens, over `num_rows` rows, that no sample fills."""
    used = sum(placed.prompt + placed.completion for row in rows for placed in row)
    return 1.0 - used / (row_length * num_rows)
