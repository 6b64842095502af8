"""Compares kernels of a device with NumPy, outputs and gradients, by dtype, and takes the time of a call.

Inputs are rounded to the compared dtype first. A difference counts as a share of the largest value of an output or
gradient; integers have to be the same. Gradients of the plain kernels in float32 are held to the difference quotient of
NumPy's outputs, and those of all others to the plain kernels' in float32.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.backend.kernels.ascend import AscendKernels
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.targets import FUSED_KERNELS, Target
from mindgrpo.doctor.jobs import CheckLine, Starts, fails, ok, skipped
from mindgrpo.doctor.probes.kernel_cases import REAL, SMALL, Case, cases

# Of the largest value. float32 differs by the order of sums; the others by the rounding of what comes between.
TOLERANCE: dict[Dtype, float] = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
REMEDY = "check that CANN's kernels (Ascend-cann-kernels) are of the toolkit and the chip; send the archive"
FUSED_REMEDY = "a run can do without it (context.plain_kernels, as the .yaml has it); " + REMEDY
EXACT_REMEDY = "do not train on this device: tokens are drawn or weights compared by this operation; send the archive"
LEAST, STEP, CALLS = 1e-3, 1e-4, 5


@dataclass(frozen=True)
class Fused:
    """Names kernels of a device and the dtype that they are compared in."""

    name: str
    make: Callable[[], Kernels]
    dtype: Dtype

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"

    def check_of(self, case: Case) -> tuple[str, list[str]]:
        """Returns the check's name, and the kernels that a run has to do without if it fails."""
        is_own = not self.is_plain and case.method in FUSED_KERNELS
        return f"{self.name} {case.name}, {self.dtype}", [case.method] if is_own else []


class _WithGradients(nn.Cell):
    """Computes (inputs, sensitivity) -> output, then the inputs' gradients, in one graph; one of each, or tuples."""

    def __init__(self, cell: nn.Cell, num_inputs: int) -> None:
        super().__init__()
        self.cell, self.num_inputs = cell, num_inputs
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *both: Any) -> Any:
        inputs, sens = both[: self.num_inputs], both[self.num_inputs :]
        sens = sens[0] if len(sens) == 1 else sens
        return self.cell(*inputs), self.gradient(self.cell)(*inputs, sens)


def _is_float(array: np.ndarray) -> bool:
    return array.dtype.kind == "f"


def _tensors(
    arrays: Sequence[np.ndarray], dtype: Dtype, num_wide: int | None = None
) -> list[Tensor]:
    """Makes tensors, the first `num_wide` floats in `dtype`; None: all of them."""
    made, left = [], len(arrays) if num_wide is None else num_wide
    for own in arrays:
        is_wide = _is_float(own) and left > 0
        left -= is_wide
        made.append(Tensor(own).astype(mindspore_dtype(dtype)) if is_wide else Tensor(own))
    return made


def _arrays(out: Any) -> list[np.ndarray]:
    if isinstance(out, tuple | list):
        return [array for one in out for array in _arrays(one)]
    return [(out.astype(ms.float32) if out.is_floating_point() else out).asnumpy()]


def results(
    case: Case, kernels: Kernels, dtype: Dtype, inputs: Any, sens: Any, calls: int
) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Computes `case` in `dtype`; returns outputs, gradients of float inputs, and a call's seconds over `calls`."""
    tensors, made = _tensors(inputs, dtype, case.num_wide), case.make(kernels)
    if case.has_gradient:
        made = _WithGradients(made, len(tensors))
        tensors += _tensors(sens, dtype)
    arrays = _arrays(made(*tensors))
    started = time.perf_counter()
    for number in range(calls):
        out = made(*tensors)
        if number == calls - 1:
            _arrays(out)
    seconds = (time.perf_counter() - started) / max(1, calls)
    gradients = zip(arrays[len(sens) :], inputs, strict=False)
    return arrays[: len(sens)], [own for own, x in gradients if _is_float(x)], seconds


