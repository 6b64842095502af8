"""Chooses how long a step's rows are, among the few shapes that graphs are compiled for. Pure.

A choice follows from the samples and the choices before, which are the same on every rank, and so is what is chosen.
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
# Of one kind of graph in a run, each a length and a number of picks.
MAX_SHAPES = 4
# What a micro-batch costs beside its tokens, in tokens: all weights are read, and gradients are read and written.
TOKENS_PER_MICRO_BATCH = 128
# As many tokens are computed too many before a better shape is compiled, which takes about as long as computing them.
TOKENS_PER_COMPILE = 1 << 16


def row_lengths(widest: MicroShape) -> tuple[int, ...]:
    """Returns the lengths that rows of up to `widest.length` tokens may have: powers of two, in its unit, and it."""
    longest, unit = widest.length, widest.unit
    powers = (1 << exponent for exponent in range(SHORTEST.bit_length() - 1, longest.bit_length()))
    lengths = (-(-power // unit) * unit for power in powers)
    return (*(length for length in lengths if length < longest), longest)


@dataclass(frozen=True)
class _Option:
    """A length that holds the samples: `shape` has the picks of a new graph, `num_picks` are needed."""

    shape: MicroShape
    num_picks: int
    cost: float


class ShapeChoice:
    """Chooses the shapes of one kind of graph, none of more tokens than `widest`.

    `column_cost` is what a token's attention to one column costs, as a share of its matrix products; 0 where attention
    follows the samples' lengths. The first samples get the shape that costs least. Later ones get the best of the
    shapes in use, until padding has cost as much as a compile, or none holds them.
    """

    def __init__(self, widest: MicroShape, column_cost: float = 0.0) -> None:
        self.widest, self._column_cost = widest, column_cost
        # (length, picks) in the order of their first use, and tokens computed too many since the last of them.
        self.in_use: tuple[tuple[int, int], ...] = ()
        self.excess = 0

    def restore(self, in_use: Sequence[tuple[int, int]], excess: int) -> None:
        """Continues from the choices of an earlier session; what is wider than `widest` is left out."""
        length, most = self.widest.length, self.widest.rows * self.widest.length
        self.in_use = tuple((n, picks) for n, picks in in_use if n <= length and picks <= most)
        self.excess = excess

    def look(
        self, packed: PackedRollout, num_shares: int, members: Sequence[int] | None = None
    ) -> MicroShape:
        """Returns what `choose` would."""
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
        # Packing says so where not even the widest rows hold a sample.
        for length in fitting or [self.widest.length]:
            shape = replace(self.widest, length=length)
            rows = packed.rows(shape, members)
            count = num_micro_batches(rows, shape, num_shares)
            needed = most_picks(rows, shape, num_shares)
            bucket = -(-shape.tokens // PICK_BUCKETS)
            # With room for the next samples, which may need a few more.
            picks = -(-(needed + bucket // 2) // bucket) * bucket
            # Of a rank that has the last token of a long group's prompt, more than it has tokens.
            shape = replace(shape, picks=max(needed, min(max(picks, 1), shape.tokens)))
            tokens = shape.tokens * (1.0 + length * self._column_cost)
            options.append(_Option(shape, needed, count * (TOKENS_PER_MICRO_BATCH + tokens)))
        return options

    def _decide(self, options: Sequence[_Option]) -> tuple[MicroShape, int]:
        """Returns the shape, and how many tokens' work it costs above the best one."""
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
            # The last one is left for samples that none of the others holds.
            if not pays or num_in_use >= MAX_SHAPES - 1:
                return shape, excess
        if not num_in_use:
            return best.shape, 0
        # A late shape has picks for all of its tokens, so that it holds what comes.
        late = (options[-1] if num_in_use >= MAX_SHAPES - 1 else best).shape
        return replace(late, picks=max(late.tokens, late.picks or 0)), 0
