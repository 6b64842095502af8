"""Packs samples into fixed rows and rows into micro-batches, and puts per-token results back in order of samples. Pure.

A row holds bundles: a prompt once, then the completions of several of its samples. Samples share a prompt where its
token ids are equal, whatever their groups are. A sample's last token predicts nothing and is left out. No sample is cut
or dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from mindgrpo.algorithm.context_split import deal_columns
from mindgrpo.algorithm.sample import Arrays, Rollout
from mindgrpo.algorithm.token_arrays import TOKEN_ARRAYS
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

    @property
    def inputs(self) -> np.ndarray:
        """int [prompt + completion - 1]: the columns of the prompt, then of the sample's own tokens."""
        own = np.arange(self.start, self.start + max(0, self.completion - 1))
        return np.concatenate([np.arange(self.prompt_start, self.prompt_start + self.prompt), own])


PackedRow = tuple[Placed, ...]


@dataclass(frozen=True)
class MicroShape:
    """`rows` x `length` tokens a micro-batch; at most `max_per_row` samples a row, None for as many as fit.

    Of a rank's tokens `picks` predict at most; None for a part of all that holds what is needed. `length` is a multiple
    of `unit`, so that tokens divide among ranks. Each of `context_ranks` has as many of a row's columns.
    """

    rows: int
    length: int
    max_per_row: int | None = None
    picks: int | None = None
    unit: int = 1
    context_ranks: int = 1

    @property
    def tokens(self) -> int:
        """Counts a rank's own tokens of a micro-batch."""
        return self.rows * self.length // self.context_ranks


@dataclass
class _Bundle:
    """Samples of one prompt, each with its cost in columns, longest first."""

    prompt: int
    samples: list[tuple[int, int]]

    @property
    def cost(self) -> int:
        return self.prompt + sum(cost for _, cost in self.samples)

    def fits(self, room: int, most: int, picks: int) -> bool:
        return self.cost <= room and len(self.samples) <= most and self.picks <= picks

    @property
    def picks(self) -> int:
        """Returns the predicting positions: one more a sample than it has columns, as the prompt's last has several."""
        return sum(cost + 1 for _, cost in self.samples)

    def split(self, room: int, most: int, picks: int) -> _Bundle:
        """Takes out the longest samples that fit `room`, at most `most`, as a bundle, which may be empty."""
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
    """Packs `members` into few rows: a row takes the largest bundles that fit, then the part of one that fills it best.

    Raises UserError for a sample that is longer than a row.
    """
    waiting = _bundles(rollout, members, shape.length)
    limit = shape.max_per_row or len(rollout)
    rows: list[PackedRow] = []
    while waiting:
        row: list[Placed] = []
        used = 0
        while len(row) < limit:
            # No row predicts more than it has columns, so that as many picks always suffice.
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
    """Takes the largest bundle that fits whole, else as much of one as fits; None if none fits."""
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
    """What a rank predicts of a sample: completion tokens `offsets`, at `picks` of its predicting positions.

    The sample is number `index` of the micro-batch's; `share` is one over all of its action tokens.
    """

    sample: int
    offsets: np.ndarray
    picks: slice
    index: int
    share: float


