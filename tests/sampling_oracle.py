"""How a token is drawn, from the definitions, in Python's integers and float64: for comparing samplers with.

Shares nothing with the package but SamplingParams.
"""

from __future__ import annotations

import math

import numpy as np

from mindgrpo.backend.kernels.shapes import SamplingParams


def splitmix64(state: int) -> int:
    """The output that follows `state` (Steele, Lea and Flood 2014, figure 17)."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def sample_key(*numbers: int) -> int:
    """Of (seed, purpose, step, sample)."""
    key = 0
    for number in numbers:
        key = splitmix64(key ^ number)
    return key


def position_key(key: int, position: int) -> int:
    return splitmix64((key + position * 0x9E3779B97F4A7C15) % 2**64)


def triple32(key: int, number: int) -> int:
    """With the key's halves added before its first and second round."""
    low, high = key % 2**32, key >> 32
    x = (number * 0x9E3779B9 + low) % 2**32
    x = (x ^ (x >> 17)) * 0xED5AD4BB % 2**32
    x = ((x ^ (x >> 11)) + high) * 0xAC4C1B51 % 2**32
    x = (x ^ (x >> 15)) * 0x31848BAB % 2**32
    return x ^ (x >> 14)


def token_bits(key: int, token: int) -> int:
    pair = triple32(key, token // 32 * 16 + token % 16)
    swapped = key % 2**32 * 2**32 + key // 2**32
    upper = pair // 2**16 if token % 32 >= 16 else pair % 2**16
    return upper * 2**16 + triple32(swapped, token) // 2**16


def gumbel(key: int, position: int, num_tokens: int) -> np.ndarray:
    """float64 [num_tokens] for the token at `position` of the sample with this key."""
    row = position_key(key, position)
    uniforms = [(token_bits(row, token) + 0.5) / 2**32 for token in range(num_tokens)]
    return np.array([-math.log(-math.log(u)) for u in uniforms])


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def processed(
    settings: SamplingParams, logits: np.ndarray, banned: float, seen: np.ndarray
) -> np.ndarray:
    """float64: penalty, temperature, ban; in this order."""
    x = logits.astype(np.float64)
    penalised = np.where(x > 0, x / settings.repetition_penalty, x * settings.repetition_penalty)
    x = np.where(seen > 0, penalised, x) / settings.trainer_temperature
    if banned and settings.min_tokens:
        x[list(settings.stop_ids)] = -np.inf
    return x


def distribution(
    settings: SamplingParams, logits: np.ndarray, banned: float, seen: np.ndarray
) -> np.ndarray:
    """What one token is drawn from: penalty, temperature, ban, top-k, top-p, min-p, in this order."""
    x = processed(settings, logits, banned, seen)
    if settings.top_k and settings.top_k < len(x):
        x[x < np.sort(x)[-settings.top_k]] = -np.inf
    p = np.exp(log_softmax(x))
    if settings.top_p < 1:
        values, where = np.unique(x, return_inverse=True)
        mass = np.bincount(where, p)
        above = mass[::-1].cumsum()[::-1] - mass
        p[(above >= settings.top_p)[where]] = 0.0
        p /= p.sum()
    p[p < settings.min_p * p.max()] = 0.0
    if settings.temperature == 0:
        p = (np.arange(len(p)) == p.argmax()).astype(np.float64)
    return p / p.sum()


def draw(
    settings: SamplingParams, logits: np.ndarray, key: int, banned: float, seen: np.ndarray
) -> tuple[int, float]:
    """The first token of the sample with this key, and its log-prob."""
    kept = distribution(settings, logits, banned, seen) > 0
    noise = gumbel(key, 0, len(logits)) if settings.temperature else 0.0
    scores = np.where(kept, processed(settings, logits, banned, seen) + noise, -np.inf)
    token = int(scores.argmax())
    plain = log_softmax(logits.astype(np.float64) / settings.trainer_temperature)
    return token, float(plain[token])
