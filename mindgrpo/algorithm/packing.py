"""Packs samples into rows of fixed length and rows into micro-batches; scatters per-token results to samples. Pure.

A row holds bundles: a prompt once, followed by the completions of several of its samples. Samples with equal prompt
tokens share a prompt, whatever their groups. A sample's last token predicts nothing and is not an input. No sample is
truncated or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from mindgrpo.algorithm.context_split import deal_columns
from mindgrpo.algorithm.image_tokens import AXES, ImageTable
from mindgrpo.algorithm.sample import Arrays, Rollout
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
from mindgrpo.errors import UserError

# The number of different sizes [picks] of the head's input, each of which needs a compilation.
PICK_BUCKETS = 4


@dataclass(frozen=True)
class Placed:
    """A sample's columns in its row: the prompt's first and length, and the first of its `completion` - 1 inputs."""

    sample: int
    prompt_start: int
    prompt: int
    start: int
    completion: int

    @property
    def columns(self) -> np.ndarray:
        """Returns int [completion]: the columns that predict the completion's tokens."""
        own = np.arange(self.start, self.start + max(0, self.completion - 1))
        return np.concatenate([[self.prompt_start + self.prompt - 1], own])[: self.completion]

    @property
    def inputs(self) -> np.ndarray:
        """Returns int [prompt + completion - 1]: the columns of the prompt and of the completion's inputs."""
        own = np.arange(self.start, self.start + max(0, self.completion - 1))
        return np.concatenate([np.arange(self.prompt_start, self.prompt_start + self.prompt), own])


PackedRow = tuple[Placed, ...]


@dataclass(frozen=True)
class MicroShape:
    """The shape of a micro-batch: `rows` x `length` tokens, at most `max_per_row` samples a row (None: any number).

    At most `picks` of a rank's tokens predict; None: as many as needed, rounded up to a bucket. `length` is a multiple
    of `unit`, so that tokens divide among ranks. Each of `context_ranks` cp ranks has length / context_ranks columns of
    a row.
    """

    rows: int
    length: int
    max_per_row: int | None = None
    picks: int | None = None
    unit: int = 1
    context_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Returns the number of a rank's own tokens in a micro-batch."""
        return self.rows * self.length // self.context_ranks


@dataclass
class _Bundle:
    """Samples of one prompt, as (sample, columns) pairs, longest first."""

    prompt: int
    samples: list[tuple[int, int]]

    @property
    def cost(self) -> int:
        return self.prompt + sum(cost for _, cost in self.samples)

    def fits(self, room: int, most: int, picks: int) -> bool:
        return self.cost <= room and len(self.samples) <= most and self.picks <= picks

    @property
    def picks(self) -> int:
        """Returns the number of predicting positions: each sample's columns, and the prompt's last once per sample."""
        return sum(cost + 1 for _, cost in self.samples)

    def split(self, room: int, most: int, picks: int) -> _Bundle:
        """Removes the longest samples that fit, at most `most`, and returns them as a bundle, which may be empty."""
        taken: list[tuple[int, int]] = []
        left: list[tuple[int, int]] = []
        room -= self.prompt
        for sample, cost in self.samples:
            if cost <= room and len(taken) < most and cost < picks:
                taken.append((sample, cost))
                room -= cost
                picks -= cost + 1
            else:
                left.append((sample, cost))
        self.samples = left
        return _Bundle(self.prompt, taken)


def pack(rollout: Rollout, members: Sequence[int], shape: MicroShape) -> tuple[PackedRow, ...]:
    """Packs `members` into few rows: greedily the largest bundles that fit, then as much of one as fits.

    Raises UserError for a sample that is longer than a row.
    """
    waiting = _bundles(rollout, members, shape.length)
    limit = shape.max_per_row or len(rollout)
    rows: list[PackedRow] = []
    while waiting:
        row: list[Placed] = []
        used = 0
        while len(row) < limit:
            # Keeps a row's predicting positions within its number of columns, so that as many picks always suffice.
            picks = shape.length - sum(placed.completion for placed in row)
            bundle = _take(waiting, shape.length - used, limit - len(row), picks)
            if bundle is None:
                break
            start = used + bundle.prompt
            for sample, cost in bundle.samples:
                completion = len(rollout.completion_ids[sample])
                row.append(Placed(sample, used, bundle.prompt, start, completion))
                start += cost
            used = start
        rows.append(tuple(row))
    return tuple(rows)


