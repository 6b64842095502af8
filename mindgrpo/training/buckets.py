"""Which gradients are summed over ranks in one call. Pure."""

from __future__ import annotations

from collections.abc import Sequence

# Large enough for the links, small beside the gradients.
BUCKET_BYTES = 64 << 20


def buckets(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Indices of neighbours that share a bucket, by their numbers of float32; one that is larger is alone."""
    by_bucket: list[list[int]] = [[]]
    room = BUCKET_BYTES // 4
    for index, size in enumerate(sizes):
        if by_bucket[-1] and size > room:
            by_bucket.append([])
            room = BUCKET_BYTES // 4
        by_bucket[-1].append(index)
        room -= size
    return tuple(map(tuple, by_bucket))
