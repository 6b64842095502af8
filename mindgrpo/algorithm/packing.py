"""Packs samples into fixed rows and rows into micro-batches, and puts per-token results back in order of samples. Pure.

A row holds bundles: a prompt once, then the completions of several of its samples. Samples share a prompt where its
token ids are equal, whatever their groups are. A sample's last token predicts nothing and is left out. No sample is cut
or dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from mindgrpo.algorithm.sample import TOKEN_ARRAYS, Arrays, Rollout
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


PackedRow = tuple[Placed, ...]


@dataclass(frozen=True)
class MicroShape:
    """`rows` x `length` tokens a micro-batch; at most `max_per_row` samples a row, None for as many as fit.

    Of the tokens `picks` predict at most; None for a part of all that holds what is needed. `length` is a multiple of
    `unit`, so that tokens divide among ranks.
    """

    rows: int
    length: int
    max_per_row: int | None = None
    picks: int | None = None
    unit: int = 1

    @property
    def tokens(self) -> int:
        return self.rows * self.length


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
class MicroBatch:
    """int32: `tokens`, `positions` [R, T], `spans` [R, T, 3] (backend/kernels/contract.py); `picks` [M], the positions
    among R * T that predict, -1 on padding, and `labels` [M], what comes after them. `actions` bool [M] says which
    labels the policy wrote; padding is none. `arrays` [R, T, ...] are the declared per-token arrays that are inputs.
    """

    rows: tuple[PackedRow, ...]
    tokens: np.ndarray
    positions: np.ndarray
    spans: np.ndarray
    picks: np.ndarray
    labels: np.ndarray
    actions: np.ndarray
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def spread(self, values: Arrays | np.ndarray) -> np.ndarray:
        """Spreads per-sample scalars or per-token arrays over the predicting positions: float32 [M], 0 on padding."""
        out = np.zeros(self.picks.shape, np.float32)
        for sample, own in self._samples():
            out[own] = values[sample]
        return out

    def gather(self, values: np.ndarray) -> dict[int, np.ndarray]:
        """Splits [M] values of the predicting positions into arrays [completion length] by sample."""
        return {sample: values[own].copy() for sample, own in self._samples()}

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns two arrays [M]: int32, the first position of each position's sample; float32, one over its action
        tokens.

        A padding position has itself and 0.
        """
        starts, shares = np.arange(self.picks.size, dtype=np.int32), np.zeros(self.picks.size)
        for _, own in self._samples():
            starts[own] = own.start
            shares[own] = 1.0 / max(1, np.count_nonzero(self.actions[own]))
        return starts, shares.astype(np.float32)

    def _samples(self) -> Iterator[tuple[int, slice]]:
        """Yields each sample and its part of the M predicting positions."""
        start = 0
        for placed in (placed for row in self.rows for placed in row):
            yield placed.sample, slice(start, start + placed.completion)
            start += placed.completion


def num_micro_batches(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Counts the micro-batches of each of `num_shares` data-parallel ranks; one at least."""
    return max(1, -(-len(rows) // (shape.rows * num_shares)))


def most_picks(rows: Sequence[PackedRow], shape: MicroShape, num_shares: int) -> int:
    """Returns the most predicting positions of any rank's micro-batch."""
    return max(
        sum(placed.completion for row in batch for placed in row)
        for share in range(num_shares)
        for batch in _batches(rows, shape, num_shares, share)
    )


def micro_batches(
    rollout: Rollout, rows: Sequence[PackedRow], shape: MicroShape, num_shares: int, share: int
) -> list[MicroBatch]:
    """Returns the micro-batches of data-parallel rank `share` of `num_shares`.

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
    return [_arrays(rollout, batch, shape.length, picks) for batch in batches]


def _batches(
    rows: Sequence[PackedRow], shape: MicroShape, num_shares: int, share: int
) -> list[tuple[PackedRow, ...]]:
    """Returns the rows of each of a rank's micro-batches."""
    count = num_micro_batches(rows, shape, num_shares)
    mine = list(rows[share::num_shares])
    mine += [()] * (count * shape.rows - len(mine))
    return [tuple(mine[i : i + shape.rows]) for i in range(0, len(mine), shape.rows)]


def _arrays(
    rollout: Rollout, rows: tuple[PackedRow, ...], row_length: int, num_picks: int
) -> MicroBatch:
    shape = (len(rows), row_length)
    tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    spans = np.zeros((*shape, 3), np.int32)
    spans[:, :, 2] = np.arange(row_length)  # padding sees itself
    picks, labels = np.full(num_picks, -1, np.int32), np.zeros(num_picks, np.int32)
    actions = np.zeros(num_picks, bool)
    arrays = {
        name: np.full((*shape, *declared.trailing), declared.on_context or 0, declared.dtype)
        for name, declared in TOKEN_ARRAYS.items()
        if declared.is_input and name in rollout.token_arrays
    }
    count = 0
    for index, row in enumerate(rows):
        for placed in row:
            completion = rollout.completion_ids[placed.sample]
            shared = slice(placed.prompt_start, placed.prompt_start + placed.prompt)
            own = slice(placed.start, placed.start + max(0, placed.completion - 1))
            tokens[index, shared] = rollout.prompt_ids[placed.sample]
            tokens[index, own] = completion[:-1]
            for name, values in arrays.items():
                values[index, own] = rollout.token_arrays[name][placed.sample][:-1]
            positions[index, shared] = np.arange(placed.prompt)
            positions[index, own] = placed.prompt + np.arange(own.stop - own.start)
            spans[index, shared] = (0, 0, placed.prompt_start)
            spans[index, own] = (placed.prompt_start, placed.prompt, placed.start)
            end = count + placed.completion
            picks[count:end] = index * row_length + placed.columns
            labels[count:end] = completion
            actions[count:end] = rollout.action_mask[placed.sample]
            count = end
    return MicroBatch(rows, tokens, positions, spans, picks, labels, actions, arrays)


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
        self, shape: MicroShape, num_shares: int, share: int, members: Sequence[int] | None = None
    ) -> list[MicroBatch]:
        return self._micro_batches(self.rows(shape, members), shape, num_shares, share)


def padding_share(rows: Sequence[PackedRow], num_tokens: int) -> float:
    """Returns the share of the graphs' `num_tokens` positions that hold no token of a sample or prompt."""
    used = 0
    for row in rows:
        prompts = {placed.prompt_start: placed.prompt for placed in row}
        used += sum(prompts.values()) + sum(max(0, placed.completion - 1) for placed in row)
    return 1.0 - used / num_tokens
