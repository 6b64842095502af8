"""Attention cells that call the C code of attention.c, with custom backwards; shapes in contract.Kernels."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.native.library import as_first_twice, operation
from mindgrpo.backend.kernels.shapes import Heads


class RowsAndTable(nn.Cell):
    """(positions, *others) -> (positions int32 [R, T], *others, table float32 [S, 2 D]), the inputs of attention.c.

    Without `rotary`, the inputs are (angles float32 [R, T, 2 D], *others), and the angles are the table, a row a token.
    """

    def __init__(self, rotary: np.ndarray | None) -> None:
        super().__init__()
        self.has_table = rotary is not None
        self.rotary = Tensor(np.zeros(1, np.float32) if rotary is None else rotary)
        self.order = Tensor(np.arange(1 if self.has_table else 1 << 20, dtype=np.int32))
        self.slice = ops.StridedSlice()

    def construct(self, positions: Any, *others: Any) -> Any:
        if self.has_table:
            return (positions, *others, self.rotary)
        rows, length, width = positions.shape
        order = self.slice(self.order, (0,), (rows * length,), (1,)).reshape(rows, length)
        return (order, *others, positions.reshape(-1, width))


class RowAttention(nn.Cell):
    """Attention in whole rows: (qkv [N, heads.width], ...) -> (output [N, queries D], log-sum-exp [N, queries])."""

    def __init__(self, heads: Heads, is_narrow: bool) -> None:
        super().__init__()
        queries, dim = heads.queries, heads.dim

        def mixed_shapes(qkv: Any, *others: Any) -> Any:
            return [qkv[0], queries * dim], [qkv[0], queries]

        def gradient_shapes(qkv: Any, bias: Any, q_norm: Any, k_norm: Any, *others: Any) -> Any:
            return qkv, bias, q_norm, k_norm

        def gradient_types(qkv: Any, bias: Any, q_norm: Any, k_norm: Any, *others: Any) -> Any:
            return qkv, bias, q_norm, k_norm

        back = operation("attention_grad", gradient_shapes, gradient_types)

        def bprop(
            qkv: Any,
            bias: Any,
            q_norm: Any,
            k_norm: Any,
            positions: Any,
            spans: Any,
            rotary: Any,
            sizes: Any,
            numbers: Any,
            out: Any,
            dout: Any,
        ) -> Any:
            context = positions, spans, rotary, sizes, numbers
            gradients = back(qkv, bias, q_norm, k_norm, *context, out[0], out[1], dout[0])
            zeros = []
            for constant in context:
                zeros.append(ops.zeros_like(constant))
            return (*gradients, *zeros)

        self.run = operation("attention", mixed_shapes, as_first_twice, bprop)
        self.sizes = Tensor([queries, heads.kv, dim, int(is_narrow)], ms.int32)
        self.numbers = Tensor([heads.norm_eps or 0.0, heads.scale], ms.float32)

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, spans: Any, rotary: Any
    ) -> Any:
        return self.run(
            qkv, bias, q_norm, k_norm, positions, spans, rotary, self.sizes, self.numbers
        )


class Mixed(nn.Cell):
    """Drops the log-sum-exp output of `attention`, which only the backward needs."""

    def __init__(self, attention: nn.Cell) -> None:
        super().__init__()
        self.attention = attention

    def construct(self, *inputs: Any) -> Any:
        mixed, _ = self.attention(*inputs)
        return mixed


class ContextAttention(nn.Cell):
    """Context-parallel attention: (qkv [n, heads.width], ...) -> (output [n, queries D], log-sum-exp [n, queries])."""

    def __init__(self, heads: Heads, is_narrow: bool, index: int, gather: nn.Cell) -> None:
        super().__init__()
        queries, self.mixed = heads.queries, heads.queries * heads.dim

        def mixed_shapes(q: Any, *others: Any) -> Any:
            return q, [q[0], queries]

        def as_first_five(
            q: Any, kv: Any, bias: Any, q_norm: Any, k_norm: Any, *others: Any
        ) -> Any:
            return q, kv, bias, q_norm, k_norm

        self.back = operation("context_attention_grad", as_first_five, as_first_five)

        def bprop(
            q: Any,
            kv: Any,
            bias: Any,
            q_norm: Any,
            k_norm: Any,
            positions: Any,
            spans: Any,
            columns: Any,
            rotary: Any,
            sizes: Any,
            numbers: Any,
            out: Any,
            dout: Any,
        ) -> Any:
            context = positions, spans, columns, rotary, sizes, numbers
            gradients = self.back(q, kv, bias, q_norm, k_norm, *context, out[0], out[1], dout[0])
            zeros = []
            for constant in context:
                zeros.append(ops.zeros_like(constant))
            return (*gradients, *zeros)

        self.run = operation("context_attention", mixed_shapes, as_first_twice, bprop)
        self.gather = gather
        self.slice = ops.StridedSlice()
        self.sizes = Tensor([queries, heads.kv, heads.dim, int(is_narrow), index], ms.int32)
        self.numbers = Tensor([heads.norm_eps or 0.0, heads.scale], ms.float32)

    def halves(self, qkv: Any) -> Any:
        """Splits `qkv` [n, heads.width] into queries [n, queries D], and keys and values together [n, 2 kv D]."""
        count, width = qkv.shape
        queries = self.slice(qkv, (0, 0), (count, self.mixed), (1, 1))
        return queries, self.slice(qkv, (0, self.mixed), (count, width), (1, 1))

    def construct(
        self,
        qkv: Any,
        bias: Any,
        q_norm: Any,
        k_norm: Any,
        positions: Any,
        spans: Any,
        columns: Any,
        rotary: Any,
    ) -> Any:
        queries, own = self.halves(qkv)
        context = positions, spans, columns, rotary, self.sizes, self.numbers
        return self.run(queries, self.gather(own), bias, q_norm, k_norm, *context)


class GatheringAgain(ContextAttention):
    """Context-parallel attention that keeps only this rank's qkv, and gathers keys and values again in the backward."""

    def __init__(self, *own: Any, scatter: nn.Cell) -> None:
        super().__init__(*own)
        self.scatter, self.zeros = scatter, ops.ZerosLike()
        self.concat, self.reshape = ops.Concat(1), ops.Reshape()

    def bprop(
        self,
        qkv: Any,
        bias: Any,
        q_norm: Any,
        k_norm: Any,
        positions: Any,
        spans: Any,
        columns: Any,
        rotary: Any,
        out: Any,
        dout: Any,
    ) -> Any:
        # Waits for the gradient, so that in a recomputed layer the gathers of the recomputation come first.
        queries, own = self.halves(ops.depend(qkv, dout[0]))
        whole = self.gather(own)
        context = positions, spans, columns, rotary, self.sizes, self.numbers
        dq, dkv, dbias, dq_norm, dk_norm = self.back(
            queries, whole, bias, q_norm, k_norm, *context, out[0], out[1], dout[0]
        )
        dkv = self.scatter(self.reshape(dkv, (-1, *own.shape)))
        zeros = self.zeros(positions), self.zeros(spans), self.zeros(columns), self.zeros(rotary)
        return self.concat((dq, dkv)), dbias, dq_norm, dk_norm, *zeros
