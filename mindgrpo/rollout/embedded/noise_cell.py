"""The noise of rollout/noise.py as graph code: the same bits, in int32, whose products wrap as uint32's do.

The variates are computed in float32, of the smaller of u and 1 - u, and so to some 1e-6 what float64 gives.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.rollout.noise import TOKEN_STRIDE, TRIPLE32


def _signed(number: int) -> int:
    """The int32 with the bits of a uint32."""
    return int(np.uint32(number).astype(np.int32))


class _Triple32(nn.Cell):
    """(low int32 [B], high int32 [B]) -> int32 [B, numbers], see noise._triple32."""

    def __init__(self, numbers: np.ndarray) -> None:
        super().__init__()
        self.strides = Tensor((numbers * TOKEN_STRIDE).astype(np.int32)[None])
        self.shifts = tuple(shift for shift, _ in TRIPLE32)
        self.factors = tuple(_signed(factor) for _, factor in TRIPLE32)

    def shifted(self, x: Any, shift: int) -> Any:
        """x >> shift, with zeros from above."""
        return ops.bitwise_and(ops.bitwise_right_shift(x, shift), (1 << (32 - shift)) - 1)

    def construct(self, low: Any, high: Any) -> Any:
        x = self.strides + ops.expand_dims(low, 1)
        for i in range(len(self.shifts)):
            x = ops.bitwise_xor(x, self.shifted(x, self.shifts[i]))
            if i == 1:
                x = x + ops.expand_dims(high, 1)
            x = x * self.factors[i]
        return ops.bitwise_xor(x, self.shifted(x, 14))


class GumbelNoise(nn.Cell):
    """keys int32 [B, 2], halves of noise.position_keys -> float32 [B, tokens], for tokens from `first` on."""

    def __init__(self, first: int, num_tokens: int) -> None:
        super().__init__()
        begin, end = first // 32 * 32, first + num_tokens
        self.start, self.stop = first - begin, end - begin
        self.pairs = _Triple32(np.arange(begin // 2, -(-end // 32) * 16, dtype=np.uint32))
        self.tokens = _Triple32(np.arange(first, end, dtype=np.uint32))

    def bits(self, keys: Any) -> Any:
        """int32 [B, tokens] with the bits of noise.token_bits."""
        low, high = keys[:, 0], keys[:, 1]
        pairs = self.pairs(low, high).reshape(keys.shape[0], -1, 1, 16)
        halves = ops.concat((pairs * 65536, ops.bitwise_and(pairs, -65536)), 2)
        upper = halves.reshape(keys.shape[0], -1)[:, self.start : self.stop]
        lower = ops.bitwise_and(ops.bitwise_right_shift(self.tokens(high, low), 16), 0xFFFF)
        return ops.bitwise_or(upper, lower)

    def construct(self, keys: Any) -> Any:
        return variates(self.bits(keys))


def variates(bits: Any) -> Any:
    """float32 Gumbel variates of int32 with the bits of uint32, see noise.gumbel_of."""
    is_upper = bits < 0
    # Of uint32 bits >= 2^31 the distance to 2^32, which float32 holds as exactly as the small ones.
    nearest = ops.where(is_upper, -1 - bits, bits)
    share = (nearest.astype(ms.float32) + 0.5) * 2.0**-32
    # -log(1 - share) of small shares, the largest variates, as its series: log1p was seen to be log of the sum.
    series = share / 7.0
    for i in range(6, 0, -1):
        series = (series + 1.0 / i) * share
    upper = ops.where(share < 0.0625, series, -ops.log(1.0 - share))
    return -ops.log(ops.where(is_upper, upper, -ops.log(share)))
