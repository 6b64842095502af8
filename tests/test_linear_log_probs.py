"""Log-probs from the head's input without all logits: against NumPy in float64, and chunks against the whole.

Does not prove that memory falls: scripts/bench/activations.py measures it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from small_generators import WITH_AVX512

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.dtypes import NUM_PARTS, numpy_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import call_kernel, library_path
from mindgrpo.backend.kernels.shapes import Vocabulary
from mindgrpo.models.log_probs import TokenLogProbs


def exact_head() -> NativeKernels:
    """Layers in bfloat16, and a head in float32."""
    kernels = NativeKernels(NUM_PARTS["medium"])
    kernels.fp32_lm_head = True
    return kernels


WITH_COMPILER = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")
KERNELS = [
    pytest.param(Kernels, 2e-5, id="plain"),
    pytest.param(NativeKernels, 2e-5, id="native", marks=WITH_COMPILER),
    pytest.param(lambda: NativeKernels(NUM_PARTS["high"]), 2e-5, id="high", marks=WITH_AVX512),
    pytest.param(lambda: NativeKernels(NUM_PARTS["medium"]), 0.02, id="medium", marks=WITH_AVX512),
    pytest.param(exact_head, 2e-5, id="medium, fp32_lm_head", marks=WITH_AVX512),
]
# Rows, hidden, width: one block; blocks of the vocabulary that are not full; stretches of rows; one of each.
SIZES = [(37, 48, 300), (70, 32, 5000), (2500, 16, 2049), (1, 5, 3)]


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


def inputs(rows: int, hidden: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    table = 0.3 * rng.normal(size=(width, hidden))
    labels = rng.integers(0, width, rows).astype(np.int32)
    return rng.normal(size=(rows, hidden)).astype(np.float32), table.astype(np.float32), labels


def by_numpy(
    x: np.ndarray, table: np.ndarray, labels: np.ndarray, vocabulary: Vocabulary, sens: np.ndarray
) -> list[np.ndarray]:
    """log p, entropy, and the gradients of sens[0] log p + sens[1] entropy with regard to x and the table."""
    wide = x.astype(np.float64), table[: vocabulary.real].astype(np.float64)
    logits = wide[0] @ wide[1].T * vocabulary.scale
    top = logits.max(1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    p = np.exp(log_p)
    entropy = -(p * log_p).sum(1)
    dlogits = sens[0][:, None] * (np.eye(vocabulary.real)[labels] - p)
    dlogits = (dlogits - sens[1][:, None] * p * (log_p + entropy[:, None])) * vocabulary.scale
    dtable = np.zeros(table.shape)
    dtable[: vocabulary.real] = dlogits.T @ wide[0]
    return [log_p[np.arange(len(x)), labels], entropy, dlogits @ wide[1], dtable]


class Head(nn.Cell):
    def __init__(self, log_probs: TokenLogProbs, table: np.ndarray) -> None:
        super().__init__()
        self.log_probs, self.table = log_probs, Parameter(Tensor(table), name="table")

    def construct(self, x: Any, labels: Any) -> Any:
        return self.log_probs(x, self.table, labels)


def in_a_graph(
    log_probs: TokenLogProbs, x: np.ndarray, table: np.ndarray, labels: np.ndarray, sens: np.ndarray
) -> list[np.ndarray]:
    head = Head(log_probs, table)
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    of_inputs, of_table = gradient(head, [head.table])(
        Tensor(x), Tensor(labels), (Tensor(sens[0]), Tensor(sens[1]))
    )
    outputs = [*head(Tensor(x), Tensor(labels)), of_inputs[0], of_table[0]]
    return [output.asnumpy() for output in outputs]


@pytest.mark.parametrize(("make", "tolerance"), KERNELS)
@pytest.mark.parametrize("size", SIZES[:2])
def test_parts_of_the_logits_give_what_numpy_gives_of_all(
    backend: CpuBackend,
    make: Any,
    tolerance: float,
    size: tuple[int, int, int],
) -> None:
    x, table, labels = inputs(*size)
    vocabulary = Vocabulary(0, size[2], size[2], 0.7)
    sens = np.random.default_rng(0).normal(size=(2, size[0])).astype(np.float32)
    # Chunks of 25 rows, the last one shorter: each is compiled anew.
    log_probs = TokenLogProbs(make(), vocabulary, backend.group((0,)), 4 * size[2] * 25)
    for given, exact in zip(
        in_a_graph(log_probs, x, table, labels, sens),
        by_numpy(x, table, labels, vocabulary, sens),
        strict=True,
    ):
        np.testing.assert_allclose(given, exact, rtol=0, atol=tolerance * np.abs(exact).max())


def stats_and_gradients(
    kernels: Kernels, arrays: tuple[np.ndarray, ...], vocabulary: Vocabulary
) -> list[np.ndarray]:
    x, table, labels = (Tensor(array) for array in arrays)
    rng = np.random.default_rng(1)
    total, entropy, dlogp, dentropy = rng.normal(size=(4, len(arrays[0]))).astype(np.float32)
    numbers = (Tensor(values) for values in (total + 6, entropy, dlogp, dentropy))
    stats = kernels.linear_log_prob_stats(vocabulary, 100)(x, table, labels)
    gradients = kernels.linear_log_prob_grad(vocabulary, 100)(x, table, labels, *numbers)
    return [output.asnumpy() for output in (stats, *gradients)]


@pytest.mark.parametrize(("make", "_"), KERNELS[:2])
def test_a_table_that_is_not_trained_gets_no_gradient_and_the_rest_is_the_same(
    backend: CpuBackend, make: Any, _: float
) -> None:
    x, table, labels = inputs(*SIZES[0])
    vocabulary = Vocabulary(0, len(table), len(table), 0.7)
    sens = np.random.default_rng(0).normal(size=(2, len(x))).astype(np.float32)
    of_both, of_x = (
        in_a_graph(
            TokenLogProbs(make(), vocabulary, backend.group((0,)), 4 * len(table) * 25, is_trained),
            x,
            table,
            labels,
            sens,
        )
        for is_trained in (True, False)
    )
    for one, other in zip(of_both[:-1], of_x[:-1], strict=True):
        np.testing.assert_array_equal(one, other)
    assert of_both[-1].any() and not of_x[-1].any()


@WITH_AVX512
@pytest.mark.parametrize(
    ("size", "missing"), [(SIZES[0], 0), (SIZES[0], 2), (SIZES[1], 2), (SIZES[2], 2), (SIZES[3], 0)]
)
def test_a_ranks_share_with_padding_and_foreign_labels_is_as_with_plain_operations(
    size: tuple[int, int, int], missing: int
) -> None:
    x, table, labels = inputs(*size)
    vocabulary = Vocabulary(size[2] // 2, size[2], size[2] - missing)
    plain = stats_and_gradients(Kernels(), (x, table, labels), vocabulary)
    ours = stats_and_gradients(NativeKernels(3), (x, table, labels), vocabulary)
    for given, exact in zip(ours, plain, strict=True):
        np.testing.assert_allclose(given, exact, rtol=0, atol=4e-5 * np.abs(exact).max())


def called(x: np.ndarray, table: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """The stats and both gradients, by the kernels with one term."""
    numbers = np.array([0, len(table)], np.int32), np.ones(1, np.float32), np.ones(1, np.int32)
    of_rows = np.random.default_rng(1).normal(size=(4, len(x))).astype(np.float32)
    outputs = [np.zeros(shape, np.float32) for shape in ((len(x), 4), x.shape, table.shape)]
    call_kernel("linear_log_prob_stats", x, table, labels, *numbers, outputs[0])
    call_kernel("linear_log_prob_grad", x, table, labels, *numbers, *of_rows, *outputs[1:])
    return outputs


@WITH_AVX512
def test_a_table_in_two_bytes_is_as_its_numbers_in_four() -> None:
    x, table, labels = inputs(*SIZES[0])
    narrow = table.astype(numpy_dtype("bfloat16"))
    in_four = called(x, narrow.astype(np.float32), labels)
    for given, exact in zip(called(x, narrow, labels), in_four, strict=True):
        assert exact.any() and given.tobytes() == exact.tobytes()


@WITH_AVX512
def test_no_rows_leave_a_table_without_gradient() -> None:
    x, table, labels = inputs(*SIZES[0])
    assert not called(x[:0], table, labels[:0])[2].any()