def _bundles(rollout: Rollout, members: Sequence[int], row_length: int) -> list[_Bundle]:
    lengths = rollout.completion_lengths
    by_prompt: dict[bytes, list[int]] = {}
    for i in members:
        total = len(rollout.prompt_ids[i]) + int(lengths[i])
        if total > row_length:
            raise UserError(
                f"A sample of {total} tokens does not fit rl_config.seq_length {row_length}; raise seq_length or "
                "lower generate_config.sampling_config.max_tokens."
            )
        by_prompt.setdefault(rollout.prompt_ids[i].tobytes(), []).append(i)
    bundles = []
    for own in by_prompt.values():
        own.sort(key=lambda i: (-int(lengths[i]), i))
        samples = [(i, max(0, int(lengths[i]) - 1)) for i in own]
        bundles.append(_Bundle(len(rollout.prompt_ids[own[0]]), samples))
    return bundles


def _take(waiting: list[_Bundle], room: int, most: int, picks: int) -> _Bundle | None:
    """Removes and returns the largest bundle that fits, or else a part of one; None if no sample fits."""
    waiting.sort(key=lambda b: (-b.cost, b.samples[0]))
    for index, bundle in enumerate(waiting):
        if bundle.fits(room, most, picks):
            return waiting.pop(index)
    for bundle in waiting:
        taken = bundle.split(room, most, picks)
        if taken.samples:
            return taken
    return None


@dataclass(frozen=True)
class Predicted:
    """The completion tokens `offsets` int [n] of a sample that this rank predicts, at `picks` of its [M] positions.

    `index` is the sample's number in the micro-batch; `share` is 1 / (its number of action tokens).
    """

    sample: int
    offsets: np.ndarray
    picks: slice
    index: int
    share: float


