"""The sums of weights/checksum.py, computed where the weights are."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindgrpo.weights.checksum import MODULUS, factors_of, part_sums
from mindgrpo.weights.local_weights import Weights, device_bits


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
        bits = _mixed(part.reshape(rows.size, columns.size))
        # Products wrap, and so a sum of any width has the sum's lower 32 bits.
        terms = bits * rows.reshape(-1, 1) * columns.reshape(1, -1)
        sums[name] = int(terms.sum().asnumpy()) % MODULUS
    return sums


def _mixed(part: Any) -> Any:
    """int32, the elements' bits, the upper half of four bytes in the lower one, too."""
    bits = device_bits(part)
    if bits.dtype == ms.int16:
        # Nothing is above: a shift, which NPUs have no vectors for, would add zeros.
        return ops.bitwise_and(bits.astype(ms.int32), 0xFFFF)
    upper = ops.bitwise_and(ops.bitwise_right_shift(bits, 16), 0xFFFF)
    return ops.bitwise_xor(bits, upper)
