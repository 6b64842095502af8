"""The loss that is differentiated in a graph against the one in numpy: value, and gradient by finite differences.

Does not prove that the formulas are transcribed from the papers rightly (test_losses.py does), nor anything about the
model below the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import mindspore as ms
import numpy as np
import pytest
from algorithms import replace
from loss_variants import LENGTHS, NARROW, VARIANTS, WIDE, tokens_of
from mindspore import Tensor
from tables import each_row

from mindgrpo.algorithm.estimators import AlgorithmConfig
from mindgrpo.algorithm.losses import policy_loss
from mindgrpo.algorithm.surrogates import Tokens
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.training.stage_graphs import PolicyLoss

Result = tuple[float, np.ndarray, np.ndarray]
Call = Callable[[list[np.ndarray]], Result]
Compiled = Callable[[AlgorithmConfig, bool], Call]

# Places of the graph's inputs.
LOGP, ENTROPY, OLD, REFERENCE, ADVANTAGES, WEIGHTS, FACTORS = range(7)
ALL_TERMS = replace(
    WIDE, beta=0.05, entropy_coef=0.03, importance_sampling_correction="token_truncate"
)
BASE = replace(WIDE, beta=0.05)


PADDING = 3


def inputs(tokens: Tokens) -> list[np.ndarray]:
    """What the graph takes, with places after the tokens: in one shape a graph is compiled once for all tests."""
    lengths = tokens.lengths
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    shares = np.repeat(1.0 / np.maximum(lengths, 1), lengths)
    numbers = [tokens.logps, tokens.entropy, tokens.old, tokens.reference]
    numbers += [tokens.advantages, tokens.weights, tokens.rollout_is_weights]
    blank = np.zeros(PADDING)
    numbers += [shares, np.broadcast_to(tokens.penalties, shares.shape)]
    padded = [np.concatenate([x, blank]).astype(np.float32) for x in numbers]
    own = np.arange(starts.size, starts.size + PADDING)
    return [*padded[:-2], np.concatenate([starts, own]).astype(np.int32), *padded[-2:]]


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    CpuBackend({})
    made: dict[tuple[AlgorithmConfig, bool], Call] = {}

    def of(loss_config: AlgorithmConfig, has_old: bool) -> Call:
        cell = ms.value_and_grad(PolicyLoss(loss_config, has_old), (0, 1))

        def call(arrays: list[np.ndarray]) -> Result:
            value, (by_logp, by_entropy) = cell(*(Tensor(x) for x in arrays))
            return float(value), by_logp.asnumpy(), by_entropy.asnumpy()

        return made.setdefault((loss_config, has_old), call)

    return of


def slope(tokens: Tokens, loss_config: AlgorithmConfig, name: str) -> np.ndarray:
    """Central differences of the numpy loss by `name`'s entries; stop-gradients stay where the policy is."""
    base = getattr(tokens, name)
    found, step = np.zeros(base.size), 1e-6
    for i in range(base.size):
        ends = []
        for sign in (1, -1):
            moved = base.copy()
            moved[i] += sign * step
            ends.append(policy_loss(replace(tokens, **{name: moved}), loss_config, tokens.logps))
        found[i] = (ends[0] - ends[1]) / (2 * step)
    return found


# Without old log-probs they are the new ones: no variant's constants change that, so one of each loss is enough.
ON_POLICY = {
    (own.loss_type, own.by_sequence): name for name, own in reversed(VARIANTS.items())
}.values()


@each_row("name, has_old", [*((n, True) for n in VARIANTS), *((n, False) for n in ON_POLICY)])
def test_the_graph_has_the_value_and_gradients_of_the_formula(
    compiled: Compiled, name: str, has_old: bool
) -> None:
    loss_config = VARIANTS[name]
    tokens = tokens_of(loss_config, on_policy=not has_old)
    value, by_logp, by_entropy = compiled(loss_config, has_old)(inputs(tokens))
    count = tokens.logps.size
    assert value == pytest.approx(policy_loss(tokens, loss_config), rel=2e-6, abs=1e-6)
    expected = slope(tokens, loss_config, "logps")
    np.testing.assert_allclose(by_logp[:count], expected, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        by_entropy[:count], slope(tokens, loss_config, "entropy"), rtol=1e-4, atol=1e-7
    )
    assert not by_logp[count:].any() and not by_entropy[count:].any()
    assert np.abs(expected).max() > 1e-3


