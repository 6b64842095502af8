"""Chooses the row length of a step among the few micro-batch shapes that graphs are compiled for. Pure.

A choice depends only on the samples and on earlier choices, so that every rank makes the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindgrpo.algorithm.packing import (
    PICK_BUCKETS,
    MicroShape,
    PackedRollout,
    most_picks,
    num_micro_batches,
)

# Shorter rows are not worth a compile.
SHORTEST = 64
# The maximum number of shapes, (length, picks), that one kind of graph is compiled for in a run.
MAX_SHAPES = 4
# The fixed cost of a micro-batch, in tokens: it reads all weights, and reads and writes all gradients.
TOKENS_PER_MICRO_BATCH = 128
# The tokens of excess padding after which a better shape is compiled: about the cost of a compilation.
TOKENS_PER_COMPILE = 1 << 16


def row_lengths(widest: MicroShape) -> tuple[int, ...]:
    """Returns the allowed row lengths: powers of two, rounded up to `widest.unit`, and `widest.length` itself."""
    longest, unit = widest.length, widest.unit
    powers = (1 << exponent for exponent in range(SHORTEST.bit_length() - 1, longest.bit_length()))
    lengths = (-(-power // unit) * unit for power in powers)
    return (*(length for length in lengths if length < longest), longest)


@dataclass(frozen=True)
class _Option:
    """A row length that fits the samples: `shape`, with the picks of a new graph, and the `num_picks` needed."""

    shape: MicroShape
    num_picks: int
    cost: float


class ShapeChoice:
    """Chooses the shapes of one kind of graph, none with more tokens than `widest`.

    `column_cost` is the cost of a token's attention to one column relative to its GEMMs; 0 where attention skips
    padding (ragged kernels). The first samples get the cheapest shape; later ones the best shape in use, until excess
    padding has cost as much as a compilation or no shape in use fits.
    """

    def __init__(self, widest: MicroShape, column_cost: float = 0.0) -> None:
        self.widest, self._column_cost = widest, column_cost
        # (length, picks) in the order of first use, and the excess tokens computed since the last one was added.
        self.in_use: tuple[tuple[int, int], ...] = ()
        self.excess = 0

    def restore(self, in_use: Sequence[tuple[int, int]], excess: int) -> None:
        """Restores the choices of an earlier session, except shapes larger than `widest`."""
        length, most = self.widest.length, self.widest.rows * self.widest.length
        self.in_use = tuple((n, picks) for n, picks in in_use if n <= length and picks <= most)
        self.excess = excess

    def look(
        self, packed: PackedRollout, num_shares: int, members: Sequence[int] | None = None
    ) -> MicroShape:
        """Returns the shape that `choose` would return, without recording it."""
        return self._decide(self._options(packed, num_shares, members))[0]

    def choose(
        self, packed: PackedRollout, num_shares: int, members: Sequence[int] | None = None
    ) -> MicroShape:
        """Returns the shape in which `members` (None: all samples) are computed on `num_shares` data-parallel ranks."""
        options = self._options(packed, num_shares, members)
        shape, excess = self._decide(options)
        self.excess += excess
        used = shape.length, shape.picks or shape.tokens
        if used not in self.in_use:
            self.in_use, self.excess = (*self.in_use, used), 0
        return shape

    def _options(
        self, packed: PackedRollout, num_shares: int, members: Sequence[int] | None
    ) -> list[_Option]:
        lengths = packed.rollout.total_lengths
        longest = int(max(lengths if members is None else lengths[list(members)], default=0))
        fitting = [n for n in row_lengths(self.widest) if n >= longest]
        options = []
        # If a sample fits no row, packing raises the error.
        for length in fitting or [self.widest.length]:
            shape = replace(self.widest, length=length)
            rows = packed.rows(shape, members)
            count = num_micro_batches(rows, shape, num_shares)
            needed = most_picks(rows, shape, num_shares)
            bucket = -(-shape.tokens // PICK_BUCKETS)
            # Leaves room for the next steps' samples, which may need a few more.
            picks = -(-(needed + bucket // 2) // bucket) * bucket
            # A cp rank with the last token of a shared prompt may need more picks than it has tokens.
            shape = replace(shape, picks=max(needed, min(max(picks, 1), shape.tokens)))
            tokens = shape.tokens * (1.0 + length * self._column_cost)
            options.append(_Option(shape, needed, count * (TOKENS_PER_MICRO_BATCH + tokens)))
        return options

    def _decide(self, options: Sequence[_Option]) -> tuple[MicroShape, int]:
        """Returns the shape, and its cost in excess of the best option's, in tokens."""
        best = min(options, key=lambda option: option.cost)
        usable = [
            (option.cost, replace(option.shape, picks=picks))
            for option in options
            for length, picks in self.in_use
            if length == option.shape.length and picks >= option.num_picks
        ]
        num_in_use = len(self.in_use)
        if usable:
            cost, shape = min(usable, key=lambda pair: (pair[0], pair[1].picks))
            excess = int(cost - best.cost)
            pays = excess > 0 and self.excess + excess > TOKENS_PER_COMPILE
            # The last free shape is reserved for samples that fit no other.
            if not pays or num_in_use >= MAX_SHAPES - 1:
                return shape, excess
        if not num_in_use:
            return best.shape, 0
        # A late shape has picks for all of its tokens, so that later samples fit.
        late = (options[-1] if num_in_use >= MAX_SHAPES - 1 else best).shape
        return replace(late, picks=max(late.tokens, late.picks or 0)), 0
