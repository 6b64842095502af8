"""The CPU's own kernels as cells: each calls C code of native/ and carries its own backward.

Refuses to fall back: where there is no library, the backend gives plain_kernels.py instead.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels import Heads, Kernels
from mindgrpo.backend.native_library import operation


# How outputs' shapes and types follow from the inputs'. Plain functions: MindSpore calls them while compiling.
def _as_first(first: Any, *others: Any) -> Any:
    return first


def _as_first_twice(first: Any, *others: Any) -> Any:
    return first, first


def _as_first_two(first: Any, second: Any, *others: Any) -> Any:
    return first, second


def _half_as_wide(both: Any, *others: Any) -> Any:
    return [both[0], both[1] // 2]


def _table_rows(tokens: Any, table: Any, *others: Any) -> Any:
    return [tokens[0], table[1]]


def _type_of_second(first: Any, second: Any, *others: Any) -> Any:
    return second


def _as_third(first: Any, second: Any, third: Any, *others: Any) -> Any:
    return third


class _RmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.run = operation("rms_norm", _as_first, _as_first)
        self.back = operation("rms_norm_grad", _as_first_two, _as_first_two)
        self.eps = Tensor([eps], ms.float32)
        self.nothing = Tensor([0.0], ms.float32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.run(x, weight, self.eps)

    def bprop(self, x: Any, weight: Any, out: Any, dout: Any) -> Any:
        return self.back(x, weight, self.eps, dout, self.nothing)


class _AddRmsNorm(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.run = operation("add_rms_norm", _as_first_twice, _as_first_twice)
        self.back = operation("rms_norm_grad", _as_first_two, _as_first_two)
        self.eps = Tensor([eps], ms.float32)

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        return self.run(x, added, weight, self.eps)

    def bprop(self, x: Any, added: Any, weight: Any, out: Any, dout: Any) -> Any:
        dx, dweight = self.back(out[0], weight, self.eps, dout[1], dout[0])
        return dx, dx, dweight


class _Gated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.run = operation("gated", _half_as_wide, _as_first)
        self.back = operation("gated_grad", _as_first, _as_first)

    def construct(self, both: Any) -> Any:
        return self.run(both)

    def bprop(self, both: Any, out: Any, dout: Any) -> Any:
        return (self.back(both, dout),)


class _Embedding(nn.Cell):
    def __init__(self, first_token: int) -> None:
        super().__init__()
        self.run = operation("embed", _table_rows, _type_of_second)
        self.back = operation("embed_grad", _as_third, _as_third)
        self.first = Tensor([first_token], ms.int32)

    def construct(self, tokens: Any, table: Any) -> Any:
        return self.run(tokens, table, self.first)

    def bprop(self, tokens: Any, table: Any, out: Any, dout: Any) -> Any:
        return ops.zeros_like(tokens), self.back(tokens, dout, table, self.first)
