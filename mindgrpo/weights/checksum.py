"""Sums weights' bits, independent of the layout: equal sums show that two layouts hold the same values.

An element's bits, mixed, are multiplied by a factor of each of its global indices, modulo 2^32, so that slices which
were exchanged change the sum as well. Computed where the weights are: on the host, or on the device.
docs/architecture.md says why there are other checksums.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache, reduce
from itertools import chain
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import bits_of, device_bits
from mindgrpo.backend.kernels.mindspore_ops import right_shift
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec
from mindgrpo.weights.local_weights import FusedTensor, Weights

# So that they stay in a core's cache.
ELEMENTS_AT_ONCE = 1 << 18
# On a device, of which it has some copies in 32 bits.
DEVICE_ELEMENTS = 1 << 25
MODULUS = 1 << 32
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def host_sums(weights: Weights) -> dict[str, int]:
    """Returns the sums of the values as they arrive in the host's memory."""
    with weights.on_host() as host:
        return {name: box_sum(part, weights.boxes[name]) for name, part in host.hf_views.items()}


def box_sum(part: np.ndarray, box: Box) -> int:
    """Returns the sum of `box` of a parameter of any dtype, [..., out, in] or one-dimensional."""
    *leading, rows, columns = _factors(box)
    if leading:
        inner = Box(box.start[1:], box.stop[1:])
        sums = [int(f) * box_sum(one, inner) for f, one in zip(leading[0], part, strict=True)]
        return sum(sums) % MODULUS
    bits = bits_of(part)
    if bits.ndim == 1:
        bits = bits[None]
    if bits.strides[0] < bits.strides[1]:
        bits, rows, columns = bits.T, columns, rows
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, bits.shape[1]))
    total, room = 0, np.empty((min(at_once, len(bits)), bits.shape[1]), np.uint32)
    for start in range(0, len(bits), at_once):
        block = slice(start, start + at_once)
        own = bits[block].astype(np.uint32, copy=False)
        # The upper half in the lower one, too: of two changed signs alone, the sum modulo 2^32 would not change.
        mixed = np.right_shift(own, np.uint32(16), out=room[: len(own)])
        np.bitwise_xor(mixed, own, out=mixed)
        np.multiply(mixed, columns, out=mixed)
        of_rows = mixed.sum(axis=1, dtype=np.uint32) * rows[block]
        total += int(of_rows.sum(dtype=np.uint32))
    return total % MODULUS


class PartSums:
    """Sums the weights of one rank, again and again, where they are: on a device in a graph for the tensors of a layer.

    It is compiled once for layers of the same shapes, and what it takes of a shape stays on the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._graph = backend.graph(_SumsOfColumns(), "checksum")
        self._factors: dict[Hashable, Any] = {}

    def of(self, weights: Weights) -> dict[str, int]:
        """Returns the sum of this rank's slice of each parameter: `box_sum` of it."""
        if weights.pool.is_host_memory:
            return host_sums(weights)
        columns = [self._columns_of(weights, layer) for layer in layers_of(weights)]
        if not columns:
            return {}
        # In one piece to the host.
        sums = ops.concat(columns).asnumpy().astype(np.uint32)
        return _sums_of_parameters(weights, sums)

    def _columns_of(self, weights: Weights, layer: Sequence[FusedTensor]) -> Any:
        bits = [device_bits(weights.parameters[entry.key]) for entry in layer]
        return self._graph(*bits, *(self._factors_of(weights, entry) for entry in layer))

    def _factors_of(self, weights: Weights, entry: FusedTensor) -> Any:
        spec = next(spec for spec in entry.specs if spec.name in weights.boxes)
        box = weights.boxes[spec.name]
        key = box, spec.transposed, entry.shape
        if key not in self._factors:
            rows = _row_factors(spec, box, entry.shape)
            self._factors[key] = Tensor(rows.view(np.int32)[:, None])
        return self._factors[key]


def layers_of(weights: Weights) -> list[list[FusedTensor]]:
    """Returns the tensors that this rank has a part of, layer by layer, and the others together."""
    layers: dict[str, list[FusedTensor]] = {}
    for entry in weights.fused:
        if any(spec.name in weights.boxes for spec in entry.specs):
            number = re.search(r"\.\d+\.", entry.key)
            layers.setdefault(number[0] if number else "", []).append(entry)
    return list(layers.values())


def sum_bytes(largest: int) -> int:
    """Returns the bytes of the copies for a tensor of `largest` elements: own bits, those mixed, and products."""
    return 4 * 4 * min(largest, DEVICE_ELEMENTS)


