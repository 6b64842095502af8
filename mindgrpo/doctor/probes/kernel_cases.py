"""Lists what kernels are compared on: exact computations, then each of the contract's fused ones, with inputs.

Integer arithmetic and rotary positions of rows as long as training's have to equal NumPy in every bit. Sampling draws
by int32 products that wrap and by right shifts, and weights are compared by them. Rotary positions get numbers whose
results are exact in every dtype, whatever the order of operations. The sizes are a run's, not a test's. The fused
computations are small. kernels.py compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_ops import right_shift
from mindgrpo.backend.kernels.shapes import NEVER, Heads

COUNT, LONG_ROWS = 1 << 16, 8192
HEADS = Heads(4, 2, 64)
# Those of rollout/noise.py and weights/checksum.py, or like them.
FACTORS, SHIFTS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x9E3779B9), (11, 14, 15, 16, 17)
ROWS, LENGTH, WIDTH = 2, 48, 64
# As of Qwen2 with biases, as of Qwen3 with norms inside heads.
BIASED, NORMED = Heads(4, 2, 64, has_bias=True), Heads(4, 2, 64, norm_eps=1e-6)
SLOTS = 3


@dataclass(frozen=True)
class ExactCase:
    """Is compared bit for bit.

    `make` gives what computes the `expected` tuple from `inputs`, whose floats are in the compared dtype.
    """

    name: str
    make: Callable[[Kernels], nn.Cell]
    inputs: Sequence[np.ndarray]
    expected: Sequence[np.ndarray]


class _Products(nn.Cell):
    """Computes (x, y int32 [n]) -> x y, then x times each of FACTORS."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = tuple(int(np.uint32(factor).astype(np.int32)) for factor in FACTORS)

    def construct(self, x: Any, y: Any) -> Any:
        products: Any = (x * y,)
        for factor in self.factors:
            products += (x * factor,)
        return products


class _Shifts(nn.Cell):
    """Shifts int32 [n] right by each of SHIFTS, with zeros from above."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = SHIFTS

    def construct(self, x: Any) -> Any:
        shifted: Any = ()
        for shift in self.shifts:
            shifted += (right_shift(x, shift),)
        return shifted


class _Rope(nn.Cell):
    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.attention = kernels.attention(HEADS, np.zeros((1, 2 * HEADS.dim), np.float32))

    def construct(self, heads: Any, angles: Any) -> Any:
        return self.attention.apply_rope(heads, angles)


class _RopeAndGradient(nn.Cell):
    """Computes (heads [N, heads, D], angles [N, 1, 2 D], gradient as heads) -> rotated heads, their gradient."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.rope = _Rope(kernels)
        self.gradient = ops.GradOperation(sens_param=True)

    def construct(self, heads: Any, angles: Any, dy: Any) -> Any:
        return self.rope(heads, angles), self.gradient(self.rope)(heads, angles, dy)


def exact_cases() -> list[ExactCase]:
    rng = np.random.default_rng(0)
    x, y = rng.integers(-(2**31), 2**31, (2, COUNT)).astype(np.int32)
    unsigned = x.view(np.uint32)
    products = [unsigned * y.view(np.uint32), *(unsigned * np.uint32(f) for f in FACTORS)]
    shifted = [unsigned >> np.uint32(shift) for shift in SHIFTS]
    return [
        ExactCase("int32 products", lambda _: _Products(), [x, y], products),
        ExactCase("right shifts", lambda _: _Shifts(), [x], shifted),
        _rotary_case(rng),
    ]


def _rotary_case(rng: np.random.Generator) -> ExactCase:
    half = HEADS.dim // 2
    shape = (LONG_ROWS, HEADS.queries + HEADS.kv, HEADS.dim)

    def signs(*shape: int) -> np.ndarray:
        return rng.choice(np.array([-1.0, 1.0], np.float32), shape)

    heads, dy = (signs(*shape) * rng.integers(1, 4, shape).astype(np.float32) for _ in range(2))
    # Of every row other ones, so that one that gets another row's is seen; no product is zero, which has a sign.
    cos, sin = (np.tile(signs(LONG_ROWS, 1, half), 2) for _ in range(2))
    sin *= 2.0
    turned = np.concatenate([-heads[..., half:], heads[..., :half]], -1)
    back = dy * sin
    gradient = dy * cos + np.concatenate([back[..., half:], -back[..., :half]], -1)
    expected = [heads * cos + turned * sin, gradient]
    inputs = [heads, np.concatenate([cos, sin], -1), dy]
    return ExactCase(f"rotary positions of {LONG_ROWS} rows", _RopeAndGradient, inputs, expected)