@dataclass(frozen=True)
class MicroBatch:
    """A rank's inputs of R packed rows of T columns, of which a rank of G cp ranks has L = T / G columns.

    int32: `tokens` [R, L]; `positions` [R, T], or [R, T, AXES] of models that see images, and `spans` [R, T, 3]
    (backend/kernels/contract.py) of whole rows;
    `columns` [G, R, L], the columns of each of the G ranks, of which this is rank `part`; `picks` [M], the predicting
    positions among the R * L, -1 on padding, and `labels` [M], the tokens they predict. `actions` bool [M] marks labels
    that the policy generated, False on padding. `arrays` [R, L, ...] are the per-token arrays declared as inputs.
    """

    rows: tuple[PackedRow, ...]
    tokens: np.ndarray
    positions: np.ndarray
    spans: np.ndarray
    columns: np.ndarray
    picks: np.ndarray
    labels: np.ndarray
    actions: np.ndarray
    predicted: tuple[Predicted, ...]
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    part: int = 0

    @property
    def own_columns(self) -> np.ndarray:
        """Returns int32 [R, L], the columns of this rank's tokens."""
        return self.columns[self.part]

    def own(self, whole: np.ndarray) -> np.ndarray:
        """Selects this rank's columns of `whole` [R, T, ...]: [R * L, ...]."""
        own = whole[np.arange(len(whole))[:, None], self.own_columns]
        return own.reshape(-1, *whole.shape[2:])

    def spread(self, values: Arrays | np.ndarray) -> np.ndarray:
        """Returns per-sample scalars or [completion length] arrays at the picks: float32 [M], 0 on padding."""
        out = np.zeros(self.picks.shape, np.float32)
        for own in self.predicted:
            of_sample = values[own.sample]
            out[own.picks] = of_sample[own.offsets] if np.ndim(of_sample) else of_sample
        return out

    def gather(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Scatters [M] values at the picks into arrays [completion length] by sample.

        Tokens that other cp ranks predict are 0, so that a sum over the ranks completes them.
        """
        whole = {
            placed.sample: np.zeros(placed.completion, values.dtype)
            for row in self.rows
            for placed in row
        }
        for own in self.predicted:
            whole[own.sample][own.offsets] = values[own.picks]
        return whole

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns each pick's sample index in the micro-batch, int32 [M], and 1 / its action tokens, float32 [M].

        Padding has the index G * M - 1, which no sample has, and 0.
        """
        most = len(self.columns) * self.picks.size
        numbers = np.full(self.picks.size, most - 1, np.int32)
        shares = np.zeros(self.picks.size, np.float32)
        for own in self.predicted:
            numbers[own.picks], shares[own.picks] = own.index, own.share
        return numbers, shares


def num_micro_batches(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Returns the number of micro-batches on each of `num_shares` data-parallel ranks, at least 1."""
    return max(1, -(-len(rows) // (shape.rows * num_shares)))


def most_picks(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Returns the largest number of predicting positions in any rank's micro-batch."""
    return max(
        int(sum((_picks_by_rank(row, shape) for row in batch), np.zeros(1, np.int64)).max())
        for share in range(num_shares)
        for batch in _batches(rows, shape, num_shares, share)
    )


def _picks_by_rank(row: PackedRow, shape: MicroShape) -> np.ndarray:
    """Returns the number of a row's predicting positions on each cp rank, int [G]."""
    if shape.context_ranks == 1:
        return np.array([sum(placed.completion for placed in row)])
    owners, _ = _places(deal_columns(_spans_of(row, shape.length), shape.context_ranks))
    columns = [placed.columns for placed in row]
    predicting = np.concatenate([*columns, np.zeros(0, np.int64)]).astype(np.int64)
    return np.bincount(owners[predicting], minlength=shape.context_ranks)


def _places(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverts `columns` [G, L] of a row: returns each column's rank and its index on that rank, int64 [T] each."""
    owners, places = np.empty(columns.size, np.int64), np.empty(columns.size, np.int64)
    ranks = np.arange(len(columns))[:, None]
    owners[columns], places[columns] = ranks, np.arange(columns.shape[1])
    return owners, places


def _spans_of(row: PackedRow, length: int) -> np.ndarray:
    spans = np.zeros((length, 3), np.int32)
    spans[:, 2] = np.arange(length)  # padding sees itself
    for placed in row:
        own = slice(placed.start, placed.start + max(0, placed.completion - 1))
        spans[placed.prompt_start : placed.prompt_start + placed.prompt] = (
            0,
            0,
            placed.prompt_start,
        )
        spans[own] = (placed.prompt_start, placed.prompt, placed.start)
    return spans


def micro_batches(
    rollout: Rollout,
    rows: Sequence[PackedRow],
    shape: MicroShape,
    num_shares: int,
    share: int,
    part: int = 0,
    images: ImageTable | None = None,
) -> list[MicroBatch]:
    """Returns the micro-batches of data-parallel rank `share` of `num_shares`, as inputs of its cp rank `part`.

    `images` are those of models that see images, whose positions have several axes.
    All ranks get the same number of them, padded with empty rows, and of the same picks: as `shape` says, or the most
    that any rank needs, rounded up to a bucket. Raises ValueError if `shape` has too few picks.
    """
    need, picks = most_picks(rows, shape, num_shares), shape.picks
    if picks is None:
        bucket = -(-shape.tokens // PICK_BUCKETS)
        picks = max(1, -(-need // bucket)) * bucket
    if need > picks:
        raise ValueError(f"a micro-batch has {need} predicting positions, its shape {picks}")
    batches = _batches(rows, shape, num_shares, share)
    return [_arrays(rollout, batch, shape, picks, part, images) for batch in batches]


def _batches(
    rows: Sequence[PackedRow], shape: MicroShape, num_shares: int, share: int
) -> list[tuple[PackedRow, ...]]:
    """Returns the rows of each of a rank's micro-batches."""
    count = num_micro_batches(rows, shape, num_shares)
    mine = list(rows[share::num_shares])
    mine += [()] * (count * shape.rows - len(mine))
    return [tuple(mine[i : i + shape.rows]) for i in range(0, len(mine), shape.rows)]


def _arrays(
    rollout: Rollout,
    rows: tuple[PackedRow, ...],
    shape: MicroShape,
    num_picks: int,
    part: int,
    images: ImageTable | None,
) -> MicroBatch:
    whole, axes = (len(rows), shape.length), () if images is None else (AXES,)
    tokens, positions = np.zeros(whole, np.int32), np.zeros((*whole, *axes), np.int32)
    spans = np.stack([_spans_of(row, shape.length) for row in rows])
    columns = np.stack([deal_columns(own, shape.context_ranks) for own in spans], 1)
    picks, labels = np.full(num_picks, -1, np.int32), np.zeros(num_picks, np.int32)
    actions = np.zeros(num_picks, bool)
    arrays = {
        name: np.full((*whole, *declared.trailing), declared.on_context or 0, declared.dtype)
        for name, declared in TOKEN_ARRAYS.items()
        if declared.is_input and name in rollout.token_arrays
    }
    predicted: list[Predicted] = []
    count = index = 0
    for number, row in enumerate(rows):
        owners, places = _places(columns[:, number])
        for placed in row:
            sample = placed.sample
            completion, wrote = rollout.completion_ids[sample], rollout.action_mask[sample]
            shared = slice(placed.prompt_start, placed.prompt_start + placed.prompt)
            own = slice(placed.start, placed.start + max(0, placed.completion - 1))
            tokens[number, shared] = rollout.prompt_ids[sample]
            tokens[number, own] = completion[:-1]
            for name, values in arrays.items():
                values[number, own] = rollout.token_arrays[name][sample][:-1]
            following = placed.prompt
            if images is None:
                positions[number, shared] = np.arange(placed.prompt)
            else:
                own_positions, following = images.positions(rollout.prompt_ids[sample])
                positions[number, shared] = own_positions
            behind = following + np.arange(own.stop - own.start)
            positions[number, own] = behind if images is None else behind[:, None]
            offsets = np.flatnonzero(owners[placed.columns] == part)
            here = slice(count, count + offsets.size)
            picks[here] = number * columns.shape[2] + places[placed.columns[offsets]]
            labels[here] = completion[offsets]
            actions[here] = wrote[offsets]
            predicted.append(
                Predicted(sample, offsets, here, index, 1.0 / max(1, np.count_nonzero(wrote)))
            )
            count, index = here.stop, index + bool(placed.completion)
    mine = np.arange(len(rows))[:, None], columns[part]
    inputs = {name: values[mine] for name, values in arrays.items()}
    of_picks = picks, labels, actions, tuple(predicted)
    return MicroBatch(rows, tokens[mine], positions, spans, columns, *of_picks, inputs, part)


class PackedRollout:
    """Packs a rollout into rows and micro-batches, with a cache for the phases that need the same ones.

    `members` are the samples to pack, None for all; other arguments are those of `pack` and `micro_batches`.
    """

    def __init__(self, rollout: Rollout, images: ImageTable | None = None) -> None:
        self.rollout = rollout
        self._pack = cache(partial(pack, rollout))
        self._micro_batches = cache(partial(micro_batches, rollout, images=images))

    def rows(
        self, shape: MicroShape, members: Sequence[int] | None = None
    ) -> tuple[PackedRow, ...]:
        chosen = tuple(range(len(self.rollout)) if members is None else members)
        return self._pack(chosen, replace(shape, picks=None))

    def micro_batches(
        self,
        shape: MicroShape,
        num_shares: int,
        share: int,
        members: Sequence[int] | None = None,
        part: int = 0,
    ) -> list[MicroBatch]:
        return self._micro_batches(self.rows(shape, members), shape, num_shares, share, part)


def padding_share(rows: Sequence[PackedRow], num_tokens: int) -> float:
    """Returns the fraction of the graphs' `num_tokens` positions that are padding."""
    used = 0
    for row in rows:
        prompts = {placed.prompt_start: placed.prompt for placed in row}
        used += sum(prompts.values()) + sum(max(0, placed.completion - 1) for placed in row)
    return 1.0 - used / num_tokens
