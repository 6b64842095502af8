"""Calls of the C kernels with random shapes and values, and what numpy makes of the same inputs in float64.

For tests/test_kernel_calls.py and test_rollout_calls.py, which also run under AddressSanitizer (scripts/sanitize.sh):
every array has exactly the elements that the kernel is told of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from mindgrpo.backend.dtypes import numpy_dtype, packed_bytes
from mindgrpo.backend.kernels.native.library import call_kernel, has_bfloat16

EPS = 1e-6


@dataclass
class KernelCall:
    """Inputs, outputs that hold 77 until the kernel runs, and the outputs that are right (None: not compared)."""

    symbol: str
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]
    expected: list[np.ndarray | None] = field(default_factory=list)

    @property
    def arrays(self) -> list[np.ndarray]:
        return [*self.inputs, *self.outputs]

    def run(self) -> None:
        call_kernel(self.symbol, *self.arrays)
        for output, wanted in zip(self.outputs, self.expected, strict=False):
            if wanted is not None:
                np.testing.assert_allclose(output, wanted, rtol=2e-4, atol=2e-4)


def filled(*shape: int) -> np.ndarray:
    """What a graph's memory holds before is anything at all."""
    return np.full(shape, 77, np.float32)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def one(value: float, dtype: type = np.float32) -> np.ndarray:
    return np.array([value], dtype)


def size(rng: np.random.Generator, most: int) -> int:
    return int(rng.integers(1, most + 1))


def rms_norm(rng: np.random.Generator) -> KernelCall:
    x, weight = floats(rng, size(rng, 50), width := size(rng, 400)), floats(rng, width)
    wide = x.astype(np.float64)
    y = wide / np.sqrt((wide**2).mean(1, keepdims=True) + EPS) * weight
    return KernelCall("rms_norm", [x, weight, one(EPS)], [filled(*x.shape)], [y])


def add_rms_norm(rng: np.random.Generator) -> KernelCall:
    x, added = floats(rng, 2, size(rng, 50), size(rng, 400))
    weight = floats(rng, x.shape[1])
    total = x.astype(np.float64) + added
    y = total / np.sqrt((total**2).mean(1, keepdims=True) + EPS) * weight
    outputs = [filled(*x.shape), filled(*x.shape)]
    return KernelCall("add_rms_norm", [x, added, weight, one(EPS)], outputs, [total, y])


def rms_norm_grad(rng: np.random.Generator) -> KernelCall:
    x, dy = floats(rng, 2, size(rng, 50), size(rng, 400))
    weight = floats(rng, x.shape[1])
    through = floats(rng, *x.shape) if rng.random() < 0.5 else one(0)
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt((wide**2).mean(1, keepdims=True) + EPS)
    dx = scale * weight * dy - wide * scale**3 * (wide * weight * dy).mean(1, keepdims=True)
    dx += through if through.size > 1 or x.size == 1 else 0
    outputs = [filled(*x.shape), filled(x.shape[1])]
    return KernelCall(
        "rms_norm_grad",
        [x, weight, one(EPS), dy, through],
        outputs,
        [dx, (dy * wide * scale).sum(0)],
    )


def gated(rng: np.random.Generator) -> KernelCall:
    both = floats(rng, size(rng, 50), 2 * size(rng, 300))
    gate, up = np.split(both.astype(np.float64), 2, 1)
    return KernelCall("gated", [both], [filled(*gate.shape)], [gate / (1 + np.exp(-gate)) * up])


def gated_grad(rng: np.random.Generator) -> KernelCall:
    both = floats(rng, size(rng, 50), 2 * size(rng, 300))
    gate, up = np.split(both.astype(np.float64), 2, 1)
    dy, s = floats(rng, *gate.shape), 1 / (1 + np.exp(-gate))
    dboth = np.concatenate([dy * up * (s + gate * s * (1 - s)), dy * gate * s], 1)
    return KernelCall("gated_grad", [both, dy], [filled(*both.shape)], [dboth])


def embed(rng: np.random.Generator) -> KernelCall:
    table, first = floats(rng, size(rng, 30), size(rng, 40)), size(rng, 9)
    tokens = rng.integers(-5, 50, size(rng, 30)).astype(np.int32)
    at = tokens - first
    is_here = (at >= 0) & (at < len(table))
    rows = np.where(is_here[:, None], table[np.clip(at, 0, len(table) - 1)], 0)
    inputs = [tokens, table, one(first, np.int32)]
    return KernelCall("embed", inputs, [filled(*rows.shape)], [rows])


