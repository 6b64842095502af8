"""Float32 products of native/gemm.c: every element is one chain of fused multiply-adds over k in order.

So it is whatever the shape, the orientation of the factors, the number of threads and the processor's instructions.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mindgrpo.backend.kernels.native.library import call_kernel, library_path

pytestmark = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")

ROOT = Path(__file__).resolve().parents[1]
SHAPES, MOST_MULTIPLIES = 200, 30_000_000


def _factors(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns float32 of 12 bits: a product of two and its sum with a float32 are exact in float64."""
    return (rng.integers(-2048, 2048, shape) / 2048).astype(np.float32)


def _chain(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for p in range(a.shape[1]):
        total = (a[:, p : p + 1].astype(np.float64) * b[p] + total).astype(np.float32)
    return total


def _tree(a: np.ndarray, b: np.ndarray, leaves: int) -> np.ndarray:
    sums = [_chain(*both) for both in zip(np.split(a, leaves, 1), np.split(b, leaves), strict=True)]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _shape(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draws rows, columns (half of them whole vectors), leaves and the depth of a leaf.

    Half of the shapes are large enough to be made in blocks, the others as often have a few of each as hundreds.
    """
    while True:
        least = 6.1 if rng.random() < 0.5 else 0
        sizes = np.exp2(rng.uniform(least, (12, 9, 11))).astype(int)
        leaves = 2 ** int(rng.integers(0, 4))
        if rng.random() < 0.5:
            sizes[1] += -sizes[1] % 16
        if sizes.prod() < MOST_MULTIPLIES:
            return int(sizes[0]), int(sizes[1]), leaves, max(1, int(sizes[2]) // leaves)


def compare(first: int, end: int) -> None:
    for seed in range(first, end):
        rng = np.random.default_rng(seed)
        rows, columns, leaves, depth = _shape(rng)
        a, b = _factors(rng, rows, leaves * depth), _factors(rng, leaves * depth, columns)
        a_turned, b_turned = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        chain, tree = _chain(a, b), _tree(a, b, leaves)
        for symbol, *factors, in_leaves, expected in (
            ("product", a, b, 1, chain),
            ("product", a, b, leaves, tree),
            ("product_turned", a, b_turned, 1, chain),
            ("product_gradient", a_turned, b, 1, chain),
        ):
            made = np.full((rows, columns), np.nan, np.float32)
            call_kernel(symbol, *factors, np.array([0, in_leaves], np.int32), made)
            assert np.array_equal(made, expected), f"{symbol} {a.shape} x {b.shape}, seed {seed}"


@pytest.mark.parametrize("threads", [1, 2])
def test_every_element_is_one_chain_on_drawn_shapes(threads: int) -> None:
    _in_own_process((threads - 1) * SHAPES // 2, threads * SHAPES // 2, OMP_NUM_THREADS=threads)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flag is for x86")
def test_other_instructions_give_the_same_chains() -> None:
    """Without AVX-512 tiles and vectors have other sizes."""
    _in_own_process(0, SHAPES // 4, MINDGRPO_NATIVE_FLAGS="-mno-avx512f")


def _in_own_process(first: int, end: int, **variables: object) -> None:
    """The number of threads and the library are a process's for good."""
    code = f"import test_products; test_products.compare({first}, {end})"
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "tests",
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
