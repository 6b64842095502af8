"""Products of bfloat16 parts against float64: alone, in graphs and in the generator; and who may ask for them.

Does not prove their speed (scripts/bench/), nor that a run learns with them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from small_generators import (
    PRECISIONS,
    WITH_AVX512,
    assert_same,
    generator_with,
    kernels_named,
    random_weights,
    requests_of,
    run,
)
from tables import each_row

from mindgrpo.backend import dtypes
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import (
    NUM_PARTS,
    MatmulPrecision,
    packed_bytes,
    resolve_matmul_precision,
    slow_products,
)
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import call_kernel, library
from mindgrpo.backend.targets import SHARED_MEMORY, Target
from mindgrpo.errors import UserError
from mindgrpo.models.parallel_cells import Linear, Same
from mindgrpo.weights.pretrained import fill_random

pytestmark = WITH_AVX512
# Of each product, relative: rounding to bfloat16 leaves 2^-9 of a number at most, so of a product of one part 2^-8 are
# missing; of two 2^-18 of each factor, and the product of their second parts; of three less than float32 sums leave.
LARGEST_ERROR = {1: 2.0**-7, 2: 3 * 2.0**-17, 3: 2.0**-21}
SIZES = [(2048, 96, 64), (37, 100, 300), (1, 64, 5), (130, 33, 513), (257, 256, 256), (16, 1, 1)]
FORMS = ("product", "product_turned", "product_gradient")


class Summation(ctypes.Structure):
    _fields_ = (("parts", ctypes.c_int), ("leaves", ctypes.c_int))


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    """First of all: what it sets can only be set before MindSpore computes."""
    return CpuBackend({})


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def product(form: str, x: np.ndarray, w: np.ndarray, parts: int) -> np.ndarray:
    """x w, by the kernel that takes one of them transposed."""
    y = np.full((len(x), w.shape[1]), 77, np.float32)
    if form.endswith("turned"):
        w = np.ascontiguousarray(w.T)
    if form.endswith("gradient"):
        x = np.ascontiguousarray(x.T)
    call_kernel(form, x, w, np.array([parts, 1], np.int32), y)
    return y


@each_row("parts", LARGEST_ERROR)
@each_row("form", FORMS)
@each_row("m, k, n", SIZES)
def test_a_product_is_numpys(form: str, m: int, k: int, n: int, parts: int) -> None:
    x, w = random(m, k), random(k, n)
    exact = x.astype(np.float64) @ w.astype(np.float64)
    # What rounding each factor can make of the sum, at most.
    bound = LARGEST_ERROR[parts] * (np.abs(x).astype(np.float64) @ np.abs(w))
    assert np.all(np.abs(product(form, x, w, parts) - exact) <= bound + 1e-6)


def test_one_part_is_the_product_of_the_rounded_factors() -> None:
    x, w = random(64, 80), random(80, 48)
    rounded = [
        (a.view(np.uint32) + 0x7FFF + (a.view(np.uint32) >> 16 & 1)) >> 16 << 16 for a in (x, w)
    ]
    exact = np.matmul(*(r.view(np.float32).astype(np.float64) for r in rounded))
    np.testing.assert_allclose(product(FORMS[0], x, w, 1), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("parts", LARGEST_ERROR)
def test_a_row_is_bit_for_bit_the_same_in_any_company(parts: int) -> None:
    x, w = random(300, 96), random(96, 200)
    together = product(FORMS[0], x, w, parts)
    for count in (1, 7, 16, 33, 128, 255):
        alone = product(FORMS[0], x[20 : 20 + count], w, parts)
        np.testing.assert_array_equal(alone, together[20 : 20 + count])


@each_row("parts", (0, *LARGEST_ERROR))
@each_row(
    "m, k, n, leaves",
    [(5, 192, 96, 8), (77, 72, 50, 8), (300, 28, 33, 4), (1, 6, 7, 2), (1300, 128, 16, 8)],
)
def test_a_tree_is_the_sum_of_the_products_of_its_leaves(
    m: int, k: int, n: int, leaves: int, parts: int
) -> None:
    x, w, summed = random(m, k), random(k, n), np.empty((m, n), np.float32)
    call_kernel("product", x, w, np.array([parts, leaves], np.int32), summed)
    pairs = zip(np.split(x, leaves, axis=1), np.split(w, leaves), strict=True)
    sums = [product(FORMS[0], np.ascontiguousarray(a), b, parts) for a, b in pairs]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    np.testing.assert_array_equal(summed, sums[0])


@pytest.mark.parametrize("parts", LARGEST_ERROR)
def test_what_is_no_number_stays_in_its_row_and_column(parts: int) -> None:
    x, w = random(20, 40), random(40, 70)
    x[3, 5], x[7, 2], w[11, 60] = np.nan, np.inf, np.float32(np.nan)
    finite = np.isfinite(product(FORMS[0], x, w, parts))
    expected = np.ones_like(finite)
    expected[[3, 7]] = False
    expected[:, 60] = False
    np.testing.assert_array_equal(finite, expected)


@pytest.mark.parametrize(("name", "transpose_b"), [("high", False), ("medium", True)])
def test_gradients_in_a_graph_are_those_of_the_product(name: str, transpose_b: bool) -> None:
    kernels, parts = kernels_named(name), NUM_PARTS[name]
    x, w, dy = random(40, 24), random(24, 56), random(40, 56)

    class Weighed(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            weight = Parameter(Tensor(np.ascontiguousarray(w.T) if transpose_b else w), name="w")
            self.linear = Linear(weight, kernels.matmul(transpose_b), Same())

        def construct(self, x: Tensor, dy: Tensor) -> Tensor:
            return (self.linear(x) * dy).sum()

    cell = Weighed()
    ms.set_context(mode=ms.GRAPH_MODE)
    both = ms.grad(cell, grad_position=0, weights=cell.trainable_params())(Tensor(x), Tensor(dy))
    dx, dw = both[0].asnumpy(), both[1][0].asnumpy()
    bound = 40 * LARGEST_ERROR[parts]
    np.testing.assert_allclose(dx, dy @ w.T, rtol=0, atol=bound)
    np.testing.assert_allclose(dw.T if transpose_b else dw, x.T @ dy, rtol=0, atol=bound)
    gradient = kernels.matmul_gradient()(Tensor(x), Tensor(dy)).asnumpy()
    np.testing.assert_allclose(gradient, x.T @ dy, rtol=0, atol=bound)


def test_more_parts_than_there_are_and_too_little_room_are_refused() -> None:
    x, w = random(4, 8), random(8, 8)
    with pytest.raises(RuntimeError, match="4 parts: there are 0 to 3"):
        product(FORMS[0], x, w, 4)
    with pytest.raises(RuntimeError, match="1024 bytes are no room for 4096"):
        call_kernel("product_pack", w, np.array([1, 1], np.int32), np.zeros(1024, np.uint8))
    with pytest.raises(RuntimeError, match="8 terms are not summed in 16 leaves"):
        call_kernel("product", x, w, np.array([1, 16], np.int32), np.zeros((4, 8), np.float32))


@pytest.mark.parametrize("parts", LARGEST_ERROR)
def test_packed_matrices_need_no_more_than_is_planned(parts: int) -> None:
    native = library()
    assert native is not None
    native.packed_matrix_bytes.argtypes = [ctypes.c_int64, ctypes.c_int64, Summation]
    native.packed_matrix_bytes.restype = ctypes.c_int64
    sizes = [(576, 1536, 8), (100, 300, 4), (1, 1, 1), (64, 50, 2), (256, 230, 1), (33, 513, 1)]
    for k, n, leaves in sizes:
        bytes_needed = native.packed_matrix_bytes(k, n, Summation(parts, leaves))
        assert 0 < bytes_needed <= packed_bytes(k, n, parts, leaves)


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_generator_uses_the_weights_of_its_last_publish(backend: CpuBackend, name: str) -> None:
    weights = random_weights(backend)
    made = generator_with(weights, backend, kernels_named(name))
    before = run(made, requests_of())
    fill_random(weights, seed=2, scale=0.25)
    fresh = run(generator_with(weights, backend, kernels_named(name)), requests_of())
    source = weights.arrays.flat_buffers

    def copy() -> None:
        for target, values in zip(made.weights.arrays.flat_buffers, source, strict=True):
            target[...] = values

    made.publish(copy, 7)
    after = run(made, requests_of())
    assert_same(after, fresh, atol=0)
    assert [c.tokens.tolist() for c in after] != [c.tokens.tolist() for c in before]


def test_a_generator_with_three_parts_is_that_of_float32(backend: CpuBackend) -> None:
    weights = random_weights(backend)
    made = [generator_with(weights, backend, kernels_named(name)) for name in ("high", "native")]
    # Logits of this model are some 10 and more: float32's own rounding makes differences of 1e-5.
    assert_same(*(run(one, requests_of()) for one in made), atol=5e-4)


def test_a_generator_with_a_float32_head_has_float32s_logits_of_what_layers_in_bfloat16_made(
    backend: CpuBackend,
) -> None:
    weights = random_weights(backend)
    with weights.on_host(write=True) as host:
        for name, part in host.hf_views.items():
            # Layers add nothing then, in any precision.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                part[...] = 0.0
    kernels = {name: kernels_named(name) for name in ("native", "medium")}
    kernels["head"] = kernels_named("medium")
    kernels["head"].fp32_lm_head = True
    made = {name: generator_with(weights, backend, own) for name, own in kernels.items()}
    found = {name: run(one, requests_of()) for name, one in made.items()}
    assert_same(found["head"], found["native"], atol=5e-5)
    gaps = [
        np.abs(one.logps - other.logps).max()
        for one, other in zip(found["medium"], found["native"], strict=True)
        if one.tokens.tolist() == other.tokens.tolist()
    ]
    assert max(gaps) > 1e-3
    sizes = [sum(p.num_bytes for p in made[name].pools["generator"]) for name in ("head", "medium")]
    assert sizes[0] - sizes[1] == packed_bytes(32, 67, 3) - packed_bytes(32, 67, 1)


def test_memory_for_packed_weights_counts_as_the_generators(backend: CpuBackend) -> None:
    weights = random_weights(backend)
    made = generator_with(weights, backend, kernels_named("high"))
    plain = generator_with(weights, backend, kernels_named("native"))
    ours, theirs = (sum(p.num_bytes for p in one.pools["generator"]) for one in (made, plain))
    layer = packed_bytes(32, 64, 3) + packed_bytes(32, 32, 3) + packed_bytes(32, 96, 3)
    layer += packed_bytes(48, 32, 3)
    assert ours - theirs == 2 * layer + packed_bytes(32, 67, 3)


AMX = "flags : fpu avx512f amx_bf16 amx_tile"


def test_auto_is_highest() -> None:
    for target, has_kernels in ((SHARED_MEMORY, True), (SHARED_MEMORY, False)):
        assert resolve_matmul_precision("auto", target, has_kernels) == "highest"
    assert resolve_matmul_precision("auto", Target("CPU", "device"), False) == "highest"


@pytest.mark.parametrize(
    "precision, flags, limit, why",
    [
        ("high", AMX + " avx512_bf16", "", "it makes six products of bfloat16"),
        ("medium", AMX, "", None),
        ("medium", AMX + " avx512_bf16", "AVX512_CORE_BF16", None),
        ("medium", AMX, "AVX512_CORE_BF16", "the processor has no instructions for bfloat16"),
        (
            "medium",
            AMX + " avx512_bf16",
            "AVX512_CORE",
            "the processor has no instructions for bfloat16",
        ),
        ("medium", "flags : fpu avx512f", "", "the processor has no instructions for bfloat16"),
        ("medium", "Features : fp asimd bf16", "", None),
        ("medium", "Features : fp asimd", "", "the processor has no instructions for bfloat16"),
        ("highest", "flags : fpu", "", None),
    ],
)
def test_products_that_are_slower_than_float32_are_told(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    precision: MatmulPrecision,
    flags: str,
    limit: str,
    why: str | None,
) -> None:
    (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setattr(dtypes, "CPU_INFO", tmp_path / "cpuinfo")
    sentences = slow_products(precision, {"ONEDNN_MAX_CPU_ISA": limit})
    assert len(sentences) == (why is not None)
    assert why is None or sentences[0].endswith(why)


def test_what_a_device_does_not_have_is_refused() -> None:
    assert resolve_matmul_precision("high", Target("Ascend", "device"), False) == "high"
    for asked, target, has_kernels, why in (
        ("medium", Target("Ascend", "device"), False, "not exist on Ascend, which has high"),
        (
            "high",
            Target("CPU", "device"),
            False,
            "exists on CPU, shared memory, not on CPU, device",
        ),
        ("high", SHARED_MEMORY, False, "needs the C kernels, which cannot be made here"),
    ):
        with pytest.raises(UserError, match=f"'{asked}', which .*{why}"):
            resolve_matmul_precision(asked, target, has_kernels)


def test_processors_without_instructions_for_it_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mindgrpo.backend.kernels.native.kernels.has_bfloat16", lambda: False)
    NativeKernels()
    with pytest.raises(
        UserError, match="AVX-512 and on Arm with BF16, and this processor has neither"
    ):
        NativeKernels(3)