def test_each_end_of_the_clip_stops_the_gradient_on_its_own_side_only(compiled: Compiled) -> None:
    tokens = replace(tokens_of(WIDE), weights=np.full(int(LENGTHS.sum()), 0.05))
    ratio = np.exp(tokens.logps - tokens.old)
    gradient = compiled(WIDE, True)(inputs(tokens))[1][:-PADDING]
    low, high = 1 - WIDE.epsilon_low, 1 + WIDE.epsilon_high
    stopped = ((ratio < low) & (tokens.advantages < 0)) | ((ratio > high) & (tokens.advantages > 0))
    outside = (ratio < low) | (ratio > high)
    assert (outside & ~stopped).any() and stopped[ratio < low].any() and stopped[ratio > high].any()
    np.testing.assert_array_equal(gradient[stopped], 0.0)
    assert (gradient[~stopped] != 0).all()


def test_cispo_leaves_every_token_its_gradient(compiled: Compiled) -> None:
    loss_config = VARIANTS["cispo"]
    tokens = tokens_of(loss_config)
    gradient = compiled(loss_config, True)(inputs(tokens))[1][:-PADDING]
    assert (gradient[tokens.weights > 0] != 0).all()


def test_a_sequence_is_clipped_as_a_whole(compiled: Compiled) -> None:
    tokens = tokens_of(NARROW)
    gradient = compiled(NARROW, True)(inputs(tokens))[1][:-PADDING]
    owners = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    moved = [len(set((gradient[owners == i] != 0).tolist())) for i in range(len(LENGTHS))]
    assert max(moved) == 1  # all tokens of a sample, or none
    counted = tokens.weights > 0
    assert (gradient[counted] == 0).any() and (gradient[counted] != 0).any()


def test_without_old_log_probs_the_gradient_is_the_plain_policy_gradient(
    compiled: Compiled,
) -> None:
    for loss_config in (WIDE, VARIANTS["cispo"], NARROW):
        tokens = tokens_of(loss_config, on_policy=True)
        gradient = compiled(loss_config, False)(inputs(tokens))[1][:-PADDING]
        np.testing.assert_allclose(gradient, -tokens.advantages * tokens.weights, rtol=1e-5)


@pytest.mark.parametrize("garbage", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("loss_config", [BASE, ALL_TERMS, NARROW], ids=["base", "all", "gspo"])
def test_samples_of_weight_zero_add_nothing_whatever_they_hold(
    compiled: Compiled, has_old: bool, garbage: float, loss_config: AlgorithmConfig
) -> None:
    clean = inputs(tokens_of(loss_config, on_policy=not has_old))
    dirty = [x.copy() for x in clean]
    unused = clean[WEIGHTS] == 0
    assert unused[:-PADDING].any()
    for place in (LOGP, ENTROPY, OLD, REFERENCE, ADVANTAGES):
        dirty[place][unused] = garbage
    call = compiled(loss_config, has_old)
    results, dirty_results = call(clean), call(dirty)
    assert np.isfinite(results[0]) and dirty_results[0] == results[0]
    for found, expected in zip(dirty_results[1:], results[1:], strict=True):
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(found[unused], 0.0)


def test_the_tokens_hold_every_input_of_the_graph() -> None:
    assert {field.name for field in fields(Tokens)} == {
        *(
            "logps",
            "old",
            "reference",
            "entropy",
            "advantages",
            "weights",
            "rollout_is_weights",
            "lengths",
            "penalties",
        )
    }
