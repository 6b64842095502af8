"""Brings routes of experts from the ranks that generated them to those that compute the tokens, and to no other.

A token has a byte for each of its experts in each layer: of a step of a large model these are gigabytes, which every
rank would get with the samples. A rank asks for its rows' samples and its stage's layers when it plans them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import numpy as np

from mindgrpo.algorithm.sample import ExpertRoutes, Routes
from mindgrpo.backend.contract import Group

Part = ExpertRoutes | np.ndarray
# Of what is passed on to be written, at a time.
FEW_BYTES = 32 << 20


class ReplayedRoutes(Mapping[int, np.ndarray]):
    """The engine's routes by sample, [prompt + completion - 1, L, K], of `layers` among all those with experts.

    A sample's are there once they were fetched. Empty where there are no layers. `world` are all ranks, which make the
    same calls with the same samples, but for `fetch`, which takes those that a rank needs.
    """

    def __init__(self, routes: Sequence[Routes], layers: Sequence[int], world: Group) -> None:
        self._routes, self._layers, self._world = routes, list(layers), world
        self._rank = world.ranks[world.index]
        # Parts are numbered alike on every rank, and those that samples share once.
        numbers: dict[int, int] = {}
        self._parts: list[Part] = []
        for own in routes:
            for part in own:
                if id(part) not in numbers:
                    numbers[id(part)] = len(self._parts)
                    self._parts.append(part)
        self._numbers = [[numbers[id(part)] for part in own] for own in routes]
        self._arrived: dict[int, np.ndarray] = {}
        self.bytes_received = 0

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.concatenate([self._part(number) for number in self._numbers[sample]])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._routes) if self._layers else 0

    def _part(self, number: int) -> np.ndarray:
        if number in self._arrived:
            return self._arrived[number]
        return np.asarray(self._parts[number])[:, self._layers]

    def fetch(self, samples: Iterable[int]) -> None:
        """Gets the routes of `samples` from other ranks, as far as they are not here; all ranks together."""
        if self._world.size == 1:
            return
        needed = {number for sample in samples for number in self._numbers[sample]}
        missing = sorted(n for n in needed if not self._is_here(n)) if self._layers else []
        asked = self._world.gather_objects((missing, self._layers))
        if not any(numbers for numbers, _ in asked):
            return
        parcels = [
            _joined(
                np.asarray(self._parts[number])[:, layers]
                for number in numbers
                if _owner(self._parts[number]) == self._rank
            )
            for numbers, layers in asked
        ]
        arrived = dict(zip(self._world.ranks, self._world.exchange_bytes(parcels), strict=True))
        taken = dict.fromkeys(arrived, 0)
        for number in missing:
            part = self._parts[number]
            count, _, slots = part.shape
            shape, rank = (count, len(self._layers), slots), _owner(part)
            size = count * len(self._layers) * slots * part.dtype.itemsize
            values = arrived[rank][taken[rank] : taken[rank] + size]
            # A copy, so that its memory is aligned.
            self._arrived[number] = np.frombuffer(values.tobytes(), part.dtype).reshape(shape)
            taken[rank] += size
        self.bytes_received += sum(taken.values())

    def _is_here(self, number: int) -> bool:
        part = self._parts[number]
        return number in self._arrived or isinstance(part, np.ndarray) or part.values is not None

    def load(self, samples: Sequence[int], num_experts: int) -> np.ndarray:
        """Counts each expert's tokens in `samples`, as expert_plan.load_by_expert; all ranks together.

        Each counts what it has generated, in all layers.
        """
        times = np.zeros(len(self._parts), np.int64)
        for sample in samples:
            np.add.at(times, self._numbers[sample], 1)
        layers = self._parts[0].shape[1]
        load = np.zeros(layers * num_experts, np.int64)
        first = np.arange(layers)[:, None] * num_experts
        for part, count in zip(self._parts, times.tolist(), strict=True):
            if count and _owner(part) == self._rank:
                flat = (np.asarray(part) + first).reshape(-1)
                load += count * np.bincount(flat, minlength=load.size)
        whole = self._world.sum_array(load).reshape(layers, num_experts)
        return whole[self._layers]


def _owner(part: Part) -> int:
    return part.rank if isinstance(part, ExpertRoutes) else 0


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    flat = [np.ascontiguousarray(own).reshape(-1).view(np.uint8) for own in arrays]
    return np.concatenate([np.zeros(0, np.uint8), *flat])


def gathered_on_first_rank(
    routes: Sequence[Routes], world: Group, most_bytes: int = FEW_BYTES
) -> Iterator[np.ndarray]:
    """Yields the routes of each sample as one array on the first rank, without values elsewhere.

    All ranks go through them together, to the end. The first gets those of a few samples at a time, of `most_bytes` or
    of one sample.
    """
    is_first, begin, size = world.index == 0, 0, 0
    for stop, own in enumerate(routes, start=1):
        size += sum(prod(part.shape) * part.dtype.itemsize for part in own)
        if size < most_bytes and stop < len(routes):
            continue
        few = ReplayedRoutes(routes[begin:stop], range(own[0].shape[1]), world)
        few.fetch(range(len(few)) if is_first else ())
        for i in range(len(few)):
            yield few[i] if is_first else np.zeros(0, own[0].dtype)
        begin, size = stop, 0
