"""Checksums of weights that do not depend on the layout: equal sums show that two layouts hold the same values.

A parameter's checksum is the sum of its elements' mixed bits, each multiplied by a factor for every global index,
modulo 2^32; the factors detect swapped slices. It is computed where the weights are, on the host or on the device.
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

# Elements per block on the host, which fit a core's cache.
ELEMENTS_AT_ONCE = 1 << 18
# Elements per block on a device, which makes several 32-bit copies of them.
DEVICE_ELEMENTS = 1 << 25
MODULUS = 1 << 32
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def host_sums(weights: Weights) -> dict[str, int]:
    """Returns the checksum of each of the rank's boxes by parameter name, computed on the host."""
    with weights.on_host() as host:
        return {name: box_sum(part, weights.boxes[name]) for name, part in host.hf_views.items()}


def box_sum(part: np.ndarray, box: Box) -> int:
    """Returns the checksum of `part`, which is `box` of a parameter: [..., out, in] or [n], any dtype and strides."""
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
        # Folds the upper half into the lower one: two flipped sign bits alone would cancel modulo 2^32.
        mixed = np.right_shift(own, np.uint32(16), out=room[: len(own)])
        np.bitwise_xor(mixed, own, out=mixed)
        np.multiply(mixed, columns, out=mixed)
        of_rows = mixed.sum(axis=1, dtype=np.uint32) * rows[block]
        total += int(of_rows.sum(dtype=np.uint32))
    return total % MODULUS


class PartSums:
    """Computes checksums of one rank's weights repeatedly, where they are; on a device with one graph call per layer.

    The graph is compiled once for layers of equal shapes; the row factors stay on the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._graph = backend.graph(_SumsOfColumns(), "checksum")
        self._factors: dict[Hashable, Any] = {}

    def of(self, weights: Weights) -> dict[str, int]:
        """Returns the checksum (`box_sum`) of this rank's box of each parameter."""
        if weights.pool.is_host_memory:
            return host_sums(weights)
        columns = [self._columns_of(weights, layer) for layer in layers_of(weights)]
        if not columns:
            return {}
        # One copy to the host for all layers.
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
    """Groups the rank's stored tensors by layer; those outside of layers form one group."""
    layers: dict[str, list[FusedTensor]] = {}
    for entry in weights.fused:
        if any(spec.name in weights.boxes for spec in entry.specs):
            number = re.search(r"\.\d+\.", entry.key)
            layers.setdefault(number[0] if number else "", []).append(entry)
    return list(layers.values())


def sum_bytes(largest: int) -> int:
    """Returns the temporary bytes to sum a tensor of `largest` elements: copies of bits, mixed bits and products."""
    return 4 * 4 * min(largest, DEVICE_ELEMENTS)


def _row_factors(spec: ParameterSpec, box: Box, shape: Sequence[int]) -> np.ndarray:
    """Returns the factor of each row of a stored tensor, uint32 [product of shape[:-1]]; 0 for rows of padding."""
    factors = spec.as_stored(_factors(box))[:-1]
    room = np.zeros(shape[:-1] or (1,), np.uint32)
    room[tuple(slice(0, own.size) for own in factors)] = reduce(np.multiply.outer, factors)
    return room.ravel()


def _sums_of_parameters(weights: Weights, columns: np.ndarray) -> dict[str, int]:
    """Returns checksums by parameter; `columns` uint32 are the stored tensors' column sums, ordered as `layers_of`."""
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
    """(bits [..., n_i] of k tensors, int32 row factors [rows_i, 1] of each) -> int32 column sums [n_1 + ... + n_k]."""

    def construct(self, *both: Any) -> Any:
        count = len(both) // 2
        made: list[Any] = []
        for i in range(count):
            width = both[i].shape[-1]
            bits, factors = both[i].reshape(-1, width), both[count + i]
            at_once = max(1, DEVICE_ELEMENTS // width)
            if i > 0:
                # Serialised, because each tensor takes temporary copies.
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
    """Returns int32 [n], the column sums of the mixed bits [m, n] times the row factors [m, 1]."""
    # Products wrap, so a sum of any integer width has the right lower 32 bits.
    return (_mixed(bits) * factors).sum(0)


def _mixed(bits: Any) -> Any:
    """Returns the elements' bits as int32, with the upper half of 32 bits folded into the lower one."""
    if bits.dtype == ms.int16:
        # 16 bits have no upper half to fold.
        return ops.bitwise_and(bits.astype(ms.int32), 0xFFFF)
    return ops.bitwise_xor(bits, right_shift(bits, 16))


def _factors(box: Box) -> list[np.ndarray]:
    """Returns the factors of the box's indices, uint32 [extent] for each dim; a vector counts as one row, [1, n]."""
    start, stop = (
        (0, *box.start)[-max(2, len(box.start)) :],
        (1, *box.stop)[-max(2, len(box.stop)) :],
    )
    kinds = [*range(len(start) - 1, 1, -1), 0, 1]
    return [factors_of(*edges) for edges in zip(start, stop, kinds, strict=True)]


@lru_cache(maxsize=64)
def factors_of(start: int, stop: int, dim: int) -> np.ndarray:
    """Returns the factors of indices [start, stop) of `dim`, uint32 [stop - start].

    They are odd, so that a change of a single element always changes the sum.
    """
    values = (np.arange(start, stop, dtype=np.uint64) + np.uint64(1 + (dim << 40))) * GOLDEN
    values ^= values >> np.uint64(29)
    factors = (values | np.uint64(1)).astype(np.uint32)
    factors.flags.writeable = False
    return factors


def total_sums(
    layout: Layout, by_rank: Sequence[dict[str, int]], modulus: int = 1 << 64
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Returns the checksums of whole parameters, and by parameter the ranks whose replica differs from the first.

    `by_rank[i]` are the sums of rank i's boxes in `layout`; of replicas of a box, one is counted.
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
