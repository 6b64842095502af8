"""Noise depends on seed, purpose, step, sample, position and token, has the Gumbel distribution, and is the
same bit for bit in C.

Does not prove that hashes are good generators, only that neighbours in each number are neither equal nor correlated.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from pathlib import Path

import numpy as np
import pytest
import sampling_oracle as oracle
from mindspore import Tensor, nn
from scipy.stats import chi2

from mindgrpo.backend.kernels.native import library
from mindgrpo.rollout.embedded.sampling import GumbelNoise, variates
from mindgrpo.rollout.noise import (
    EVALUATION,
    ROLLOUT,
    bits_at,
    gumbel,
    gumbel_of,
    position_keys,
    sample_keys,
    token_bits,
)

WITH_C = pytest.mark.skipif(library.compiler() is None, reason="no C compiler on this machine")


def test_position_keys_are_splitmix64s_published_outputs() -> None:
    """Of the seed 1234567; the list is on rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64."""
    keys = position_keys(np.full(5, 1234567, np.uint64), np.arange(5))
    assert keys.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_and_bits_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    keys = sample_keys(2**63 + 5, EVALUATION, 500, [0, 7, 2**40])
    assert keys.tolist() == [oracle.sample_key(2**63 + 5, 1, 500, i) for i in (0, 7, 2**40)]
    first = int(rng.integers(0, 2**31))
    for key, bits in zip(keys.tolist(), token_bits(keys, first, 50), strict=True):
        assert bits.tolist() == [
            oracle.token_bits(key, token) for token in range(first, first + 50)
        ]


def test_a_sample_has_its_key_whatever_is_drawn_beside_it() -> None:
    together = sample_keys(1, ROLLOUT, 2, range(8))
    for order in ([5], [7, 5, 0], [5, 6]):
        np.testing.assert_array_equal(sample_keys(1, ROLLOUT, 2, order), together[order])


def test_a_token_has_its_noise_whichever_rank_has_it() -> None:
    keys = sample_keys(1, ROLLOUT, 2, range(3))
    whole = gumbel(keys, 0, 500)
    assert whole.dtype == np.float32 and whole.shape == (3, 500)
    for first, count in ((0, 167), (167, 166), (333, 167)):
        np.testing.assert_array_equal(gumbel(keys, first, count), whole[:, first : first + count])


def test_keys_differ_in_every_number() -> None:
    numbers = itertools.product((0, 1, 2), (ROLLOUT, EVALUATION), (0, 1, 500))
    keys = np.concatenate([sample_keys(*three, range(128)) for three in numbers])
    keys = position_keys(keys[:, None], np.arange(64)[None])
    assert len(np.unique(keys)) == keys.size == 18 * 128 * 64


def along(what: str, count: int) -> np.ndarray:
    """float32 [count] of noise where one number alone runs from 0."""
    samples = sample_keys(9, ROLLOUT, 1, range(count if what == "samples" else 1))
    positions = np.arange(count if what == "positions" else 1)
    keys = position_keys(samples[:, None], positions[None]).reshape(-1)
    return gumbel(keys, 77, count if what == "tokens" else 1).reshape(-1)


@pytest.mark.parametrize("what", ["samples", "positions", "tokens"])
def test_the_noise_has_the_gumbel_distribution_up_to_its_tails(what: str) -> None:
    noise = along(what, 1_000_000).astype(np.float64)
    for below in (np.exp(-np.exp(-noise)), -np.expm1(-np.exp(-noise))):
        # 20 equal ranges, and the last one cut into the rarest 10,000, 1,000, 100 and 20 of a million.
        edges = np.concatenate([[0, 2e-5, 1e-4, 1e-3, 1e-2], np.arange(1, 21) / 20])
        counts, _ = np.histogram(below, edges)
        expected = np.diff(edges) * len(noise)
        assert chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1) > 1e-3


@pytest.mark.parametrize("what", ["samples", "positions", "tokens"])
@pytest.mark.parametrize("distance", [1, 2, 64])
def test_neighbours_are_independent(what: str, distance: int) -> None:
    """Chi-square over 16 x 16 ranges of pairs."""
    noise = along(what, 200_000)
    ranges = np.floor(16 * np.exp(-np.exp(-noise.astype(np.float64)))).astype(int)
    pairs = np.bincount(16 * ranges[:-distance] + ranges[distance:], minlength=256)
    expected = pairs.sum() / 256
    assert chi2.sf(((pairs - expected) ** 2 / expected).sum(), 255) > 1e-3


def test_the_smallest_and_largest_noise_are_numbers() -> None:
    ends = gumbel_of(np.array([0, 2**32 - 1], np.uint32))
    np.testing.assert_allclose(ends, [-3.13, 22.87386], atol=1e-5)
    bits = np.sort(np.random.default_rng(0).integers(0, 2**32, 10_000, np.uint32))
    assert (np.diff(gumbel_of(bits)) >= 0).all()


@WITH_C
def test_keys_and_noise_are_the_same_in_c_bit_for_bit(tmp_path: Path) -> None:
    program = library.compiler()
    assert program is not None
    source = tmp_path / "noise.c"
    source.write_text(
        '#include "gumbel.h"\n'
        "void noise(uint64_t key, int64_t position, uint32_t first, int64_t count, float *out) {\n"
        "    key = position_key(key, position);\n"
        "    for (int64_t i = 0; i < count; i++) out[i] = gumbel_of(token_bits(key, first + i));\n"
        "}\n"
    )
    built = tmp_path / "noise.so"
    command = [
        program,
        *library.FLAGS,
        "-shared",
        f"-I{library.SOURCES}",
        str(source),
        "-o",
        str(built),
        "-lm",
    ]
    subprocess.run(command, check=True)
    call = ctypes.CDLL(str(built)).noise
    call.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_uint32, ctypes.c_int64]
    call.argtypes += [ctypes.c_void_p]
    for key in sample_keys(4, ROLLOUT, 3, range(5)):
        out = np.empty(200_000, np.float32)
        call(int(key), 9, 1000, out.size, out.ctypes.data)
        expected = gumbel(position_keys(np.array([key]), np.array([9])), 1000, out.size)[0]
        np.testing.assert_array_equal(out.view(np.int32), expected.view(np.int32))


def test_single_tokens_have_the_bits_of_all() -> None:
    keys = position_keys(sample_keys(3, ROLLOUT, 9, range(200)), np.arange(200))
    tokens = np.random.default_rng(0).integers(0, 300, 200)
    every = token_bits(keys, 0, 300)
    np.testing.assert_array_equal(bits_at(keys, tokens), every[np.arange(200), tokens])


@pytest.mark.parametrize(("first", "count"), [(0, 67), (37, 100), (1024, 64)])
def test_graphs_have_the_same_bits_and_variates_to_float32(first: int, count: int) -> None:
    keys = position_keys(sample_keys(3, ROLLOUT, 9, range(40)), np.arange(40))
    halves = Tensor(keys.view(np.int32).reshape(-1, 2))
    cell = GumbelNoise(first, count)
    bits = BitsOf(cell)(halves).asnumpy().view(np.uint32)
    np.testing.assert_array_equal(bits, token_bits(keys, first, count))
    np.testing.assert_allclose(
        cell(halves).asnumpy(), gumbel(keys, first, count), rtol=0, atol=4e-6
    )


class BitsOf(nn.Cell):
    def __init__(self, noise: GumbelNoise) -> None:
        super().__init__()
        self.noise = noise

    def construct(self, keys: Tensor) -> Tensor:
        return self.noise.bits(keys)


class Variates(nn.Cell):
    def construct(self, bits: Tensor) -> Tensor:
        return variates(bits)


def test_the_ends_of_the_variates_are_exact_in_graphs_too() -> None:
    ends = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    found = Variates()(Tensor(ends.view(np.int32))).asnumpy()
    np.testing.assert_allclose(found, gumbel_of(ends), rtol=0, atol=4e-6)
