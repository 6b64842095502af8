"""The CPU's kernels: cells that call the C code of this folder, with custom backwards; shapes in contract.Kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.dtypes import DTYPE_KEY, PRECISION_KEY, num_head_parts
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import experts
from mindgrpo.backend.kernels.native.attention import (
    ContextAttention,
    GatheringAgain,
    Mixed,
    RowAttention,
    RowsAndTable,
)
from mindgrpo.backend.kernels.native.library import (
    as_first,
    as_first_twice,
    as_first_two,
    call_kernel,
    float32_product,
    has_bfloat16,
    library,
    operation,
)
from mindgrpo.backend.kernels.native.rollout import Slots
from mindgrpo.backend.kernels.rollout import LocalModelShape, Memory
from mindgrpo.backend.kernels.shapes import (
    Activation,
    AdamWNumbers,
    Heads,
    Routing,
    SamplingParams,
    Vocabulary,
)
from mindgrpo.errors import UserError

# Block size, in elements, of the partial sums of native/optimizer.c.
SQUARES_AT_ONCE = 1 << 15


def _float32_twice(*types: Any) -> Any:
    return ms.float32, ms.float32


def _float32_thrice(*types: Any) -> Any:
    return ms.float32, ms.float32, ms.float32


def _rows_thrice(stats: Any) -> Any:
    return [stats[0]], [stats[0]], [stats[0]]


def _four_a_leaf(leaves: int) -> Callable[..., Any]:
    def shape(rows: Any, *others: Any) -> Any:
        return [rows[0], 4 * leaves]

    return shape


class _LogProbs(nn.Cell):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.sizes = Tensor([vocabulary.first, vocabulary.real], ms.int32)
        self.scale = Tensor([vocabulary.scale], ms.float32)


class _LogProbStats(_LogProbs):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.run = operation("log_prob_stats", _four_a_leaf(vocabulary.leaves), as_first)

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.run(logits, labels, self.sizes, self.scale)


class _LogProbsOfStats(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.run = operation("log_probs_of_stats", _rows_thrice, _float32_thrice)

    def construct(self, stats: Any) -> Any:
        return self.run(stats)


class _LogProbGrad(_LogProbs):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.run = operation("log_prob_grad", as_first, as_first)

    def construct(
        self, logits: Any, labels: Any, totals: Any, entropy: Any, dlogp: Any, dentropy: Any
    ) -> Any:
        return self.run(logits, labels, self.sizes, self.scale, totals, entropy, dlogp, dentropy)


class _LinearLogProbs(_LogProbs):
    def __init__(self, vocabulary: Vocabulary, num_parts: int) -> None:
        super().__init__(vocabulary)
        self.num_parts = Tensor([num_parts], ms.int32)


class _LinearLogProbStats(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_parts: int) -> None:
        super().__init__(vocabulary, num_parts)
        shape = _four_a_leaf(vocabulary.leaves)
        self.run = operation("linear_log_prob_stats", shape, as_first)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        return self.run(x, table, labels, self.sizes, self.scale, self.num_parts)


def _first_alone(x: Any, *others: Any) -> Any:
    return x, [1]


class _LinearLogProbGrad(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_parts: int, is_trained: bool) -> None:
        super().__init__(vocabulary, num_parts)
        shapes = as_first_two if is_trained else _first_alone
        self.run = operation("linear_log_prob_grad", shapes, _float32_twice)

    def construct(
        self, x: Any, table: Any, labels: Any, totals: Any, entropy: Any, dlogp: Any, dentropy: Any
    ) -> Any:
        numbers = totals, entropy, dlogp, dentropy
        return self.run(x, table, labels, self.sizes, self.scale, self.num_parts, *numbers)


def _product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[1]]


def _turned_product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[0]]


def _gradient_product(x: Any, dy: Any, *others: Any) -> Any:
    return [x[1], dy[1]]


class _MatMul(nn.Cell):
    """GEMM (x [N, K], weight [K, M], or [M, K] with `transpose_b`) -> [N, M], as Summation in bf16_gemm.h describes.

    `num_parts` None computes in float32. Gradients use a single leaf, and the same number of parts, or MindSpore's
    MatMul in float32, which is faster.
    """

    def __init__(self, num_parts: int | None, transpose_b: bool, leaves: int) -> None:
        super().__init__()
        straight = ("product", _product)
        turned = ("product_turned", _turned_product)
        forward, backward = (turned, straight) if transpose_b else (straight, turned)
        back = operation(*backward, as_first)
        gradient = operation("product_gradient", _gradient_product, as_first)
        in_one = Tensor([num_parts or 0, 1], ms.int32)

        def bprop(x: Any, weight: Any, summation: Any, out: Any, dout: Any) -> Any:
            rows, columns = (dout, x) if transpose_b else (x, dout)
            return (
                back(dout, weight, in_one),
                gradient(rows, columns, in_one),
                ops.zeros_like(summation),
            )

        plain_back = ops.MatMul(transpose_b=not transpose_b)
        plain_gradient = ops.MatMul(transpose_a=True)

        def plain_bprop(x: Any, weight: Any, summation: Any, out: Any, dout: Any) -> Any:
            rows, columns = (dout, x) if transpose_b else (x, dout)
            return (
                plain_back(dout, weight),
                plain_gradient(rows, columns),
                ops.zeros_like(summation),
            )

        # A bprop of the operation, since MindSpore does not recompute cells with a bprop of their own.
        own = plain_bprop if num_parts is None else bprop
        self.run = operation(*forward, as_first, own, variant=num_parts or 0)
        self.summation = Tensor([num_parts or 0, leaves], ms.int32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.run(x, weight, self.summation)


class _MatMulGradient(nn.Cell):
    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.run = operation("product_gradient", _gradient_product, as_first)
        self.summation = Tensor([num_parts, 1], ms.int32)

    def construct(self, x: Any, dy: Any) -> Any:
        return self.run(x, dy, self.summation)


# Like library.as_first, these infer output shapes and dtypes from the inputs', for one kernel each.
def _half_as_wide(both: Any, *others: Any) -> Any:
    return [both[0], both[1] // 2]


def _table_rows(tokens: Any, table: Any, *others: Any) -> Any:
    return [tokens[0], table[1]]


def _float32(*types: Any) -> Any:
    return ms.float32


def _as_third(first: Any, second: Any, third: Any, *others: Any) -> Any:
    return third


# The bprops below belong to operations, since MindSpore does not recompute cells with a bprop of their own.
class _RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        back = operation("rms_norm_grad", as_first_two, as_first_two)
        nothing = Tensor([0.0], ms.float32)

        def bprop(x: Any, weight: Any, eps: Any, out: Any, dout: Any) -> Any:
            dx, dweight = back(x, weight, eps, dout, nothing)
            return dx, dweight, ops.zeros_like(eps)

        self.run = operation("rms_norm", as_first, as_first, bprop)
        self.eps = Tensor([eps], ms.float32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.run(x, weight, self.eps)


class _AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        back = operation("rms_norm_grad", as_first_two, as_first_two)

        def bprop(x: Any, added: Any, weight: Any, eps: Any, out: Any, dout: Any) -> Any:
            dx, dweight = back(out[0], weight, eps, dout[1], dout[0])
            return dx, dx, dweight, ops.zeros_like(eps)

        self.run = operation("add_rms_norm", as_first_twice, as_first_twice, bprop)
        self.eps = Tensor([eps], ms.float32)

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        return self.run(x, added, weight, self.eps)


class _SwiGlu(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        back = operation("gated_grad", as_first, as_first)

        def bprop(both: Any, out: Any, dout: Any) -> Any:
            return (back(both, dout),)

        self.run = operation("gated", _half_as_wide, as_first, bprop)

    def construct(self, both: Any) -> Any:
        return self.run(both)


class _Embedding(nn.Cell):
    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.run = operation("embed", _table_rows, _float32)
        self.back = operation("embed_grad", _as_third, _float32)
        self.first = Tensor([first_token], ms.int32)

    def construct(self, tokens: Any, table: Any) -> Any:
        return self.run(tokens, table, self.first)

    def bprop(self, tokens: Any, table: Any, out: Any, dout: Any) -> Any:
        return ops.zeros_like(tokens), self.back(tokens, dout, table, self.first)


class NativeKernels(Kernels):
    """C kernels for CPUs; kernels without a C version fall back to plain MindSpore operations."""

    ragged = True
    takes_narrow_vectors = False
    widens_head = False
    has_adamw = True
    has_slots = True

    def __init__(self, num_parts: int | None = None, is_narrow: bool = False) -> None:
        """Splits GEMM operands into `num_parts` bfloat16 numbers (bf16_gemm.h), or computes in float32 if None.

        `is_narrow`: keys and values are stored in bfloat16. Raises RuntimeError without the C library, and UserError
        for `num_parts` on a CPU without bfloat16 GEMMs.
        """
        if library() is None:
            raise RuntimeError("the C kernels are not there: no C compiler was found, or it failed")
        if num_parts is not None and not has_bfloat16():
            raise UserError(
                f"{PRECISION_KEY} high and medium, and {DTYPE_KEY} bfloat16, need oneDNN's products of bfloat16, which "
                "it makes on x86 with AVX-512 and on Arm with BF16, and this processor has neither; set them to "
                "highest and float32."
            )
        self.num_parts = num_parts
        self._is_narrow = is_narrow

    @property
    def head_parts(self) -> int | None:
        return num_head_parts(self.num_parts, self.fp32_lm_head)

    def matmul(self, transpose_b: bool = False, leaves: int = 1) -> Any:
        if self.num_parts is None and not self.batch_invariant:
            return super().matmul(transpose_b)
        return _MatMul(self.head_parts if transpose_b else self.num_parts, transpose_b, leaves)

    def float32_matmul(self) -> Any:
        return _MatMul(None, False, 1)

    def float32_product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return float32_product(a, b)

    def matmul_back(self) -> Any:
        return super().matmul_back() if self.num_parts is None else _MatMul(self.num_parts, True, 1)

    def matmul_gradient(self) -> Any:
        return (
            super().matmul_gradient() if self.num_parts is None else _MatMulGradient(self.num_parts)
        )

    def rms_norm(self, eps: float) -> nn.Cell:
        return _RmsNorm(eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        return _AddRmsNorm(eps)

    def glu(self, activation: Activation) -> nn.Cell:
        return _SwiGlu() if activation == "silu" else super().glu(activation)

    def router(self, routing: Routing) -> nn.Cell:
        return experts.Router(routing)

    def choose_experts(self, routing: Routing) -> nn.Cell:
        return experts.ChooseExperts(routing)

    def sort_slots(self, routing: Routing) -> nn.Cell:
        return experts.SortSlots(routing)

    def take_rows(self) -> nn.Cell:
        return experts.TakeRows()

    def expert_mlp(self, activation: Activation) -> nn.Cell:
        is_silu = activation == "silu"
        return experts.ExpertMlp(self.num_parts) if is_silu else super().expert_mlp(activation)

    def expert_matmul(self, in_float32: bool = False) -> nn.Cell:
        return experts.ExpertMatMul(None if in_float32 else self.num_parts)

    def weighted_sum(self) -> nn.Cell:
        return experts.WeightedSum()

    def embedding(self, first_token: int) -> nn.Cell:
        return _Embedding(first_token)

    def pick(self) -> nn.Cell:
        return self.embedding(0)

    def exact_embedding(self, first_token: int) -> nn.Cell:
        return _Embedding(first_token)

    def rope_and_mask(self, rotary: np.ndarray | None, is_causal: bool = False) -> nn.Cell:
        return RowsAndTable(rotary)

    def attention(
        self, heads: Heads, rotary: np.ndarray | None, is_causal: bool = False
    ) -> nn.Cell:
        return Mixed(RowAttention(heads, self._is_narrow))

    def context_inputs(self, rotary: np.ndarray | None, index: int) -> nn.Cell:
        return RowsAndTable(rotary)

    def context_attention(
        self,
        heads: Heads,
        rotary: np.ndarray | None,
        index: int,
        gather: nn.Cell,
        scatter: nn.Cell,
        gathers_again: bool = False,
    ) -> nn.Cell:
        own = heads, self._is_narrow, index, gather
        if gathers_again:
            return Mixed(GatheringAgain(*own, scatter=scatter))
        return Mixed(ContextAttention(*own))

    def adamw(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        numbers: AdamWNumbers,
    ) -> None:
        n = numbers
        values = np.array(
            [
                n.lr,
                n.beta1,
                n.beta2,
                n.eps,
                1.0 - n.lr * n.weight_decay,
                1.0 - n.beta1**n.count,
                1.0 - n.beta2**n.count,
                n.scale,
            ]
        )
        call_kernel("adamw", weight, gradient, first, second, values)

    def square_sum(self, array: np.ndarray) -> float:
        flat = np.ascontiguousarray(array).reshape(-1)
        sums = np.zeros(flat.size // SQUARES_AT_ONCE + 1)
        call_kernel("square_sums", flat, sums)
        return float(sums.sum())

    def log_prob_stats(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbStats(vocabulary)

    def log_probs_of_stats(self) -> nn.Cell:
        return _LogProbsOfStats()

    def log_prob_grad(self, vocabulary: Vocabulary) -> nn.Cell:
        return _LogProbGrad(vocabulary)

    def linear_log_prob_stats(self, vocabulary: Vocabulary, rows: int) -> nn.Cell:
        if self.head_parts is None:
            return super().linear_log_prob_stats(vocabulary, rows)
        return _LinearLogProbStats(vocabulary, self.head_parts)

    def linear_log_prob_grad(
        self, vocabulary: Vocabulary, rows: int, is_trained: bool = True
    ) -> nn.Cell:
        if self.head_parts is None:
            return super().linear_log_prob_grad(vocabulary, rows, is_trained)
        return _LinearLogProbGrad(vocabulary, self.head_parts, is_trained)

    def slots(
        self,
        model_shape: LocalModelShape,
        sampling: SamplingParams,
        rotary: np.ndarray,
        slots: int,
        prompt_rows: int,
        memory: Memory,
    ) -> Slots:
        part_counts = self.num_parts, self.head_parts
        return Slots(model_shape, sampling, rotary, slots, prompt_rows, memory, part_counts)
