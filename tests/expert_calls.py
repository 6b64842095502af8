"""Calls of the kernels of experts, as kernel_calls.py has those of the others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from kernel_calls import KernelCall, filled, floats, one, size

from mindgrpo.backend.dtypes import numpy_dtype
from mindgrpo.backend.kernels.native.library import has_bfloat16
from mindgrpo.backend.kernels.shapes import Routing
from mindgrpo.doctor.probes.numpy_kernels import NumpyKernels


def routed(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """routes [tokens, slots], some of them none, and of how many experts."""
    experts = size(rng, 9)
    tokens, slots = size(rng, 90), size(rng, min(4, experts))
    routes = np.argsort(rng.random((tokens, experts)), 1)[:, :slots].astype(np.int32)
    routes[rng.random(routes.shape) < 0.2] = -1
    return routes, experts


def routing_of(rng: np.random.Generator) -> np.ndarray:
    return np.array([rng.random() < 0.5, rng.random() < 0.5, 1.5, 1, 1], np.float32)


def router(rng: np.random.Generator) -> KernelCall:
    routes, experts = routed(rng)
    routing, width = routing_of(rng), size(rng, 60)
    x, w = floats(rng, len(routes), width), floats(rng, width, experts)
    logits = x.astype(np.float64) @ w
    p = np.exp(logits - logits.max(1, keepdims=True))
    p = 1 / (1 + np.exp(-logits)) if routing[0] else p / p.sum(1, keepdims=True)
    scores = np.where(routes < 0, 0, np.take_along_axis(p, np.maximum(routes, 0), 1))
    if routing[1]:
        scores /= np.where(scores.any(1), scores.sum(1), 1)[:, None]
    outputs = [filled(*routes.shape), filled(*p.shape)]
    return KernelCall("router", [x, w, routes, routing], outputs, [scores * 1.5, p])


def router_grad(rng: np.random.Generator) -> KernelCall:
    """Not compared here: test_experts.py does."""
    forward = router(rng)
    forward.run()
    x, w, routes, _ = forward.inputs
    inputs = [*forward.inputs, forward.outputs[1], floats(rng, *routes.shape)]
    return KernelCall("router_grad", inputs, [filled(*x.shape), filled(*w.shape)])


def choose_experts(rng: np.random.Generator) -> KernelCall:
    groups, in_group = size(rng, 4), size(rng, 4)
    taken, has_bias = size(rng, groups), rng.random() < 0.5
    tokens, width, slots = size(rng, 90), size(rng, 60), size(rng, min(4, taken * in_group))
    # Wider ones would be so large that sigmoids are 1.
    x, w = (
        floats(rng, tokens, width),
        floats(rng, width, groups * in_group) / np.float32(width**0.5),
    )
    is_sigmoid = bool(rng.random() < 0.5)
    bias = floats(rng, groups * in_group) if has_bias else np.zeros(1, np.float32)
    routing = Routing(
        groups * in_group, slots, is_sigmoid, groups=groups, groups_taken=taken, has_bias=has_bias
    )
    exact = [own.astype(np.float64) for own in (x, w, bias)]
    chosen = NumpyKernels().choose_experts(routing)(*exact)
    numbers = np.array([is_sigmoid, 1, 1, groups, taken], np.float32)
    outputs = [np.full((tokens, slots), 77, np.int32), filled(tokens)]
    return KernelCall("choose_experts", [x, w, bias, numbers], outputs, [*chosen])


def sort_slots(rng: np.random.Generator) -> KernelCall:
    routes, experts = routed(rng)
    order, counts, home = sorted_slots(routes, experts)
    outputs = [np.full_like(own, 77) for own in (order, counts, home)]
    return KernelCall("sort_slots", [routes], outputs, [order, counts, home])


def sorted_slots(routes: np.ndarray, experts: int) -> list[np.ndarray]:
    """order, counts and home, slot by slot."""
    flat = routes.reshape(-1)
    by_expert = [np.flatnonzero(flat == e) for e in range(experts)]
    order, home = np.full((2, flat.size), -1, np.int32)
    slots = np.concatenate(by_expert)
    order[: slots.size], home[slots] = slots, np.arange(slots.size)
    return [order, np.array([len(own) for own in by_expert], np.int32), home.reshape(routes.shape)]


def take_rows(rng: np.random.Generator) -> KernelCall:
    routes, experts = routed(rng)
    order, _, home = sorted_slots(routes, experts)
    x = floats(rng, len(routes), size(rng, 40))
    rows = np.where(order[:, None] < 0, 0, x[order // routes.shape[1]])
    return KernelCall("take_rows", [x, order, home], [filled(*rows.shape)], [rows])


def weighted_sum(rng: np.random.Generator) -> KernelCall:
    routes, experts = routed(rng)
    order, _, home = sorted_slots(routes, experts)
    y, scores = floats(rng, order.size, size(rng, 40)), floats(rng, *routes.shape)
    has_scores = rng.random() < 0.5
    rows = np.where(home[:, :, None] < 0, 0, y[home])
    exact = (rows * scores[:, :, None] if has_scores else rows).sum(1)
    inputs = [y, scores if has_scores else one(0), order, home]
    return KernelCall("weighted_sum", inputs, [filled(*exact.shape)], [exact])


def weighted_sum_grad(rng: np.random.Generator) -> KernelCall:
    y, _, order, home = weighted_sum(rng).inputs
    scores, dout = floats(rng, *home.shape), floats(rng, len(home), y.shape[1])
    taken = dout[order // home.shape[1]] * scores.reshape(-1)[order][:, None]
    dy = np.where(order[:, None] < 0, 0, taken)
    dscores = np.where(home < 0, 0, (y[home] * dout[:, None]).sum(2))
    outputs = [filled(*dy.shape), filled(*dscores.shape)]
    return KernelCall("weighted_sum_grad", [y, scores, order, home, dout], outputs, [dy, dscores])


def expert_mlp(rng: np.random.Generator) -> KernelCall:
    routes, experts = routed(rng)
    order, counts, _ = sorted_slots(routes, experts)
    hidden, inner = size(rng, 70), size(rng, 150)
    x = floats(rng, order.size, hidden) / np.float32(hidden)
    weights = [floats(rng, experts, hidden, 2 * inner), floats(rng, experts, inner, hidden)]
    parts = 3 * int(has_bfloat16() and rng.random() < 0.5)
    if parts:
        weights = [
            own.astype(numpy_dtype("bfloat16")) if rng.random() < 0.5 else own for own in weights
        ]
    both, y = np.zeros((order.size, 2 * inner)), np.zeros(x.shape)
    for count, end, gate_up, down in zip(counts, np.cumsum(counts), *weights, strict=True):
        own = slice(end - count, end)
        both[own] = x[own].astype(np.float64) @ gate_up.astype(np.float32)
        gate, up = np.split(both[own], 2, 1)
        y[own] = (gate / (1 + np.exp(-gate)) * up) @ down.astype(np.float32)
    inputs = [x, counts, *weights, one(parts, np.int32)]
    return KernelCall("expert_mlp", inputs, [filled(*y.shape), filled(*both.shape)], [y, both])


def expert_mlp_grad(rng: np.random.Generator) -> KernelCall:
    """Not compared here: test_experts.py does."""
    forward = expert_mlp(rng)
    forward.run()
    x, _, *weights, _ = forward.inputs
    outputs = [filled(*own.shape) for own in (x, *weights)]
    inputs = [*forward.inputs, forward.outputs[1], floats(rng, *x.shape)]
    return KernelCall("expert_mlp_grad", inputs, outputs)


def expert_product(rng: np.random.Generator) -> KernelCall:
    x, counts, matrices, _, parts = expert_mlp(rng).inputs
    y = np.zeros((len(x), matrices.shape[2]))
    for count, end, own in zip(counts, np.cumsum(counts), matrices, strict=True):
        rows = slice(end - count, end)
        y[rows] = x[rows].astype(np.float64) @ own.astype(np.float32)
    return KernelCall("expert_product", [x, matrices, counts, parts], [filled(*y.shape)], [y])


def expert_product_back(rng: np.random.Generator) -> KernelCall:
    """Not compared here, as the one below: test_experts.py does."""
    forward = expert_product(rng)
    x, *others = forward.inputs
    dy = floats(rng, *forward.outputs[0].shape)
    return KernelCall("expert_product_back", [dy, *others], [filled(*x.shape)])


def expert_product_gradient(rng: np.random.Generator) -> KernelCall:
    forward = expert_product(rng)
    x, matrices, *others = forward.inputs
    dy = floats(rng, *forward.outputs[0].shape)
    return KernelCall("expert_product_gradient", [x, dy, *others], [filled(*matrices.shape)])


EXPERT_CALLS: dict[str, Callable[[np.random.Generator], KernelCall]] = {
    make.__name__: make
    for make in (
        router,
        router_grad,
        choose_experts,
        sort_slots,
        take_rows,
        weighted_sum,
        weighted_sum_grad,
        expert_mlp,
        expert_mlp_grad,
        expert_product,
        expert_product_back,
        expert_product_gradient,
    )
}
