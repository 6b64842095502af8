"""Sampling noise as a function of (seed, purpose, step, sample, position), never of a rank. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROLLOUT, EVALUATION = 0, 1


def uniforms(
    seed: int, purpose: int, step: int, samples: Sequence[int], num_positions: int
) -> np.ndarray:
    """float32 [len(samples), num_positions] in [0, 1): row i is the stream of `samples[i]`, whatever else is drawn."""
    out = np.empty((len(samples), num_positions), np.float32)
    for row, sample in enumerate(samples):
        key = np.array([seed, (purpose << 60) | (step << 28) | sample], np.uint64)
        out[row] = np.random.Generator(np.random.Philox(key=key)).random(num_positions, np.float32)
    return out
