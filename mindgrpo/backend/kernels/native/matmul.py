"""Matrix products of bfloat16 parts (bf16_gemm.h) as cells with gradients."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.native.library import operation
from mindgrpo.backend.kernels.native.out_shapes import as_first


def _product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[1]]


def _turned_product(x: Any, weight: Any, *others: Any) -> Any:
    return [x[0], weight[0]]


def _gradient_product(x: Any, dy: Any, *others: Any) -> Any:
    return [x[1], dy[1]]


class MatMul(nn.Cell):
    """A product of bfloat16 parts, whose gradients are such products."""

    def __init__(self, num_parts: int, transpose_b: bool) -> None:
        super().__init__()
        straight = ("bf16_product", _product)
        turned = ("bf16_product_turned", _turned_product)
        forward, backward = (turned, straight) if transpose_b else (straight, turned)
        back = operation(*backward, as_first)
        gradient = operation("bf16_product_gradient", _gradient_product, as_first)

        def bprop(x: Any, weight: Any, num_parts: Any, out: Any, dout: Any) -> Any:
            rows, columns = (dout, x) if transpose_b else (x, dout)
            return (
                back(dout, weight, num_parts),
                gradient(rows, columns, num_parts),
                ops.zeros_like(num_parts),
            )

        # The operation's and not the cell's own: of these MindSpore computes nothing again.
        self.run = operation(*forward, as_first, bprop)
        self.num_parts = Tensor([num_parts], ms.int32)

    def construct(self, x: Any, weight: Any) -> Any:
        return self.run(x, weight, self.num_parts)


class MatMulGradient(nn.Cell):
    def __init__(self, num_parts: int) -> None:
        super().__init__()
        self.run = operation("bf16_product_gradient", _gradient_product, as_first)
        self.num_parts = Tensor([num_parts], ms.int32)

    def construct(self, x: Any, dy: Any) -> Any:
        return self.run(x, dy, self.num_parts)