@dataclass(frozen=True)
class MicroBatch:
    """What a rank computes of rows of T columns, L of them its own: `columns` int32 [G, R, L] are those of each of G
    ranks that share the rows. L = T without context parallelism.

    int32: `tokens` [R, L]; `positions` [R, T] and `spans` [R, T, 3] (backend/kernels/contract.py) of whole rows;
    `picks` [M], the positions among R * L that predict, -1 on padding, and `labels` [M], what comes after them.
    `actions` bool [M] says which labels the policy wrote; padding is none. `arrays` [R, L, ...] are the declared
    per-token arrays that are inputs. This rank is number `part` of the G.
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
        """Takes what `whole` [R, T, ...] has of this rank's tokens: [R L, ...]."""
        own = whole[np.arange(len(whole))[:, None], self.own_columns]
        return own.reshape(-1, *whole.shape[2:])

    def spread(self, values: Arrays | np.ndarray) -> np.ndarray:
        """Spreads per-sample scalars or per-token arrays over the predicting positions: float32 [M], 0 on padding."""
        out = np.zeros(self.picks.shape, np.float32)
        for own in self.predicted:
            of_sample = values[own.sample]
            out[own.picks] = of_sample[own.offsets] if np.ndim(of_sample) else of_sample
        return out

    def gather(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Splits [M] values of the predicting positions into arrays [completion length] by sample.

        They are 0 for tokens that other ranks predict, so that sums over the ranks are whole.
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
        """Returns two arrays [M]: int32, the number of each position's sample among the micro-batch's, below G * M;
        float32, one over its action tokens.

        A padding position has a number that no sample has, and 0.
        """
        most = len(self.columns) * self.picks.size
        numbers = np.full(self.picks.size, most - 1, np.int32)
        shares = np.zeros(self.picks.size, np.float32)
        for own in self.predicted:
            numbers[own.picks], shares[own.picks] = own.index, own.share
        return numbers, shares


def num_micro_batches(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Counts the micro-batches of each of `num_shares` data-parallel ranks; one at least."""
    return max(1, -(-len(rows) // (shape.rows * num_shares)))


def most_picks(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Returns the most predicting positions of any rank's micro-batch."""
    return max(
        int(sum((_picks_by_rank(row, shape) for row in batch), np.zeros(1, np.int64)).max())
        for share in range(num_shares)
        for batch in _batches(rows, shape, num_shares, share)
    )


def _picks_by_rank(row: PackedRow, shape: MicroShape) -> np.ndarray:
    """Counts a row's predicting positions on each of the ranks that share it."""
    if shape.context_ranks == 1:
        return np.array([sum(placed.completion for placed in row)])
    owners, _ = _places(deal_columns(_spans_of(row, shape.length), shape.context_ranks))
    columns = [placed.columns for placed in row]
    predicting = np.concatenate([*columns, np.zeros(0, np.int64)]).astype(np.int64)
    return np.bincount(owners[predicting], minlength=shape.context_ranks)


def _places(columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rank has each column of a row, and which of its own it is, of `columns` [G, L]."""
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
) -> list[MicroBatch]:
    """Returns the micro-batches of data-parallel rank `share` of `num_shares`, of which this is rank `part` of context
    parallelism.

    Every rank gets equally many, padded with empty rows. All have as many picks as `shape` says, or the most that any
    rank needs, rounded up to a bucket.
    """
    need, picks = most_picks(rows, shape, num_shares), shape.picks
    if picks is None:
        bucket = -(-shape.tokens // PICK_BUCKETS)
        picks = max(1, -(-need // bucket)) * bucket
    if need > picks:
        raise ValueError(f"a micro-batch has {need} predicting positions, its shape {picks}")
    batches = _batches(rows, shape, num_shares, share)
    return [_arrays(rollout, batch, shape, picks, part) for batch in batches]


def _batches(
    rows: Sequence[PackedRow], shape: MicroShape, num_shares: int, share: int
) -> list[tuple[PackedRow, ...]]:
    """Returns the rows of each of a rank's micro-batches."""
    count = num_micro_batches(rows, shape, num_shares)
    mine = list(rows[share::num_shares])
    mine += [()] * (count * shape.rows - len(mine))
    return [tuple(mine[i : i + shape.rows]) for i in range(0, len(mine), shape.rows)]


def _arrays(
    rollout: Rollout, rows: tuple[PackedRow, ...], shape: MicroShape, num_picks: int, part: int
) -> MicroBatch:
    whole = len(rows), shape.length
    tokens, positions = np.zeros(whole, np.int32), np.zeros(whole, np.int32)
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
            positions[number, shared] = np.arange(placed.prompt)
            positions[number, own] = placed.prompt + np.arange(own.stop - own.start)
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
    """A rollout in rows and micro-batches; what was packed once is returned again to whoever computes on it next.

    `members` are the samples to pack, None for all; the other arguments are those of `pack` and `micro_batches`.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self._pack = cache(partial(pack, rollout))
        self._micro_batches = cache(partial(micro_batches, rollout))

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
    """Returns the share of the graphs' `num_tokens` positions that hold no token of a sample or prompt."""
    used = 0
    for row in rows:
        prompts = {placed.prompt_start: placed.prompt for placed in row}
        used += sum(prompts.values()) + sum(max(0, placed.completion - 1) for placed in row)
    return 1.0 - used / num_tokens
