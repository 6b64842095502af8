"""The sums of weights/checksum.py, computed where the weights are."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindgrpo.weights.checksum import MODULUS, factors_of, part_sums
from mindgrpo.weights.local_weights import Weights


def sums_of(weights: Weights) -> dict[str, int]:
    """What `part_sums` gives for this rank's slices, on any device."""
    return part_sums(weights) if weights.pool.is_host_memory else device_sums(weights)


def device_sums(weights: Weights) -> dict[str, int]:
    """Computed on the device; only the sums come to the host."""
    sums = {}
    for name in weights.names:
        part, box = weights.part(name), weights.boxes[name]
        factors = [factors_of(box.start[i], box.stop[i], i) for i in range(len(box.start))]
        if len(factors) == 1:
            factors = [factors_of(0, 1, 0), factors_of(box.start[0], box.stop[0], 1)]
        rows, columns = (Tensor(f.view(np.int32)) for f in factors)
        if weights.is_transposed(name):
            rows, columns = columns, rows
        bits = _bits(part.reshape(rows.size, columns.size))
        upper = ops.bitwise_and(ops.bitwise_right_shift(bits, 16), 0xFFFF)
        bits = ops.bitwise_xor(bits, upper)
        # Products wrap, and so a sum of any width has the sum's lower 32 bits.
        terms = bits * rows.reshape(-1, 1) * columns.reshape(1, -1)
        sums[name] = int(terms.sum().asnumpy()) % MODULUS
    return sums


def _bits(part: Any) -> Any:
    """int32, the elements' bits: of two bytes, the upper ones are zero."""
    if part.dtype == ms.float32:
        return part.view(ms.int32)
    return ops.bitwise_and(part.view(ms.int16).astype(ms.int32), 0xFFFF)
