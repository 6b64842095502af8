"""Kernels of experts: C, MindSpore's operations and NumPy agree, values and gradients, and what makes a mixture one.

Does not prove that a model routes as it should: test_golden_models.py holds whole models to transformers.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import has_bfloat16, library_path
from mindgrpo.backend.kernels.shapes import Routing
from mindgrpo.doctor.probes.kernel_cases import SMALL, Case, cases
from mindgrpo.doctor.probes.kernels import Fused, compare, results
from mindgrpo.doctor.probes.numpy_kernels import NumpyKernels

METHODS = ("router", "choose_experts", "sort_slots", "take_rows", "expert_mlp", "expert_matmul")
METHODS += ("weighted_sum",)
TOKENS, HIDDEN, INNER, EXPERTS, SLOTS = 37, 24, 20, 4, 2
ROUTING = Routing(EXPERTS, SLOTS)
HAS_C = library_path() is not None
in_c = pytest.mark.skipif(not HAS_C, reason="no C compiler on this machine")


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    return CpuBackend({})


def expert_cases() -> dict[str, Case]:
    return {case.name: case for case in cases(SMALL, "float32") if case.method in METHODS}


@pytest.mark.parametrize("kernels", ["plain", pytest.param("C", marks=in_c)])
@pytest.mark.parametrize("name", expert_cases())
def test_kernels_give_what_numpy_gives_and_gradients_of_its_differences(
    name: str, kernels: str
) -> None:
    made = Kernels if kernels == "plain" else NativeKernels
    line = compare(expert_cases()[name], Fused(kernels, made, "float32"))
    assert line.status == "ok", line.seen


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def experts(count: int = EXPERTS) -> list[np.ndarray]:
    weights = floats(count, HIDDEN, 2 * INNER), floats(count, INNER, HIDDEN)
    return [own / np.float32(own.shape[1] ** 0.5) for own in weights]


def routes(seed: int = 0) -> np.ndarray:
    """Of the last expert nothing, of the last token nothing."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((TOKENS, EXPERTS - 1)), 1)[:, :SLOTS].astype(np.int32)
    chosen[-1] = -1
    return chosen


class Mixture(nn.Cell):
    """(x, router, gate_up, down, routes) -> the layer's output."""

    def __init__(self, kernels: Any, routing: Routing = ROUTING) -> None:
        super().__init__()
        self.router, self.sort = kernels.router(routing), kernels.sort_slots(routing)
        self.take, self.mlp = kernels.take_rows(), kernels.expert_mlp("silu")
        self.sum = kernels.weighted_sum()

    def construct(self, x: Any, router: Any, gate_up: Any, down: Any, routes: Any) -> Any:
        order, counts, home = self.sort(routes)
        y = self.mlp(self.take(x, order, home), counts, gate_up, down)
        return self.sum(y, self.router(x, router, routes), order, home)


