"""The sampling noise depends on seed, purpose, step, sample and position, and on nothing else.

Does not prove that numpy's Philox is a good generator; only that streams differ and are spread evenly.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mindgrpo.rollout.noise import EVALUATION, ROLLOUT, uniforms


def test_the_same_five_numbers_give_the_same_noise() -> None:
    np.testing.assert_array_equal(
        uniforms(3, ROLLOUT, 5, [0, 7], 16), uniforms(3, ROLLOUT, 5, [0, 7], 16)
    )


def test_the_noise_is_float32_from_zero_and_below_one() -> None:
    noise = uniforms(0, ROLLOUT, 0, range(50), 2000)
    assert noise.dtype == np.float32 and noise.shape == (50, 2000)
    assert noise.min() >= 0.0 and noise.max() < 1.0


def test_a_sample_has_its_stream_whatever_is_drawn_beside_it() -> None:
    together = uniforms(1, ROLLOUT, 2, range(8), 12)
    for order in ([5], [7, 5, 0], [5, 6]):
        alone = uniforms(1, ROLLOUT, 2, order, 12)
        for row, sample in enumerate(order):
            np.testing.assert_array_equal(alone[row], together[sample])


def test_a_longer_limit_does_not_change_the_positions_before_it() -> None:
    np.testing.assert_array_equal(
        uniforms(1, ROLLOUT, 2, [4], 64)[:, :13], uniforms(1, ROLLOUT, 2, [4], 13)
    )


def test_streams_differ_in_seed_purpose_step_and_sample() -> None:
    numbers = itertools.product((0, 1, 2), (ROLLOUT, EVALUATION), (0, 1, 500), (0, 1, 127))
    streams = [uniforms(s, purpose, t, [i], 8)[0].tobytes() for s, purpose, t, i in numbers]
    assert len(set(streams)) == len(streams) == 54


@pytest.mark.parametrize("samples, positions", [(1, 20000), (20000, 1)])
def test_the_noise_is_spread_evenly_along_a_stream_and_across_streams(
    samples: int, positions: int
) -> None:
    noise = uniforms(9, ROLLOUT, 1, range(samples), positions).reshape(-1)
    counts, _ = np.histogram(noise, bins=20, range=(0, 1))
    statistic = float(((counts - 1000) ** 2 / 1000).sum())
    assert statistic < 43.8  # chi-square with 19 degrees of freedom exceeds this once in 1,000


def test_neighbouring_streams_are_not_correlated() -> None:
    noise = uniforms(0, ROLLOUT, 0, range(2), 20000)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.03
