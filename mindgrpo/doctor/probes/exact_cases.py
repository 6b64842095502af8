"""Integer arithmetic, and rotary positions of rows as long as training's: what has to equal NumPy in every bit.

Sampling draws by int32 products that wrap and by right shifts, and weights are compared by them. Rotary positions get
numbers whose results are exact in every dtype, whatever the order of operations. The sizes are a run's, not a test's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.doctor.probes.line import Line, fails, ok

COUNT, ROWS = 1 << 16, 8192
HEADS = Heads(4, 2, 64)
# Those of rollout/noise.py and weights/checksum.py, or like them.
FACTORS, SHIFTS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB, 0x9E3779B9), (11, 14, 15, 16, 17)
REMEDY = (
    "do not train on this device: tokens are drawn, weights compared or positions told apart by this operation; send "
    "this report"
)


@dataclass(frozen=True)
class ExactCase:
    """`make` gives what computes the `expected` tuple from `inputs`, whose floats are in the compared dtype."""

    name: str
    make: Callable[[Kernels], nn.Cell]
    inputs: Sequence[np.ndarray]
    expected: Sequence[np.ndarray]


class _Products(nn.Cell):
    """(x, y int32 [n]) -> x y, then x times each of FACTORS."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = tuple(int(np.uint32(factor).astype(np.int32)) for factor in FACTORS)

    def construct(self, x: Any, y: Any) -> Any:
        products: Any = (x * y,)
        for factor in self.factors:
            products += (x * factor,)
        return products


class _Shifts(nn.Cell):
    """int32 [n] -> it shifted right by each of SHIFTS, with zeros from above."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts, self.masks = SHIFTS, tuple((1 << (32 - shift)) - 1 for shift in SHIFTS)

    def construct(self, x: Any) -> Any:
        shifted: Any = ()
        for i in range(len(self.shifts)):
            shifted += (ops.bitwise_and(ops.bitwise_right_shift(x, self.shifts[i]), self.masks[i]),)
        return shifted


class _Rope(nn.Cell):
    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        self.attention = kernels.attention(HEADS, np.zeros((1, 2 * HEADS.dim), np.float32))

    def construct(self, heads: Any, angles: Any) -> Any:
        return self.attention.apply_rope(heads, angles)


class _RopeAndGradient(nn.Cell):
    """(heads [N, heads, D], angles [N, 1, 2 D], gradient as heads) -> rotated heads, their gradient."""

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
    shape = (ROWS, HEADS.queries + HEADS.kv, HEADS.dim)

    def signs(*shape: int) -> np.ndarray:
        return rng.choice(np.array([-1.0, 1.0], np.float32), shape)

    heads, dy = (signs(*shape) * rng.integers(1, 4, shape).astype(np.float32) for _ in range(2))
    # Of every row other ones, so that one that gets another row's is seen; no product is zero, which has a sign.
    cos, sin = (np.tile(signs(ROWS, 1, half), 2) for _ in range(2))
    sin *= 2.0
    turned = np.concatenate([-heads[..., half:], heads[..., :half]], -1)
    back = dy * sin
    gradient = dy * cos + np.concatenate([back[..., half:], -back[..., :half]], -1)
    expected = [heads * cos + turned * sin, gradient]
    inputs = [heads, np.concatenate([cos, sin], -1), dy]
    return ExactCase(f"rotary positions of {ROWS} rows", _RopeAndGradient, inputs, expected)


def compare_exactly(case: ExactCase, kernels: Kernels, dtype: Dtype) -> Line:
    wide = mindspore_dtype(dtype)
    inputs = [
        Tensor(own).astype(wide) if own.dtype == np.float32 else Tensor(own) for own in case.inputs
    ]
    wrong = total = 0
    for made, wanted in zip(case.make(kernels)(*inputs), case.expected, strict=True):
        got = (made.astype(ms.float32) if wanted.dtype == np.float32 else made).asnumpy()
        total += wanted.size
        same_shape = got.shape == wanted.shape
        wrong += (
            int((got.view(np.uint32) != wanted.view(np.uint32)).sum())
            if same_shape
            else wanted.size
        )
    if wrong:
        return fails(
            case.name, f"{wrong} of {total} values are others than NumPy's ({dtype})", REMEDY
        )
    return ok(case.name, f"{total} values, NumPy's in every bit ({dtype})")
