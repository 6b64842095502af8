"""Log-probs and entropy of given tokens as cells: of logits, and of the head's input with the product in one."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn

from mindgrpo.backend.kernels.native.library import operation
from mindgrpo.backend.kernels.native.out_shapes import as_first, as_first_two
from mindgrpo.backend.kernels.shapes import Vocabulary


def _float32_twice(*types: Any) -> Any:
    return ms.float32, ms.float32


def _four_a_row(logits: Any, *others: Any) -> Any:
    return [logits[0], 4]


class _LogProbs(nn.Cell):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.sizes = Tensor([vocabulary.first, vocabulary.real], ms.int32)
        self.scale = Tensor([vocabulary.scale], ms.float32)


class LogProbStats(_LogProbs):
    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.run = operation("log_prob_stats", _four_a_row, as_first)

    def construct(self, logits: Any, labels: Any) -> Any:
        return self.run(logits, labels, self.sizes, self.scale)


class LogProbGrad(_LogProbs):
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


class LinearLogProbStats(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_parts: int) -> None:
        super().__init__(vocabulary, num_parts)
        self.run = operation("linear_log_prob_stats", _four_a_row, as_first)

    def construct(self, x: Any, table: Any, labels: Any) -> Any:
        return self.run(x, table, labels, self.sizes, self.scale, self.num_parts)


def _first_alone(x: Any, *others: Any) -> Any:
    return x, [1]


class LinearLogProbGrad(_LinearLogProbs):
    def __init__(self, vocabulary: Vocabulary, num_parts: int, is_trained: bool) -> None:
        super().__init__(vocabulary, num_parts)
        shapes = as_first_two if is_trained else _first_alone
        self.run = operation("linear_log_prob_grad", shapes, _float32_twice)

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
        return self.run(x, table, labels, self.sizes, self.scale, self.num_parts, *numbers)