def mixture(kernels: Any, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(output, gradients of the floats)"""
    case = Case("mixture", "", Mixture, inputs, has_gradient=True)
    return results(case, kernels, "float32", inputs, [floats(TOKENS, HIDDEN, seed=9)], 0)[:2]


def inputs_of(seed: int = 0) -> list[np.ndarray]:
    router = floats(HIDDEN, EXPERTS) / np.float32(HIDDEN**0.5)
    return [floats(TOKENS, HIDDEN), router, *experts(), routes(seed)]


def assert_alike(ours: Any, expected: Any, tolerance: float) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert np.abs(one - other).max() <= tolerance * max(1e-3, np.abs(other).max())


@in_c
def test_a_layer_of_both_agrees_and_an_expert_without_tokens_has_gradients_of_zeros() -> None:
    (ours, gradients), (plain, of_plain) = (
        mixture(kernels, inputs_of()) for kernels in (NativeKernels(), Kernels())
    )
    assert_alike(ours + gradients, plain + of_plain, 3e-5)
    assert not ours[0][-1].any() and not gradients[2][-1].any() and not gradients[3][-1].any()
    # Of the router all get one, as a softmax is of all.
    assert gradients[1].any(0).all() and gradients[2][:-1].any((1, 2)).all()


def test_equal_experts_are_one_dense_mlp_whatever_the_routes() -> None:
    x, router, gate_up, down, chosen = inputs_of()
    equal = [np.repeat(own[:1], EXPERTS, 0) for own in (gate_up, down)]
    dense = NumpyKernels().glu("silu")(x @ gate_up[0]) @ down[0]
    kernels = NativeKernels() if HAS_C else Kernels()
    for seed in (0, 1):
        out, _ = mixture(kernels, [x, router, *equal, routes(seed)])
        assert_alike([out[0][:-1]], [dense[:-1]], 3e-5)


@in_c
def test_experts_in_another_order_change_nothing() -> None:
    x, router, gate_up, down, chosen = inputs_of()
    order = np.array([2, 0, 3, 1])
    new = np.append(np.argsort(order), -1).astype(np.int32)[chosen]
    moved = [x, router[:, order], gate_up[order], down[order], new]
    one, other = (
        mixture(NativeKernels(), own) for own in ([x, router, gate_up, down, chosen], moved)
    )
    # A softmax's sum goes by the experts' order.
    assert_alike(one[0] + one[1][:1], other[0] + other[1][:1], 1e-6)
    assert_alike([own[order] for own in one[1][2:]], other[1][2:], 1e-6)
    assert_alike([one[1][1][:, order]], [other[1][1]], 1e-5)


@in_c
@pytest.mark.parametrize("num_parts", [None, 1, 3])
def test_a_tokens_bits_do_not_depend_on_the_tokens_beside_it(num_parts: int | None) -> None:
    if num_parts and not has_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    x, router, *weights, chosen = inputs_of()
    cell = Mixture(NativeKernels(num_parts))

    def out(kept: slice) -> np.ndarray:
        own = [x[kept], router, *weights, chosen[kept]]
        return cell(*map(Tensor, own)).asnumpy()

    whole = out(slice(None))
    for kept in (slice(3, 4), slice(5, 22)):
        np.testing.assert_array_equal(out(kept), whole[kept])


class InProducts(nn.Cell):
    """An expert_mlp of the kernels' products by expert."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self.product, self.glu = kernels.expert_matmul(), kernels.glu("silu")

    def construct(self, x: Any, counts: Any, gate_up: Any, down: Any) -> Any:
        return self.product(self.glu(self.product(x, gate_up, counts)), down, counts)


@in_c
@pytest.mark.parametrize("num_parts", [None, 1, 3])
def test_an_mlp_in_products_has_the_bits_of_one_operation_and_its_gradients(
    num_parts: int | None,
) -> None:
    if num_parts and not has_bfloat16():
        pytest.skip("this processor has no products of bfloat16")
    kernels, counts = NativeKernels(num_parts), np.array([5, 0, 9, 20], np.int32)
    inputs = [Tensor(own) for own in (floats(TOKENS, HIDDEN), counts, *experts())]
    gradient = ops.GradOperation(get_all=True, sens_param=True)
    dy = Tensor(floats(TOKENS, HIDDEN, seed=9))
    cells = [kernels.expert_mlp("silu"), InProducts(kernels)]
    ours, whole = ([cell(*inputs), *gradient(cell)(*inputs, dy)] for cell in cells)
    assert not whole[0].asnumpy()[counts.sum() :].any()
    for one, other in zip(ours, whole, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


@in_c
@pytest.mark.skipif(not has_bfloat16(), reason="this processor has no products of bfloat16")
@pytest.mark.parametrize(("num_parts", "tolerance"), [(1, 2e-2), (3, 3e-5)])
def test_products_in_bfloat16_have_float32_gradients_to_their_rounding(
    num_parts: int, tolerance: float
) -> None:
    x, router, *weights, chosen = inputs_of()
    narrow = [Tensor(own).astype(ms.bfloat16) for own in weights]
    rounded = [own.astype(ms.float32).asnumpy() for own in narrow]
    plain, expected = mixture(Kernels(), [x, router, *rounded, chosen])
    cell = Mixture(NativeKernels(num_parts))
    tensors = [Tensor(x), Tensor(router), *narrow, Tensor(chosen)]
    gradient = ops.GradOperation(get_all=True, sens_param=True)
    found = gradient(cell)(*tensors, Tensor(floats(TOKENS, HIDDEN, seed=9)))[:4]
    assert {own.dtype for own in found} == {ms.float32}
    assert_alike([cell(*tensors).asnumpy()], plain, tolerance)
    assert_alike([own.asnumpy() for own in found], expected, tolerance)


@pytest.mark.parametrize("kernels", [Kernels(), *([NativeKernels()] if HAS_C else [])])
def test_of_equal_scores_the_first_experts_are_chosen(kernels: Kernels) -> None:
    x, weight = np.ones((3, 2), np.float32), np.zeros((2, 5), np.float32)
    weight[:, 3] = 1.0
    none = Tensor([0.0], ms.float32)
    found, margins = kernels.choose_experts(Routing(5, 3))(Tensor(x), Tensor(weight), none)
    np.testing.assert_array_equal(found.asnumpy(), [[3, 0, 1]] * 3)
    assert not margins.asnumpy().any()


@pytest.mark.parametrize("kernels", [Kernels(), *([NativeKernels()] if HAS_C else [])])
def test_of_equal_groups_the_first_are_taken_and_of_equal_experts_in_them_the_first(
    kernels: Kernels,
) -> None:
    x, weight = np.ones((3, 2), np.float32), np.zeros((2, 8), np.float32)
    routing = Routing(8, 3, is_sigmoid=True, groups=4, groups_taken=2, has_bias=True)
    bias = np.zeros(8, np.float32)
    # One expert is the best of all, in a group whose two best are not: 0.8 + 0.5 against 0.7 + 0.7.
    bias[[0, 1, 2, 3, 4, 6, 7]] = 0.2, 0.2, 0.2, 0.2, 0.3, 0.2, 0.2
    choose = kernels.choose_experts(routing)
    found, margins = choose(Tensor(x), Tensor(weight), Tensor(bias))
    np.testing.assert_array_equal(found.asnumpy(), [[0, 1, 2]] * 3)
    # Number 4 is better, in a group that is not taken.
    assert not margins.asnumpy().any()


@pytest.mark.parametrize("kernels", [Kernels(), *([NativeKernels()] if HAS_C else [])])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_margin_is_what_the_last_expert_is_above_the_first_that_is_not_chosen(
    kernels: Kernels, has_bias: bool
) -> None:
    x, weight, bias = floats(6, 5, seed=1), floats(5, 8, seed=2), floats(8, seed=3)
    logits = x.astype(np.float64) @ weight
    scores = 1 / (1 + np.exp(-logits)) if has_bias else np.exp(logits)
    scores = scores + bias if has_bias else scores / scores.sum(1, keepdims=True)
    falling = -np.sort(-scores, 1)
    routing = Routing(8, 3, is_sigmoid=has_bias, has_bias=has_bias)
    given = bias if has_bias else np.zeros(1, np.float32)
    _, margins = kernels.choose_experts(routing)(Tensor(x), Tensor(weight), Tensor(given))
    np.testing.assert_allclose(margins.asnumpy(), falling[:, 2] - falling[:, 3], atol=1e-6)
