"""Samples into fixed rows, rows into micro-batches, and per-token results back to samples. Pure.

A row holds bundles: a prompt once, then what follows it of each sample of its group. A sample's last token predicts
nothing and is left out. Refuses to cut a sample or to drop one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mindgrpo.algorithm.types import Samples
from mindgrpo.errors import UserError

# Heads run over this many sizes at most, each a compile of its own.
PICK_BUCKETS = 4


@dataclass(frozen=True)
class Placed:
    """Sample `sample`: its prompt's first column and length, and where its `completion` - 1 own tokens start."""

    sample: int
    prompt_start: int
    prompt: int
    start: int
    completion: int

    @property
    def columns(self) -> np.ndarray:
        """int [completion]: the columns that predict the completion's tokens."""
        own = np.arange(self.start, self.start + max(0, self.completion - 1))
        return np.concatenate([[self.prompt_start + self.prompt - 1], own])[: self.completion]


Row = tuple[Placed, ...]


@dataclass(frozen=True)
class MicroShape:
    """`rows` x `length` tokens a micro-batch; at most `max_per_row` samples a row, None for as many as fit."""

    rows: int
    length: int
    max_per_row: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass
class _Bundle:
    """Samples of one prompt, longest first."""

    prompt: int
    samples: list[int]
    costs: list[int]

    @property
    def cost(self) -> int:
        return self.prompt + sum(self.costs)

    def split(self, room: int, most: int) -> _Bundle:
        """Takes out the longest samples that fit `room`, at most `most`; may be none."""
        taken: list[int] = []
        room -= self.prompt
        for place, cost in enumerate(self.costs):
            if cost <= room and len(taken) < most:
                taken.append(place)
                room -= cost
        part = _Bundle(
            self.prompt, [self.samples[i] for i in taken], [self.costs[i] for i in taken]
        )
        left = [i for i in range(len(self.samples)) if i not in set(taken)]
        self.samples, self.costs = [self.samples[i] for i in left], [self.costs[i] for i in left]
        return part


def pack(samples: Samples, members: Sequence[int], shape: MicroShape) -> list[Row]:
    """`members` into few rows: a row takes whole groups, the largest that fit, then a part of one that fills it."""
    waiting = _bundles(samples, members, shape.length)
    limit = shape.max_per_row or len(samples)
    rows: list[Row] = []
    while waiting:
        row: list[Placed] = []
        used = 0
        while len(row) < limit:
            bundle = _take(waiting, shape.length - used, limit - len(row))
            if bundle is None:
                break
            used = _place(samples, bundle, used, row)
        rows.append(tuple(row))
    return rows


def _bundles(samples: Samples, members: Sequence[int], row_length: int) -> list[_Bundle]:
    lengths = samples.completion_lengths
    groups: dict[int, list[int]] = {}
    for i in members:
        total = len(samples.prompts[i]) + int(lengths[i])
        if total > row_length:
            raise UserError(
                f"A sample of {total} tokens does not fit rl_config.seq_length {row_length}; raise seq_length or "
                "lower generate_config.sampling_config.max_tokens."
            )
        groups.setdefault(samples.groups[i], []).append(i)
    bundles = []
    for group in groups.values():
        group.sort(key=lambda i: (-int(lengths[i]), i))
        costs = [max(0, int(lengths[i]) - 1) for i in group]
        bundles.append(_Bundle(len(samples.prompts[group[0]]), group, costs))
    return bundles


def _take(waiting: list[_Bundle], room: int, most: int) -> _Bundle | None:
    """The largest bundle that fits whole; else the part that fills most, its prompt not counted; None if none fits."""
    waiting.sort(key=lambda b: (-b.cost, b.samples[0]))
    for index, bundle in enumerate(waiting):
        if bundle.cost <= room and len(bundle.samples) <= most:
            return waiting.pop(index)
    for bundle in waiting:
        part = bundle.split(room, most)
        if part.samples:
            return part
    return None


def _place(samples: Samples, bundle: _Bundle, used: int, row: list[Placed]) -> int:
    start = used + bundle.prompt
    for sample, cost in zip(bundle.samples, bundle.costs, strict=True):
        row.append(Placed(sample, used, bundle.prompt, start, len(samples.completions[sample])))
        start += cost
    return start