def embed_grad(rng: np.random.Generator) -> KernelCall:
    forward = embed(rng)
    tokens, table, first = forward.inputs
    dy, dtable = floats(rng, len(tokens), table.shape[1]), np.zeros(table.shape)
    for token, row in zip(tokens - first, dy, strict=True):
        if 0 <= token < len(table):
            dtable[token] += row
    return KernelCall("embed_grad", [tokens, dy, table, first], [filled(*table.shape)], [dtable])


def log_prob_stats(rng: np.random.Generator) -> KernelCall:
    logits = floats(rng, size(rng, 40), size(rng, 300))
    labels = rng.integers(-5, 310, len(logits)).astype(np.int32)
    real = int(rng.integers(0, logits.shape[1] + 1))
    return log_prob_stats_of(logits, labels, size(rng, 9), real)


def log_prob_stats_of(logits: np.ndarray, labels: np.ndarray, first: int, real: int) -> KernelCall:
    scale = 0.7
    stats = np.zeros((len(logits), 4))
    stats[:, 0] = -1e30
    if real:
        scaled = logits[:, :real].astype(np.float64) * scale
        top = scaled.max(1)
        mass = np.exp(scaled - top[:, None])
        is_here = (labels >= first) & (labels < first + real)
        label = scaled[np.arange(len(logits)), np.clip(labels - first, 0, real - 1)]
        stats = np.stack([top, mass.sum(1), (mass * scaled).sum(1), np.where(is_here, label, 0)], 1)
    sizes = np.array([first, real], np.int32)
    inputs = [logits, labels, sizes, one(scale)]
    return KernelCall("log_prob_stats", inputs, [filled(len(logits), 4)], [stats])


def log_probs_of_stats(rng: np.random.Generator) -> KernelCall:
    """Of a whole row, by the stats of its leaves."""
    leaves = 2 ** int(rng.integers(0, 4))
    logits = floats(rng, size(rng, 40), leaves * size(rng, 30))
    labels = rng.integers(0, logits.shape[1], len(logits)).astype(np.int32)
    stats = np.zeros((len(logits), 4 * leaves), np.float32)
    sizes = np.array([0, logits.shape[1]], np.int32)
    call_kernel("log_prob_stats", logits, labels, sizes, one(0.7), stats)
    log_p = 0.7 * logits.astype(np.float64)
    total = np.log(np.exp(log_p).sum(1))
    log_p -= total[:, None]
    expected = [log_p[np.arange(len(labels)), labels], -(np.exp(log_p) * log_p).sum(1), total]
    return KernelCall(
        "log_probs_of_stats", [stats], [filled(len(logits)) for _ in expected], expected
    )


def log_prob_grad(rng: np.random.Generator) -> KernelCall:
    logits, labels, sizes, scale = log_prob_stats(rng).inputs
    first, real = sizes
    total, entropy, dlogp, dentropy = floats(rng, 4, len(logits))
    total, dentropy = (
        np.abs(total) + 3,
        dentropy * (rng.random(len(logits)) < 0.5).astype(np.float32),
    )
    log_p = logits[:, :real].astype(np.float64) * scale - total[:, None]
    onehot = labels[:, None] == first + np.arange(real)
    gradient = np.zeros(logits.shape)
    gradient[:, :real] = dlogp[:, None] * (onehot - np.exp(log_p))
    gradient[:, :real] -= dentropy[:, None] * np.exp(log_p) * (log_p + entropy[:, None])
    inputs = [logits, labels, sizes, scale, total, entropy, dlogp, dentropy]
    return KernelCall("log_prob_grad", inputs, [filled(*logits.shape)], [gradient * scale])


def adamw(rng: np.random.Generator) -> KernelCall:
    weight, gradient, first = floats(rng, 3, size(rng, 40000))
    second = first**2
    lr, beta1, beta2, keep, scale = 0.1, 0.9, 0.99, 0.999, 0.5
    numbers = np.array([lr, beta1, beta2, EPS, keep, 1 - beta1, 1 - beta2, scale])
    g = gradient.astype(np.float64) * scale
    m, v = beta1 * first + (1 - beta1) * g, beta2 * second + (1 - beta2) * g * g
    new = weight * keep - lr / (1 - beta1) * m / (np.sqrt(v / (1 - beta2)) + EPS)
    return KernelCall(
        "adamw", [], [weight, gradient, first, second, numbers], [new, 0 * g, m, v, numbers]
    )


