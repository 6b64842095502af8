"""Sums weights' bits, independent of the layout: equal sums show that two layouts hold the same values.

An element's bits, mixed, are multiplied by a factor of each of its global indices, modulo 2^32, so that slices which
were exchanged change the sum as well. Computed where the weights are: on the host, or on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindgrpo.backend.dtypes import bits_of, device_bits
from mindgrpo.backend.kernels.mindspore_ops import right_shift
from mindgrpo.parallel.sharding import Box, Layout, ParameterSpec
from mindgrpo.weights.local_weights import Weights

# So that they stay in a core's cache.
ELEMENTS_AT_ONCE = 1 << 18
# On a device, of which it has some copies in 32 bits.
DEVICE_ELEMENTS = 1 << 25
MODULUS = 1 << 32
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def part_sums(weights: Weights) -> dict[str, int]:
    """Returns the sum of this rank's slice of each parameter, computed where the weights are."""
    return host_sums(weights) if weights.pool.is_host_memory else device_sums(weights)


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


def device_sums(weights: Weights) -> dict[str, int]:
    """Returns what `box_sum` gives for this rank's parameters.

    The device adds up each column of each stored tensor; the columns' sums are copied in one piece.
    """
    columns, where = [], []
    for entry in weights.fused:
        specs = [spec for spec in entry.specs if spec.name in weights.boxes]
        if not specs:
            continue
        bits = device_bits(weights.parameters[entry.key]).reshape(-1, entry.shape[-1])
        rows = _row_factors(specs[0], weights.boxes[specs[0].name], entry.shape)
        at_once = max(1, DEVICE_ELEMENTS // entry.shape[-1])
        for start in range(0, len(rows), at_once):
            block = slice(start, start + at_once)
            factors = Tensor(rows[block].view(np.int32)[:, None])
            own = bits if len(factors) == len(rows) else bits[block]
            columns.append(sums_of_columns(own, factors))
            where.append((entry.shape[-1], specs))
    if not columns:
        return {}
    return _sums_of_parameters(weights, ops.concat(columns).asnumpy().astype(np.uint32), where)


def sum_bytes(largest: int) -> int:
    """Returns the bytes that `device_sums` takes for a tensor of `largest` elements: bits, mixed, and products."""
    return 4 * 3 * min(largest, DEVICE_ELEMENTS)


def _row_factors(spec: ParameterSpec, box: Box, shape: Sequence[int]) -> np.ndarray:
    """Returns a factor for each row of a stored tensor [shape], 0 for rows that its parameters do not reach."""
    factors = spec.as_stored(_factors(box))[:-1]
    room = np.zeros(shape[:-1] or (1,), np.uint32)
    room[tuple(slice(0, own.size) for own in factors)] = reduce(np.multiply.outer, factors)
    return room.ravel()


def _sums_of_parameters(
    weights: Weights, columns: np.ndarray, where: Sequence[tuple[int, Sequence[ParameterSpec]]]
) -> dict[str, int]:
    """Returns the parameters' sums. `where` has the width of each run of `columns` and the parameters in it."""
    sums = dict.fromkeys(weights.names, 0)
    first = 0
    for width, specs in where:
        for spec in specs:
            own = columns[first : first + width][weights.region(spec.name).slices[-1]]
            factors = spec.as_stored(_factors(weights.boxes[spec.name]))[-1]
            sums[spec.name] += int((own * factors).sum(dtype=np.uint32))
        first += width
    return {name: total % MODULUS for name, total in sums.items()}


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

    `by_rank[i]` are rank i's `part_sums` of `layout`. Of ranks that hold the same box one is counted.
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