@dataclass(frozen=True)
class MicroBatch:
    """int32: `tokens`, `positions` [R, T], `spans` [R, T, 3] (backend/kernels.py); `picks` [M], the places among
    R * T that predict, -1 on padding, and `labels` [M], what comes after them.
    """

    rows: tuple[Row, ...]
    tokens: np.ndarray
    positions: np.ndarray
    spans: np.ndarray
    picks: np.ndarray
    labels: np.ndarray

    def spread(self, values: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """Per-sample scalars or per-token arrays -> float32 [M], 0 on padding."""
        out = np.zeros(self.picks.shape, np.float32)
        start = 0
        for placed in self._placed():
            out[start : start + placed.completion] = values[placed.sample]
            start += placed.completion
        return out

    def gather(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """float32 [M] -> per-token arrays by sample."""
        found, start = {}, 0
        for placed in self._placed():
            found[placed.sample] = values[start : start + placed.completion].copy()
            start += placed.completion
        return found

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """int32 [M], the place of the first token of each token's sample, and float32 [M], one over its length.

        Padding stands alone, with 0.
        """
        starts, shares = np.arange(self.picks.size, dtype=np.int32), np.zeros(self.picks.size)
        start = 0
        for placed in self._placed():
            own = slice(start, start + placed.completion)
            starts[own], shares[own] = start, 1.0 / max(1, placed.completion)
            start += placed.completion
        return starts, shares.astype(np.float32)

    def _placed(self) -> list[Placed]:
        return [placed for row in self.rows for placed in row]


def micro_batches(
    samples: Samples, rows: Sequence[Row], shape: MicroShape, ways: int, index: int
) -> list[MicroBatch]:
    """The share of data-parallel rank `index` of `ways`; every rank gets equally many, padded with empty rows.

    All have the same number of picks: the most that one of this rank needs, rounded up to a bucket.
    """
    count = max(1, -(-len(rows) // (shape.rows * ways)))
    mine = list(rows[index::ways])
    mine += [()] * (count * shape.rows - len(mine))
    batches = [tuple(mine[i : i + shape.rows]) for i in range(0, len(mine), shape.rows)]
    need = max(sum(placed.completion for row in batch for placed in row) for batch in batches)
    bucket = -(-shape.tokens // PICK_BUCKETS)
    picks = max(1, -(-need // bucket)) * bucket
    return [_arrays(samples, batch, shape.length, picks) for batch in batches]


def _arrays(samples: Samples, rows: tuple[Row, ...], row_length: int, num_picks: int) -> MicroBatch:
    shape = (len(rows), row_length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    spans = np.zeros((*shape, 3), np.int32)
    spans[:, :, 2] = np.arange(row_length)  # padding sees itself
    picks, labels = np.full(num_picks, -1, np.int32), np.zeros(num_picks, np.int32)
    count = 0
    for index, row in enumerate(rows):
        for placed in row:
            prompt, completion = samples.prompts[placed.sample], samples.completions[placed.sample]
            shared = slice(placed.prompt_start, placed.prompt_start + placed.prompt)
            own = slice(placed.start, placed.start + max(0, placed.completion - 1))
            tokens[index, shared], tokens[index, own] = prompt, completion[:-1]
            positions[index, shared] = np.arange(placed.prompt)
            positions[index, own] = placed.prompt + np.arange(own.stop - own.start)
            spans[index, shared] = (0, 0, placed.prompt_start)
            spans[index, own] = (placed.prompt_start, placed.prompt, placed.start)
            end = count + placed.completion
            picks[count:end] = index * row_length + placed.columns
            labels[count:end] = completion
            count = end
    return MicroBatch(rows, tokens, positions, spans, picks, labels)


def padding_share(rows: Sequence[Row], num_tokens: int) -> float:
    """The share of the graphs' `num_tokens` places that hold no token of a sample or prompt."""
    used = 0
    for row in rows:
        prompts = {placed.prompt_start: placed.prompt for placed in row}
        used += sum(prompts.values()) + sum(max(0, placed.completion - 1) for placed in row)
    return 1.0 - used / num_tokens