def square_sums(rng: np.random.Generator) -> KernelCall:
    x, block = floats(rng, size(rng, 200000)), 1 << 15
    blocks = np.split(x.astype(np.float64), range(block, len(x), block))
    sums = np.zeros(len(x) // block + 1)
    expected = np.zeros_like(sums)
    expected[: len(blocks)] = [np.square(one).sum() for one in blocks]
    return KernelCall("square_sums", [x], [sums], [expected])


def spans_of(rng: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """positions [rows, length] and spans [rows, length, 3]: groups that share a prompt, then tokens of their own; and
    runs without a causal mask."""
    positions = np.zeros((rows, length), np.int32)
    spans = np.zeros((rows, length, 3), np.int32)
    spans[:, :, 2] = np.arange(length)
    for row in range(rows):
        at = 0
        while (prompt := size(rng, 40)) + at <= length and rng.random() < 0.9:
            start, lengths = at, [prompt, *rng.integers(0, 30, 3).tolist()]
            for index, count in enumerate(lengths):
                run = slice(at, min(length, at + count))
                prefix = (start, prompt) if index else (0, 0)
                spans[row, run] = (*prefix, at)
                positions[row, run] = prefix[1] + np.arange(run.stop - run.start)
                at = run.stop
            if rng.random() < 0.3 and at < length:
                run = slice(at, min(length, at + size(rng, 40)))
                spans[row, run] = (at, run.stop - at, at)
                positions[row, run] = rng.integers(0, 40, run.stop - at)
                at = run.stop
    return positions, spans


def attention_inputs(rng: np.random.Generator) -> list[np.ndarray]:
    kv, share, dim = size(rng, 3), size(rng, 3), 2 * size(rng, 40)
    rows, length, width = size(rng, 3), size(rng, 130), (kv * share + 2 * kv) * dim
    positions, spans = spans_of(rng, rows, length)
    angles = np.tile(floats(rng, int(positions.max()) + 1, dim // 2), 2)
    rotary = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    bias = floats(rng, width) if rng.random() < 0.5 else one(0)
    norms = [floats(rng, dim), floats(rng, dim)] if rng.random() < 0.5 else [one(0), one(0)]
    sizes, numbers = (
        np.array([kv * share, kv, dim, 0], np.int32),
        np.array([EPS, dim**-0.5], np.float32),
    )
    qkv = floats(rng, rows * length, width)
    return [qkv, bias, *norms, positions, spans, rotary, sizes, numbers]


def _rotated(heads: np.ndarray, norm: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """heads [N, heads, D], angles [N, 1, 2 D]"""
    dim = heads.shape[2]
    if norm.size == dim:
        heads = heads / np.sqrt((heads**2).mean(2, keepdims=True) + EPS) * norm
    low, high = np.split(heads, 2, 2)
    return heads * angles[:, :, :dim] + np.concatenate([-high, low], 2) * angles[:, :, dim:]


def mixed_by_numpy(inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(mixed [N, queries D], log-sum-exp [N, queries]), with a mask over each whole row."""
    qkv, bias, q_norm, k_norm, positions, spans, rotary, (queries, kv, dim, _), numbers = inputs
    rows, length = positions.shape
    heads = (qkv.astype(np.float64) + bias).reshape(rows * length, -1, dim)
    angles = rotary[positions.reshape(-1)][:, None]
    q = _rotated(heads[:, :queries], q_norm, angles).reshape(rows, length, queries, dim)
    k = _rotated(heads[:, queries:-kv], k_norm, angles).reshape(rows, length, kv, dim)
    v = heads[:, -kv:].reshape(rows, length, kv, dim)
    column, row = np.arange(length), np.arange(length)[:, None]
    prefix, count, start = (spans[:, :, i, None] for i in range(3))
    is_seen = ((column >= prefix) & (column < prefix + count)) | (
        (column >= start) & (column <= row)
    )
    k, v = (np.repeat(x, queries // kv, 2) for x in (k, v))
    scores = np.einsum("rtqd,rsqd->rqts", q, k) * numbers[1]
    scores = np.where(is_seen[:, None], scores, -np.inf)
    lse = np.log(np.exp(scores).sum(3))
    mixed = np.einsum("rqts,rsqd->rtqd", np.exp(scores - lse[..., None]), v)
    return mixed.reshape(rows * length, -1), lse.transpose(0, 2, 1).reshape(rows * length, -1)


def attention(rng: np.random.Generator) -> KernelCall:
    inputs = attention_inputs(rng)
    mixed, lse = mixed_by_numpy(inputs)
    return KernelCall("attention", inputs, [filled(*mixed.shape), filled(*lse.shape)], [mixed, lse])


def attention_grad(rng: np.random.Generator) -> KernelCall:
    """Not compared here: test_kernels.py does."""
    inputs = attention_inputs(rng)
    mixed, lse = (x.astype(np.float32) for x in mixed_by_numpy(inputs))
    dmixed = floats(rng, *mixed.shape)
    outputs = [filled(*x.shape) for x in inputs[:4]]
    return KernelCall("attention_grad", [*inputs, mixed, lse, dmixed], outputs)


def factors(
    rng: np.random.Generator, may_be_narrow: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [n, k], w [k, m], and their summation: of how many bfloat16 numbers they are sums (of three, as float32's), and
    in how many leaves k is summed.

    Where it may be narrow, w is bfloat16 in half of the calls.
    """
    leaves = 2 ** int(rng.integers(0, 4))
    n, k, m = size(rng, 80), leaves * size(rng, 9), size(rng, 300)
    x, w = floats(rng, n, k), floats(rng, k, m)
    if may_be_narrow and rng.random() < 0.5:
        w = w.astype(numpy_dtype("bfloat16"))
    return x, w, np.array([3, leaves], np.int32)


def product(rng: np.random.Generator) -> KernelCall:
    x, w, summation = factors(rng)
    exact = x.astype(np.float64) @ w.astype(np.float32)
    if w.dtype == np.float32 and rng.random() < 0.5:
        summation[0] = 0  # in float32
    return KernelCall("product", [x, w, summation], [filled(*exact.shape)], [exact])


def product_turned(rng: np.random.Generator) -> KernelCall:
    x, w, summation = factors(rng)
    exact = x.astype(np.float64) @ w.astype(np.float32)
    turned = np.ascontiguousarray(w.T)
    return KernelCall("product_turned", [x, turned, summation], [filled(*exact.shape)], [exact])


def product_gradient(rng: np.random.Generator) -> KernelCall:
    x, w, summation = factors(rng, may_be_narrow=False)
    exact = x.astype(np.float64) @ w
    turned = np.ascontiguousarray(x.T)
    return KernelCall("product_gradient", [turned, w, summation], [filled(*exact.shape)], [exact])


def product_pack(rng: np.random.Generator) -> KernelCall:
    """What is packed is compared by the generator's tests."""
    _, w, summation = factors(rng)
    room = np.zeros(packed_bytes(*w.shape, *summation.tolist()), np.uint8)
    return KernelCall("product_pack", [w, summation], [room])


def linear_log_prob_stats(rng: np.random.Generator) -> KernelCall:
    """log_prob_stats of a product; the second factor, turned, is the table."""
    x, w, (num_parts, _) = factors(rng)
    logits = (x.astype(np.float64) @ w.astype(np.float32)).astype(np.float32)
    labels = rng.integers(-5, 310, len(x)).astype(np.int32)
    made = log_prob_stats_of(logits, labels, size(rng, 9), int(rng.integers(0, w.shape[1] + 1)))
    inputs = [x, np.ascontiguousarray(w.T), *made.inputs[1:], one(num_parts, np.int32)]
    return KernelCall("linear_log_prob_stats", inputs, made.outputs, made.expected)


def linear_log_prob_grad(rng: np.random.Generator) -> KernelCall:
    """Not compared here: test_linear_log_probs.py does."""
    inputs = linear_log_prob_stats(rng).inputs
    x, table = inputs[:2]
    outputs = [filled(*x.shape), filled(*table.shape)]
    numbers = floats(rng, 4, len(x))
    return KernelCall("linear_log_prob_grad", [*inputs, *numbers], outputs)


# Kernels that call oneDNN, which not every processor lets do so.
PRODUCTS = (
    product,
    product_turned,
    product_gradient,
    product_pack,
    linear_log_prob_stats,
    linear_log_prob_grad,
)
CALLS: dict[str, Callable[[np.random.Generator], KernelCall]] = {
    make.__name__: make
    for make in (
        rms_norm,
        add_rms_norm,
        rms_norm_grad,
        gated,
        gated_grad,
        embed,
        embed_grad,
        log_prob_stats,
        log_prob_grad,
        adamw,
        square_sums,
        attention,
        attention_grad,
        log_probs_of_stats,
        *(PRODUCTS if has_bfloat16() else ()),
    )
}


def wrong_calls(arrays: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """One tensor too few and too many, and each tensor with another dtype and with a dim more."""
    yield arrays[:-1]
    yield [*arrays, one(0)]
    for index, array in enumerate(arrays):
        # Some tensors may be either of the two kinds of floats.
        other = np.int32 if array.dtype.name in ("float32", "bfloat16") else np.float32
        for wrong in (array.astype(other), array[None]):
            yield [*arrays[:index], wrong, *arrays[index + 1 :]]


def assert_refused(symbol: str, arrays: list[np.ndarray], match: str = "") -> None:
    with pytest.raises(RuntimeError, match=f"^kernel {symbol}: .*{match}"):
        call_kernel(symbol, *arrays)
