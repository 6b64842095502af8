"""Fetches entries of remote per-token arrays from the ranks that own them to the ranks that need them.

For a large model these arrays are gigabytes a step, one byte per token, layer and chosen expert, too much to broadcast
with the samples. Each rank fetches only the samples of its rows and the layers of its stage, when it plans its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from mindgrpo.algorithm.sample import Rollout
from mindgrpo.algorithm.token_arrays import RemoteArray, RemoteSegment, Segment
from mindgrpo.backend.contract import Group

# The default size of a batch that is gathered on the first rank to be written.
FEW_BYTES = 32 << 20


class FetchedArrays(Mapping[int, np.ndarray]):
    """Maps a sample's index to its entries [tokens, len(columns), ...] of a remote array [tokens, C, ...].

    `columns` are indices of dim 1, such as the layers of a stage; the mapping is empty without any. A sample owned by
    another rank has to be fetched first. `arrays` must be the same on every rank of `world`. `fetch` is collective, but
    each rank passes only the samples that it needs.
    """

    def __init__(self, arrays: Sequence[RemoteArray], columns: Sequence[int], world: Group) -> None:
        self._columns, self._world = list(columns), world
        self._rank = world.ranks[world.index]
        # Numbers are the same on every rank, and a segment shared by several samples has one number.
        numbers: dict[int, int] = {}
        self._segments: list[Segment] = []
        for segment in (segment for array in arrays for segment in array.segments):
            if id(segment) not in numbers:
                numbers[id(segment)] = len(self._segments)
                self._segments.append(segment)
        self._numbers = [[numbers[id(segment)] for segment in array.segments] for array in arrays]
        self._arrived: dict[int, np.ndarray] = {}
        self.bytes_received = 0

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.concatenate([self._segment(number) for number in self._numbers[sample]])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._numbers) if self._columns else 0

    def _segment(self, number: int) -> np.ndarray:
        if number in self._arrived:
            return self._arrived[number]
        return np.asarray(self._segments[number])[:, self._columns]

    def fetch(self, samples: Iterable[int]) -> None:
        """Collective call: receives the entries of `samples` that are not on this rank yet from their owners."""
        if self._world.size == 1:
            return
        needed = {number for sample in samples for number in self._numbers[sample]}
        missing = sorted(n for n in needed if not self._is_here(n)) if self._columns else []
        asked = self._world.gather_objects((missing, self._columns))
        if not any(numbers for numbers, _ in asked):
            return
        parcels = [
            _joined(
                np.asarray(self._segments[number])[:, columns]
                for number in numbers
                if _owner(self._segments[number]) == self._rank
            )
            for numbers, columns in asked
        ]
        arrived = dict(zip(self._world.ranks, self._world.exchange_bytes(parcels), strict=True))
        taken = dict.fromkeys(arrived, 0)
        for number in missing:
            segment = self._segments[number]
            count, _, *entry = segment.shape
            shape, rank = (count, len(self._columns), *entry), _owner(segment)
            size = prod(shape) * segment.dtype.itemsize
            values = arrived[rank][taken[rank] : taken[rank] + size]
            # A copy, so that its memory is aligned.
            self._arrived[number] = np.frombuffer(values.tobytes(), segment.dtype).reshape(shape)
            taken[rank] += size
        self.bytes_received += sum(taken.values())

    def _is_here(self, number: int) -> bool:
        segment = self._segments[number]
        return (
            number in self._arrived or isinstance(segment, np.ndarray) or segment.values is not None
        )

    def owned(self, samples: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
        """Yields (segment [tokens, C, ...], number of `samples` with it) for each segment that this rank owns."""
        times = np.zeros(len(self._segments), np.int64)
        for sample in samples:
            np.add.at(times, self._numbers[sample], 1)
        for segment, count in zip(self._segments, times.tolist(), strict=True):
            if count and _owner(segment) == self._rank:
                yield np.asarray(segment), count


def _owner(segment: Segment) -> int:
    return segment.owner if isinstance(segment, RemoteSegment) else 0


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    flat = [np.ascontiguousarray(own).reshape(-1).view(np.uint8) for own in arrays]
    return np.concatenate([np.zeros(0, np.uint8), *flat])


def gathered(
    arrays: Sequence[RemoteArray], world: Group, most_bytes: int = FEW_BYTES
) -> Iterator[np.ndarray]:
    """Yields each sample's entries [tokens, C, ...] on the first rank, and empty arrays on all other ranks.

    Collective: all ranks must iterate to the end. The first rank receives batches of samples of about `most_bytes`, or
    of one sample.
    """
    is_first, begin, size = world.index == 0, 0, 0
    for stop, array in enumerate(arrays, start=1):
        size += prod(array.shape) * array.dtype.itemsize
        if size < most_bytes and stop < len(arrays):
            continue
        few = FetchedArrays(arrays[begin:stop], range(array.shape[1]), world)
        few.fetch(range(len(few)) if is_first else ())
        for i in range(len(few)):
            yield few[i] if is_first else np.zeros(0, array.dtype)
        begin, size = stop, 0


def gathered_arrays(rollout: Rollout, world: Group) -> dict[str, list[RemoteArray]]:
    """Collective call: returns a rollout's remote arrays by name, complete on the first rank and empty elsewhere."""
    return {
        name: [RemoteArray((own,)) for own in gathered(arrays, world)]
        for name, arrays in rollout.token_arrays.items()
        if isinstance(arrays[0], RemoteArray)
    }