@dataclass(frozen=True)
class Case:
    """Is compared with its plain double. `make` gives the computation of (activations, other inputs...) from `inputs`.

    The first `num_wide` inputs are in the compared dtype; `outputs` are the shapes that it gives. Without
    `has_gradient` it is compared forward only: the generator has no other. `method` of the contract computes it.
    """

    name: str
    method: str
    make: Callable[[Kernels], nn.Cell]
    inputs: Sequence[np.ndarray]
    num_wide: int
    outputs: Sequence[tuple[int, ...]]
    has_gradient: bool = True
    is_attention: bool = False

    def is_plain_of(self, kernels: Kernels) -> bool:
        """Says whether `kernels` has no computation of its own for it."""
        return getattr(type(kernels), self.method) is getattr(Kernels, self.method)


class AttentionOfRows(nn.Cell):
    """Computes attention over packed rows, rope and mask made from positions and spans.

    With `is_causal` each row is one run.
    """

    def __init__(
        self, kernels: Kernels, heads: Heads, rotary: np.ndarray, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.rope_and_mask = kernels.rope_and_mask(rotary, is_causal)
        self.attention = kernels.attention(heads, rotary, is_causal)

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, spans: Any
    ) -> Any:
        one, other = self.rope_and_mask(positions, spans)
        return self.attention(qkv, bias, q_norm, k_norm, one, other)


class AttentionToCache(nn.Cell):
    """Computes attention of a token of each slot, its angles made from rows of the rotary table."""

    def __init__(self, kernels: Kernels, heads: Heads, keys: Any, values: Any, read: int) -> None:
        super().__init__()
        self.angles = kernels.cached_angles(heads)
        self.attention = kernels.cached_attention(heads, keys, values, read)

    def construct(self, qkv: Any, *others: Any) -> Any:
        bias, q_norm, k_norm, mask, angles, rows = others
        return self.attention(qkv, bias, q_norm, k_norm, mask, self.angles(angles), rows)