def _row_factors(spec: ParameterSpec, box: Box, shape: Sequence[int]) -> np.ndarray:
    """Returns a factor for each row of a stored tensor [shape], 0 for rows that its parameters do not reach."""
    factors = spec.as_stored(_factors(box))[:-1]
    room = np.zeros(shape[:-1] or (1,), np.uint32)
    room[tuple(slice(0, own.size) for own in factors)] = reduce(np.multiply.outer, factors)
    return room.ravel()


def _sums_of_parameters(weights: Weights, columns: np.ndarray) -> dict[str, int]:
    """Returns the parameters' sums; `columns` are those of `layers_of`, one after the other."""
    sums = dict.fromkeys(weights.names, 0)
    first = 0
    for entry in chain(*layers_of(weights)):
        width = entry.shape[-1]
        for spec in entry.specs:
            if spec.name in weights.boxes:
                own = columns[first : first + width][weights.region(spec.name).slices[-1]]
                factors = spec.as_stored(_factors(weights.boxes[spec.name]))[-1]
                sums[spec.name] = int((own * factors).sum(dtype=np.uint32))
        first += width
    return sums


class _SumsOfColumns(nn.Cell):
    """Bits of tensors [..., n], then integers [rows, 1] for the rows of each -> integers, n for each tensor."""

    def construct(self, *both: Any) -> Any:
        count = len(both) // 2
        made: list[Any] = []
        for i in range(count):
            width = both[i].shape[-1]
            bits, factors = both[i].reshape(-1, width), both[count + i]
            at_once = max(1, DEVICE_ELEMENTS // width)
            if i > 0:
                # One after the other, as each takes copies of its own.
                bits = ops.depend(bits, made[-1])
            if bits.shape[0] <= at_once:
                made.append(sums_of_columns(bits, factors))
                continue
            total = sums_of_columns(bits[:at_once], factors[:at_once])
            for start in range(at_once, bits.shape[0], at_once):
                stop = start + at_once
                own = ops.depend(bits[start:stop], total)
                total = total + sums_of_columns(own, factors[start:stop])
            made.append(total)
        return ops.concat(made)


def sums_of_columns(bits: Any, factors: Any) -> Any:
    """Returns integers [n] for bits [m, n] and factors [m, 1] of their rows."""
    # Products wrap, and so a sum of any width has the sum's lower 32 bits.
    return (_mixed(bits) * factors).sum(0)


def _mixed(bits: Any) -> Any:
    """Returns bits of elements as int32, the upper half of four bytes in the lower one, too."""
    if bits.dtype == ms.int16:
        # Nothing is above: a shift would add zeros.
        return ops.bitwise_and(bits.astype(ms.int32), 0xFFFF)
    return ops.bitwise_xor(bits, right_shift(bits, 16))


def _factors(box: Box) -> list[np.ndarray]:
    """Returns the factors of each dim's indices, of at least two dims: a vector is one row."""
    start, stop = (
        (0, *box.start)[-max(2, len(box.start)) :],
        (1, *box.stop)[-max(2, len(box.stop)) :],
    )
    kinds = [*range(len(start) - 1, 1, -1), 0, 1]
    return [factors_of(*edges) for edges in zip(start, stop, kinds, strict=True)]


@lru_cache(maxsize=64)
def factors_of(start: int, stop: int, dim: int) -> np.ndarray:
    """Returns uint32 [stop - start], all odd: a change of one element always shows.

    Products wrap, and so numbers of 32 bits give the sum's lower 32.
    """
    values = (np.arange(start, stop, dtype=np.uint64) + np.uint64(1 + (dim << 40))) * GOLDEN
    values ^= values >> np.uint64(29)
    factors = (values | np.uint64(1)).astype(np.uint32)
    factors.flags.writeable = False
    return factors


def total_sums(
    layout: Layout, by_rank: Sequence[dict[str, int]], modulus: int = 1 << 64
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Returns each parameter's complete sum, and the ranks whose copy differs from the first holder's, by parameter.

    `by_rank[i]` are rank i's of `layout`. Of ranks that hold the same box one is counted.
    """
    totals: dict[str, int] = {}
    wrong: dict[str, list[int]] = {}
    first: dict[tuple[str, Box], int] = {}
    for rank, sums in enumerate(by_rank):
        boxes = layout.held_by(rank) if sums else {}
        for name, value in sums.items():
            key = (name, boxes[name])
            if key not in first:
                first[key] = value
                totals[name] = (totals.get(name, 0) + value) % modulus
            elif first[key] != value:
                wrong.setdefault(name, []).append(rank)
    return totals, wrong
