"""The loss that is differentiated in a graph against the one in numpy: value, and gradient by finite differences.

Does not prove that GRPO's formula is transcribed from the paper rightly, nor anything about the model below the loss.
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindgrpo.algorithm.loss import grpo_loss
from mindgrpo.backend.cpu import CpuBackend
from mindgrpo.update.loss_cell import GrpoLoss

EPSILON = (0.2, 0.3)
COUNT = 24

Inputs = list[np.ndarray]


def inputs(seed: int = 0) -> Inputs:
    """log p, old, reference, advantages, weights; ratios on both sides of both ends, none near a corner."""
    rng = np.random.default_rng(seed)
    old = rng.uniform(-4.0, -0.5, COUNT)
    steps = np.resize([-0.6, -0.1, 0.05, 0.15, 0.5], COUNT) + rng.uniform(-0.02, 0.02, COUNT)
    reference = old + rng.normal(0, 0.4, COUNT)
    advantages = rng.normal(size=COUNT)
    weights = rng.uniform(0.01, 0.1, COUNT)
    return [x.astype(np.float32) for x in (old + steps, old, reference, advantages, weights)]


def in_numpy(arrays: Inputs, beta: float, has_old: bool) -> float:
    logp, old, *rest = (x.astype(np.float64) for x in arrays)
    return grpo_loss(logp, old if has_old else logp, *rest, EPSILON, beta)


def slope_in_numpy(arrays: Inputs, beta: float, has_old: bool) -> np.ndarray:
    """Central differences in float64; without old log-probs they are held where the policy is."""
    logp, old, *rest = (x.astype(np.float64) for x in arrays)
    held = old if has_old else logp.copy()
    slope, step = np.zeros(COUNT), 1e-6
    for i in range(COUNT):
        ends = []
        for sign in (1, -1):
            moved = logp.copy()
            moved[i] += sign * step
            ends.append(grpo_loss(moved, held, *rest, EPSILON, beta))
        slope[i] = (ends[0] - ends[1]) / (2 * step)
    return slope


Compiled = Callable[[Inputs], tuple[float, np.ndarray]]


@pytest.fixture(scope="module")
def compiled() -> Callable[[float, bool], Compiled]:
    CpuBackend({}, "shared_memory")
    made: dict[tuple[float, bool], Compiled] = {}

    def of(beta: float, has_old: bool) -> Compiled:
        cell = ms.value_and_grad(GrpoLoss(*EPSILON, beta, has_old), 0)

        def call(arrays: Inputs) -> tuple[float, np.ndarray]:
            value, gradient = cell(*(Tensor(x) for x in arrays))
            return float(value), gradient.asnumpy()

        return made.setdefault((beta, has_old), call)

    return of


CASES = [(beta, has_old) for beta in (0.0, 0.05) for has_old in (True, False)]


@pytest.mark.parametrize("beta, has_old", CASES)
def test_the_graph_has_the_value_and_gradient_of_the_formula(
    compiled: Callable[[float, bool], Compiled], beta: float, has_old: bool
) -> None:
    arrays = inputs()
    value, gradient = compiled(beta, has_old)(arrays)
    assert value == pytest.approx(in_numpy(arrays, beta, has_old), rel=2e-6, abs=1e-6)
    np.testing.assert_allclose(
        gradient, slope_in_numpy(arrays, beta, has_old), rtol=1e-4, atol=1e-7
    )


def test_each_end_of_the_clip_stops_the_gradient_on_its_own_side_only(
    compiled: Callable[[float, bool], Compiled],
) -> None:
    arrays = inputs()
    ratio = np.exp(arrays[0] - arrays[1])
    _, gradient = compiled(0.0, True)(arrays)
    low, high = 1 - EPSILON[0], 1 + EPSILON[1]
    stopped = ((ratio < low) & (arrays[3] < 0)) | ((ratio > high) & (arrays[3] > 0))
    outside = (ratio < low) | (ratio > high)
    assert (outside & ~stopped).any() and stopped[ratio < low].any() and stopped[ratio > high].any()
    np.testing.assert_array_equal(gradient[stopped], 0.0)
    assert (gradient[~stopped] != 0).all()


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_plain_policy_gradient(
    compiled: Callable[[float, bool], Compiled],
) -> None:
    arrays = inputs()
    value, gradient = compiled(0.0, False)(arrays)
    assert value == pytest.approx(-float((arrays[3] * arrays[4]).sum()), abs=1e-6)
    np.testing.assert_allclose(gradient, -arrays[3] * arrays[4], rtol=1e-5)


@pytest.mark.parametrize("garbage", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("has_old", [True, False])
def test_positions_of_weight_zero_add_nothing_whatever_they_hold(
    compiled: Callable[[float, bool], Compiled], has_old: bool, garbage: float
) -> None:
    clean = inputs()
    clean[4][::3] = 0.0
    dirty = [x.copy() for x in clean]
    for array in dirty[:4]:
        array[::3] = garbage
    call = compiled(0.05, has_old)
    value, gradient = call(clean)
    dirty_value, dirty_gradient = call(dirty)
    assert np.isfinite(value) and dirty_value == value
    np.testing.assert_array_equal(dirty_gradient, gradient)
    np.testing.assert_array_equal(gradient[::3], 0.0)