def _floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def _rotary(heads: Heads) -> np.ndarray:
    """Returns float32 [LENGTH, 2 D]: cos, then sin."""
    angles = np.outer(np.arange(LENGTH), 10000.0 ** (-np.arange(heads.dim // 2) * 2 / heads.dim))
    angles = np.concatenate([angles, angles], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def _weights(heads: Heads) -> list[np.ndarray]:
    """Returns bias, q_norm, k_norm; anything of one number where `heads` has none."""
    nothing = np.zeros(1, np.float32)
    bias = _floats(heads.width) if heads.has_bias else nothing
    norms = [_floats(heads.dim, seed=i) if heads.norm_eps else nothing for i in (1, 2)]
    return [bias, *norms]


def _packed_rows() -> tuple[np.ndarray, np.ndarray]:
    """Returns positions and spans: a prompt of 7 that runs of 9, 5 and 1 share, a run alone, and padding."""
    positions = np.zeros((ROWS, LENGTH), np.int32)
    spans = np.zeros((ROWS, LENGTH, 3), np.int32)
    spans[:, :, 2] = np.arange(LENGTH)
    for row, (prompt, runs) in enumerate([(7, (9, 5, 1)), (3, (30,))]):
        spans[row, :prompt] = (0, 0, 0)
        positions[row, :prompt] = np.arange(prompt)
        at = prompt
        for count in runs:
            spans[row, at : at + count] = (0, prompt, at)
            positions[row, at : at + count] = prompt + np.arange(count)
            at += count
    return positions, spans


def _attention(
    name: str,
    method: str,
    make: Callable[[Kernels], nn.Cell],
    heads: Heads,
    num_tokens: int,
    others: Sequence[np.ndarray],
) -> Case:
    """Makes a case of attention of `num_tokens` tokens; only packed rows have a gradient."""
    inputs = [_floats(num_tokens, heads.width), *_weights(heads), *others]
    shape, has_gradient = (num_tokens, heads.queries * heads.dim), method == "attention"
    return Case(name, method, make, inputs, 1, [shape], has_gradient, is_attention=True)


def _packed(name: str, heads: Heads) -> Case:
    rotary = _rotary(heads)

    def make(kernels: Kernels) -> nn.Cell:
        return AttentionOfRows(kernels, heads, rotary)

    return _attention(name, "attention", make, heads, ROWS * LENGTH, _packed_rows())


def _causal(name: str, heads: Heads) -> Case:
    """Makes a case of rows that are one run each."""
    rotary = _rotary(heads)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))

    def make(kernels: Kernels) -> nn.Cell:
        return AttentionOfRows(kernels, heads, rotary, is_causal=True)

    whole = positions, np.zeros((ROWS, LENGTH, 3), np.int32)
    return _attention(name, "attention", make, heads, ROWS * LENGTH, whole)


def _caches(heads: Heads) -> tuple[Parameter, Parameter]:
    rows = SLOTS * heads.kv * LENGTH
    keys, values = (_floats(rows, heads.dim, seed=i) for i in (3, 4))
    return Parameter(Tensor(keys), "keys"), Parameter(Tensor(values), "values")


def _prefill(heads: Heads) -> Case:
    """Makes a case of two prompts of 6, which go to three slots."""
    prompt, starts = 6, np.arange(SLOTS * heads.kv) * LENGTH
    causal = np.where(np.tril(np.ones((prompt, prompt))), 0.0, NEVER).astype(np.float32)
    angles = np.tile(_rotary(heads)[:prompt, None], (2, 1, 1))
    rows = (starts[:, None] + np.arange(prompt)).reshape(-1).astype(np.int32)
    others = [causal[None, None], angles, np.array([1, 0, 1], np.int32), rows]

    def make(kernels: Kernels) -> nn.Cell:
        return kernels.prefill_attention(heads, *_caches(heads))

    return _attention("attention of prompts", "prefill_attention", make, heads, 2 * prompt, others)


def _cached(name: str, heads: Heads, read: int) -> Case:
    """Makes a case of a token of each of three slots that are filled to different lengths, `read` at most."""
    at = np.array([5, 0, read - 1])
    mask = np.where(np.arange(LENGTH) <= at[:, None], 0.0, NEVER).astype(np.float32)
    starts = np.arange(SLOTS * heads.kv).reshape(SLOTS, heads.kv) * LENGTH
    rows = (starts + at[:, None]).reshape(-1).astype(np.int32)
    others = [mask[:, None], _rotary(heads)[at][:, None], rows]

    def make(kernels: Kernels) -> nn.Cell:
        return AttentionToCache(kernels, heads, *_caches(heads), read)

    return _attention(name, "cached_attention", make, heads, SLOTS, others)


def cases() -> list[Case]:
    x, added, weight = _floats(37, WIDTH), _floats(37, WIDTH, seed=1), _floats(WIDTH)
    same = (37, WIDTH)
    matrix = _floats(WIDTH, 2 * WIDTH) / np.sqrt(np.float32(WIDTH))
    return [
        Case("norm", "rms_norm", lambda k: k.rms_norm(1e-6), [x, weight], 1, [same]),
        Case(
            "norm of a sum",
            "add_rms_norm",
            lambda k: k.add_rms_norm(1e-6),
            [x, added, weight],
            2,
            [same, same],
        ),
        Case("gate", "glu", lambda k: k.glu("silu"), [_floats(37, 2 * WIDTH)], 1, [same]),
        Case(
            "product and bias",
            "add_matmul",
            lambda k: k.add_matmul(),
            [_floats(2 * WIDTH), x, matrix],
            3,
            [(37, 2 * WIDTH)],
            has_gradient=False,
        ),
        _packed("packed attention, biases", BIASED),
        _packed("packed attention, norms", NORMED),
        _causal("attention in rows of one sample", NORMED),
        _prefill(BIASED),
        _cached("attention to the cache", BIASED, LENGTH),
        _cached("attention to a part of the cache", NORMED, LENGTH // 2),
    ]
