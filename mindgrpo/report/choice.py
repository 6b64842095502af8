"""Which steps and groups of samples a page shows, where all would be too many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from mindgrpo.report.rows import Row

Group = list[tuple[int, Row]]
"""Samples that are compared with each other, with their numbers in the step."""


def evenly(items: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= limit:
        return list(items)
    if limit <= 1:
        return list(items[-1:])
    last = len(items) - 1
    return [items[round(i * last / (limit - 1))] for i in range(limit)]


def spread(count: int) -> Iterator[int]:
    """0 ... count - 1: the first, the last, then what is in the middle of the widest gaps."""
    yield from range(min(count, 1))
    if count > 1:
        yield count - 1
    gaps = [(0, count - 1)] if count > 2 else []
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle != low:
            yield middle
            gaps += [(low, middle), (middle, high)]


def groups_of(rows: Sequence[Row | None], group_size: int) -> list[Group]:
    """Consecutive samples, so many as the size says, or where that is not known (0) those of one prompt.

    An environment may give each sample of a group a prompt of its own.
    """

    def key(pair: tuple[int, Row | None]) -> int | str:
        number, row = pair
        return number // group_size if group_size else str((row or {}).get("prompt", ""))

    groups = [list(pairs) for _, pairs in groupby(enumerate(rows), key)]
    whole = [[(i, row) for i, row in group if row is not None] for group in groups]
    return [group for group in whole if group]


def stratified(means: Sequence[float]) -> list[int]:
    """All groups by their mean reward: the lowest, the highest, then evenly between them."""
    ranked = sorted(range(len(means)), key=lambda i: means[i])
    return [ranked[i] for i in spread(len(means))]