def difference(ours: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference as a share of the largest value; infinite where none is allowed or a number is
    not finite."""
    if ours.shape != expected.shape or not np.isfinite(ours).all():
        return float("inf")
    if not _is_float(expected):
        return 0.0 if np.array_equal(ours, expected) else float("inf")
    return float(np.abs(ours - expected).max() / max(LEAST, np.abs(expected).max()))


def _by_quotient(
    case: Case, inputs: Sequence[np.ndarray], sens: Any, gradients: Sequence[np.ndarray]
) -> float:
    """Compares gradients with the change of NumPy's outputs in one direction of all float inputs.

    Returns the difference as a share of the gradients' norm, which is what a wrong one would change.
    """
    rng = np.random.default_rng(0)
    signs = [rng.choice([-1.0, 1.0], own.shape) if _is_float(own) else None for own in inputs]

    def along(step: float) -> float:
        pairs = zip(inputs, signs, strict=True)
        outputs = case.reference([x if own is None else x + step * own for x, own in pairs])
        return sum(float((own * out).sum()) for own, out in zip(sens, outputs, strict=True))

    quotient = (along(STEP) - along(-STEP)) / (2 * STEP)
    directions = [own for own in signs if own is not None]
    ours = sum(float((g * own).sum()) for g, own in zip(gradients, directions, strict=True))
    norm = sum(float((g.astype(float) ** 2).sum()) for g in gradients) ** 0.5
    return abs(ours - quotient) / max(LEAST, norm) if np.isfinite(ours) else float("inf")


def compare(case: Case, fused: Fused) -> CheckLine:
    """Compares a kernel with NumPy. Raises what it raises."""
    (check, without), kernels, dtype = fused.check_of(case), fused.make(), fused.dtype
    is_inherited = getattr(type(kernels), case.method, 0) is getattr(Kernels, case.method, 0)
    if not fused.is_plain and is_inherited:
        return skipped(check, "there is none: plain operations compute it")
    inputs = _arrays(_tensors(case.inputs, dtype, case.num_wide))
    exact = [own.astype(np.float64) if _is_float(own) else own for own in inputs]
    expected = case.reference(exact)
    drawn = [np.random.default_rng(i).normal(size=own.shape) for i, own in enumerate(expected)]
    sens = _arrays(_tensors(drawn, dtype))
    ours, gradients, seconds = results(case, kernels, dtype, inputs, sens, CALLS)
    worst = max(difference(*own) for own in zip(ours, expected, strict=True))
    if case.has_gradient and fused.is_plain and dtype == "float32":
        worst = max(worst, _by_quotient(case, exact, sens, gradients))
    elif case.has_gradient:
        _, plain, _ = results(case, Kernels(), "float32", inputs, sens, 0)
        worst = max(worst, *(difference(*own) for own in zip(gradients, plain, strict=True)))
    limit, is_exact = TOLERANCE[dtype], not any(map(_is_float, expected))
    passes = "forward and backward" if case.has_gradient else "forward"
    seen = f"{passes}, {1e6 * seconds:.0f} us, differs by {worst:.1e} of the largest value, "
    seen += "NumPy's in every bit are wanted" if is_exact else f"allowed {limit:.0e}"
    figures = {"microseconds": round(1e6 * seconds, 1), "kernels": without}
    if worst <= limit:
        return ok(check, seen, **figures)
    remedy = EXACT_REMEDY if is_exact else FUSED_REMEDY if without else REMEDY
    return fails(check, seen, remedy, **figures)


def kernels_of(rung: str, device: str) -> list[Fused]:
    """Lists what is compared on a rung; processors lack bfloat16 and have kernels in C."""
    narrow: Dtype = "bfloat16" if device == "Ascend" else "float16"
    plain = Fused("plain", Kernels, "float32" if rung == "float32" else narrow)
    if rung == "float32" or (device != "Ascend" and rung != "fused"):
        return [plain]
    if device != "Ascend":
        return [Fused("C", NativeKernels, "float32")]
    if rung == "fused":
        half = Fused("fused", lambda: AscendKernels(attention_dtype="float16"), "float16")
        return [Fused("fused", AscendKernels, "float32"), half]
    return [plain, Fused("fused", lambda: AscendKernels(attention_dtype="bfloat16"), narrow)]


def kernel_lines(rung: str, target: Target, first: int, starts: Starts) -> Iterator[CheckLine]:
    """Makes the checks from number `first` on.

    Ends this process after a check that raises: what it leaves of the device's state is no ground for the next one.
    """
    sizes = SMALL if target.keeps_weights_on_host else REAL
    chosen = [
        (case, fused)
        for fused in kernels_of(rung, target.device)
        for case in cases(sizes, fused.dtype)
        if case.method or fused.is_plain
    ]
    for case, fused in chosen[first:]:
        name, without = fused.check_of(case)
        starts(name, kernels=without)
        if fused.name == "C" and native_library.library() is None:
            yield skipped(name, "it cannot be compiled here, and runs go without")
            continue
        try:
            line = compare(case, fused)
        except (RuntimeError, TypeError, ValueError) as error:
            traceback.print_exception(error)
            words = next((row for row in str(error).splitlines() if row.strip("- ")), "")
            seen = f"{type(error).__name__}: {words.strip()[:300]}"
            yield fails(name, seen, FUSED_REMEDY if without else REMEDY, kernels=without)
            raise SystemExit(1) from error
        yield line
