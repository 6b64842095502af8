"""Matrix products of bfloat16 terms (bf16_gemm.h) as cells with gradients, the head's with its log-probs in one."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.contract import Vocabulary
from mindgrpo.backend.kernels.native.library import operation


def _type_of_first(first: Any, *others: Any) -> Any:
    return first


def _product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[1]]


def _turned_product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[0]]


def _gradient_product(x: Any, dy: Any, *others: Any) -> Any:
    return [x[1], dy[1]]


def _four_a_row(x: Any, *others: Any) -> Any:
    return [x[0], 4]


def _as_first_two(first: Any, second: Any, *others: Any) -> Any:
    return first, second


def _float32_twice(*types: Any) -> Any:
    return ms.float32, ms.float32


class MatMul(nn.Cell):
    """A product of bfloat16 terms, whose gradients are such products."""

    def __init__(self, num_terms: int, transpose_b: bool) -> None:
        super().__init__()
        straight = ("bf16_product", _product)
        turned = ("bf16_product_turned", _turned_product)
        forward, backward = (turned, straight) if transpose_b else (straight, turned)
        back = operation(*backward, _type_of_first)
        gradient = operation("bf16_product_gradient", _gradient_product, _type_of_first)

        def bprop(x: Any, weight: Any, terms: Any, out: Any, dout: Any) -> Any:
            rows, columns = (dout, x) if transpose_b else (x, dout)
            return back(dout, weight, terms), gradient(rows, columns, terms), ops.zeros_like(terms)

        # The operation's and not the cell's own: of these MindSpore computes nothing again.
        self.run = operation(*forward, _type_of_first, bprop)
        self.terms = Tensor([num_terms], ms.int32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.run(x, weight, self.terms)


class MatMulGradient(nn.Cell):
    def __init__(self, num_terms: int) -> None:
        super().__init__()
        self.run = operation("bf16_product_gradient", _gradient_product, _type_of_first)
        self.terms = Tensor([num_terms], ms.int32)

    def construct(self, x: Any, dy: Any) -> Any:
        return self.run(x, dy, self.terms)


class _LinearLogProbs(nn.Cell):
    def __init__(self, vocabulary: Vocabulary, num_terms: int) -> None:
        super().__init__()
        self.sizes = Tensor([vocabulary.first, vocabulary.real], ms.int32)
        self.scale = Tensor([vocabulary.scale], ms.float32)
        self.terms = Tensor([num_terms], ms.int32)


class LinearLogProbStats(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_terms: int) -> None:
        super().__init__(vocabulary, num_terms)
        self.run = operation("linear_log_prob_stats", _four_a_row, _type_of_first)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        return self.run(x, table, labels, self.sizes, self.scale, self.terms)


class LinearLogProbGrad(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_terms: int) -> None:
        super().__init__(vocabulary, num_terms)
        self.run = operation("linear_log_prob_grad", _as_first_two, _float32_twice)

    def construct(
        self,
        x: Any,
        table: Any,
        labels: Any,
        totals: Any,
        entropy: Any,
        dlogp: Any,
        dentropy: Any,
    ) -> Any:
        numbers = totals, entropy, dlogp, dentropy
        return self.run(x, table, labels, self.sizes, self.scale, self.terms, *numbers)
