"""Defines the noise of sampling: Gumbel variates of (seed, purpose, step, sample, position, token), never of a rank.

Counters are hashed, no generator keeps a state. SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) makes a 64-bit key of
all but the token: its finalizer chains seed, purpose, step and sample, and its stream has one key a position.
triple32 (C. Wellons, hash-prospector, 2018) makes 32 bits of a token, with half of the key added before its first and
half before its second round. native/gumbel.h computes the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROLLOUT, EVALUATION = 0, 1

# Two to the 64th over the golden ratio, and its upper half.
_STRIDE, TOKEN_STRIDE = np.uint64(0x9E3779B97F4A7C15), np.uint32(0x9E3779B9)
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
TRIPLE32 = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
# Variates worked on together: their float64 fit a processor's cache.
_AT_ONCE = 1 << 15


def _mixed(x: np.ndarray) -> np.ndarray:
    """Applies SplitMix64's finalizer to uint64 [...]; products wrap."""
    for shift, factor in _SPLITMIX:
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))


def sample_keys(
    seed: int, purpose: int, step: int, samples: Sequence[int], turn: int = 0
) -> np.ndarray:
    """Computes uint64 [samples], one key per global sample number, whatever else is drawn; all numbers from 0 up."""
    key = np.zeros(1, np.uint64)
    # A first turn has the keys of a completion of one turn.
    for number in (seed, purpose, step, turn)[: 4 if turn else 3]:
        key = _mixed((key ^ np.uint64(number)) + _STRIDE)
    return _mixed((key ^ np.asarray(samples, np.uint64)) + _STRIDE)


def position_keys(sample_keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Computes uint64 [...] for tokens at `positions` [...] of samples with these keys; the prompt is not counted."""
    return _mixed(sample_keys + (positions.astype(np.uint64) + np.uint64(1)) * _STRIDE)


def _triple32(keys: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Hashes each key (uint64) and number (uint32 [numbers] or [keys, numbers]): uint32 [keys, numbers]."""
    x = numbers * TOKEN_STRIDE + keys.astype(np.uint32)[:, None]
    for number, (shift, factor) in enumerate(TRIPLE32):
        x ^= x >> np.uint32(shift)
        if number == 1:
            x += (keys >> np.uint64(32)).astype(np.uint32)[:, None]
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(14))


def bits_at(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns uint32 [n]: what token_bits has for key i and token `tokens[i]`."""
    numbers, half = tokens.astype(np.uint32)[:, None], np.uint32(16)
    pairs = _triple32(keys, numbers // np.uint32(32) * half + numbers % half)
    upper = np.where(numbers % np.uint32(32) < half, pairs << half, pairs & np.uint32(0xFFFF0000))
    swapped = keys << np.uint64(32) | keys >> np.uint64(32)
    return (upper | _triple32(swapped, numbers) >> half)[:, 0]


def token_bits(keys: np.ndarray, first_token: int, num_tokens: int) -> np.ndarray:
    """Computes uint32 [keys, num_tokens] for the tokens from `first_token` on.

    Tokens t and t + 16 of each 32 are a pair. The upper 16 bits are half of the hash of (key, number of the pair), the
    lower half for t; the lower 16 bits are the upper half of the hash of (key with its halves exchanged, token). So a
    search for large noise hashes half as many numbers.
    """
    end, half = first_token + num_tokens, np.uint32(16)
    begin = first_token // 32 * 32
    numbers = np.arange(begin // 2, -(-end // 32) * 16, dtype=np.uint32)
    pairs = _triple32(keys, numbers).reshape(len(keys), -1, 1, 16)
    upper = np.concatenate([pairs << half, pairs & np.uint32(0xFFFF0000)], 2).reshape(len(keys), -1)
    swapped = keys << np.uint64(32) | keys >> np.uint64(32)
    lower = _triple32(swapped, np.arange(first_token, end, dtype=np.uint32)) >> half
    return upper[:, first_token - begin : end - begin] | lower


def gumbel_of(bits: np.ndarray) -> np.ndarray:
    """Computes float32 with the standard Gumbel distribution, from -3.13 to 22.87, of uint32 of the same shape.

    -log(-log(u)) in float64, of u = (bits + 1/2) / 2^32: u is never 0 or 1, and neighbours among the largest values,
    which decide, are 1/2^32 of the distribution apart.
    """
    u = (bits + 0.5) * 2.0**-32
    np.negative(np.log(u, out=u), out=u)
    np.negative(np.log(u, out=u), out=u)
    return u.astype(np.float32)


def gumbel(keys: np.ndarray, first_token: int, num_tokens: int) -> np.ndarray:
    """Defines the noise: float32 [keys, num_tokens], Gumbel, for the tokens from `first_token` on.

    What samples computes it in graphs and in C; the tests compare these with it.
    """
    noise = np.empty((len(keys), num_tokens), np.float32)
    rows = max(1, _AT_ONCE // num_tokens)
    for start in range(0, len(keys), rows):
        some = slice(start, start + rows)
        noise[some] = gumbel_of(token_bits(keys[some], first_token, num_tokens))
    return noise
