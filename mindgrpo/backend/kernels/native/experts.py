"""Mixture-of-experts cells that call the C code of experts.c, with custom backwards; shapes in contract.Kernels."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.native.library import as_first, as_first_two, operation
from mindgrpo.backend.kernels.shapes import Routing


def _float32(*types: Any) -> Any:
    return ms.float32


def _float32_twice(*types: Any) -> Any:
    return ms.float32, ms.float32


def _float32_thrice(*types: Any) -> Any:
    return ms.float32, ms.float32, ms.float32


def _int32_and_float32(*types: Any) -> Any:
    return ms.int32, ms.float32


def _int32_thrice(*types: Any) -> Any:
    return ms.int32, ms.int32, ms.int32


def _numbers(routing: Routing) -> Tensor:
    groups = routing.groups, routing.groups_taken
    return Tensor([routing.is_sigmoid, routing.renormalise, routing.scaling, *groups], ms.float32)


class Router(nn.Cell):
    def __init__(self, routing: Routing) -> None:
        super().__init__()

        def shapes(x: Any, weight: Any, topk_ids: Any, *others: Any) -> Any:
            return topk_ids, [x[0], weight[1]]

        back = operation("router_grad", as_first_two, _float32_twice)

        def bprop(x: Any, weight: Any, topk_ids: Any, numbers: Any, out: Any, dout: Any) -> Any:
            dx, dweight = back(x, weight, topk_ids, numbers, out[1], dout[0])
            return dx, dweight, ops.zeros_like(topk_ids), ops.zeros_like(numbers)

        self.run = operation("router", shapes, _float32_twice, bprop)
        self.numbers = _numbers(routing)

    def construct(self, x: Any, weight: Any, topk_ids: Any) -> Any:
        scores, _ = self.run(x, weight, topk_ids, self.numbers)
        return scores


class ChooseExperts(nn.Cell):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        per_token = routing.per_token

        def shapes(x: Any, *others: Any) -> Any:
            return [x[0], per_token], [x[0]]

        def bprop(x: Any, weight: Any, bias: Any, numbers: Any, out: Any, dout: Any) -> Any:
            of_choice = ops.zeros_like(bias), ops.zeros_like(numbers)
            return ops.zeros_like(x), ops.zeros_like(weight), *of_choice

        self.run = operation("choose_experts", shapes, _int32_and_float32, bprop)
        self.numbers = _numbers(routing)

    def construct(self, x: Any, weight: Any, bias: Any) -> Any:
        return self.run(x, weight, bias, self.numbers)


class SortSlots(nn.Cell):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        experts = routing.num_experts

        def shapes(topk_ids: Any) -> Any:
            return [topk_ids[0] * topk_ids[1]], [experts], topk_ids

        def bprop(topk_ids: Any, out: Any, dout: Any) -> Any:
            return (ops.zeros_like(topk_ids),)

        self.run = operation("sort_slots", shapes, _int32_thrice, bprop)

    def construct(self, topk_ids: Any) -> Any:
        return self.run(topk_ids)


def _rows_of_tokens(x: Any, order: Any, *others: Any) -> Any:
    return [order[0], x[1]]


def _sums_of_rows(y: Any, scores: Any, order: Any, home: Any) -> Any:
    return [home[0], y[1]]


class TakeRows(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        back = operation("weighted_sum", _sums_of_rows, as_first)
        nothing = Tensor([0.0], ms.float32)

        def bprop(x: Any, order: Any, home: Any, out: Any, dout: Any) -> Any:
            return back(dout, nothing, order, home), ops.zeros_like(order), ops.zeros_like(home)

        self.run = operation("take_rows", _rows_of_tokens, as_first, bprop)

    def construct(self, x: Any, order: Any, home: Any) -> Any:
        return self.run(x, order, home)


class WeightedSum(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        back = operation("weighted_sum_grad", as_first_two, as_first_two)

        def bprop(y: Any, scores: Any, order: Any, home: Any, out: Any, dout: Any) -> Any:
            dy, dscores = back(y, scores, order, home, dout)
            return dy, dscores, ops.zeros_like(order), ops.zeros_like(home)

        self.run = operation("weighted_sum", _sums_of_rows, as_first, bprop)

    def construct(self, y: Any, scores: Any, order: Any, home: Any) -> Any:
        return self.run(y, scores, order, home)


class ExpertMlp(nn.Cell):
    """Expert MLPs with SwiGLU, as Kernels.expert_mlp. `num_parts` as in bf16_gemm.h, None for float32 GEMMs."""

    def __init__(self, num_parts: int | None) -> None:
        super().__init__()

        def shapes(x: Any, counts: Any, gate_up: Any, *others: Any) -> Any:
            return x, [x[0], gate_up[2]]

        def gradient_shapes(x: Any, counts: Any, gate_up: Any, down: Any, *others: Any) -> Any:
            return x, gate_up, down

        back = operation("expert_mlp_grad", gradient_shapes, _float32_thrice)

        def bprop(
            x: Any, counts: Any, gate_up: Any, down: Any, num_parts: Any, out: Any, dout: Any
        ) -> Any:
            dx, dgate_up, ddown = back(x, counts, gate_up, down, num_parts, out[1], dout[0])
            return dx, ops.zeros_like(counts), dgate_up, ddown, ops.zeros_like(num_parts)

        self.run = operation("expert_mlp", shapes, _float32_twice, bprop)
        self.num_parts = Tensor([num_parts or 0], ms.int32)

    def construct(self, x: Any, counts: Any, gate_up: Any, down: Any) -> Any:
        y, _ = self.run(x, counts, gate_up, down, self.num_parts)
        return y


class ExpertMatMul(nn.Cell):
    """The grouped GEMM of Kernels.expert_matmul; `num_parts` as in ExpertMlp."""

    def __init__(self, num_parts: int | None) -> None:
        super().__init__()

        def shape(x: Any, weight: Any, *others: Any) -> Any:
            return [x[0], weight[2]]

        def shape_of_x(dy: Any, weight: Any, *others: Any) -> Any:
            return [dy[0], weight[1]]

        def shape_of_weight(x: Any, dy: Any, counts: Any, *others: Any) -> Any:
            return [counts[0], x[1], dy[1]]

        # Separate operations, so that graphs can drop the gradient that is not used.
        back = operation("expert_product_back", shape_of_x, _float32)
        gradient = operation("expert_product_gradient", shape_of_weight, _float32)

        def bprop(x: Any, weight: Any, counts: Any, num_parts: Any, out: Any, dout: Any) -> Any:
            dx = back(dout, weight, counts, num_parts)
            dweight = gradient(x, dout, counts, num_parts)
            return dx, dweight, ops.zeros_like(counts), ops.zeros_like(num_parts)

        self.run = operation("expert_product", shape, _float32, bprop)
        self.num_parts = Tensor([num_parts or 0], ms.int32)

    def construct(self, x: Any, weight: Any, counts: Any) -> Any:
        return self.run(x, weight, counts, self.num_parts)
