"""Makes the doctor's checks of kernels: exact ones, then fused kernels against their plain doubles.

Fused kernels are compared on one device, outputs and gradients, by dtype. The double is MindSpore's plain operations in
float32, on inputs that were rounded to the compared dtype. A difference counts as a share of the largest value of an
output or gradient.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from mindgrpo.backend.dtypes import Dtype, mindspore_dtype
from mindgrpo.backend.kernels.ascend import AscendKernels
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.doctor.jobs import CheckLine, fails, ok, skipped
from mindgrpo.doctor.probes.kernel_cases import Case, ExactCase, cases, exact_cases

# Of the largest value. float32 differs by the order of sums; the others by the rounding of what comes between.
TOLERANCE: dict[Dtype, float] = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
REMEDY = (
    "check that CANN's kernels package is of the toolkit's version and of this chip (Ascend-cann-kernels); to go on "
    "without fused attention, set use_flash_attention: false in the model's YAML, and send this report"
)
EXACT_REMEDY = (
    "do not train on this device: tokens are drawn, weights compared or positions told apart by this operation; send "
    "this report"
)
LEAST = 1e-3
_UNSUPPORTED = re.compile(r"Unsupported op \[(\w+)\] on CPU")


@dataclass(frozen=True)
class Fused:
    """Names kernels of a device and the dtype that they are compared in."""

    name: str
    make: Callable[[], Kernels]
    dtype: Dtype
    has_attention: bool = True


def compare_exactly(case: ExactCase, kernels: Kernels, dtype: Dtype) -> CheckLine:
    """Compares every bit with NumPy's."""
    wide = mindspore_dtype(dtype)
    inputs = [tensor_of(own, wide if own.dtype == np.float32 else None) for own in case.inputs]
    wrong = total = 0
    for made, wanted in zip(case.make(kernels)(*inputs), case.expected, strict=True):
        got = (made.astype(ms.float32) if wanted.dtype == np.float32 else made).asnumpy()
        total += wanted.size
        same_shape = got.shape == wanted.shape
        differs = got.view(np.uint32) != wanted.view(np.uint32) if same_shape else None
        wrong += wanted.size if differs is None else int(differs.sum())
    if wrong:
        seen = f"{wrong} of {total} values are others than NumPy's ({dtype})"
        return fails(case.name, seen, EXACT_REMEDY)
    return ok(case.name, f"{total} values, NumPy's in every bit ({dtype})")


def tensor_of(array: np.ndarray, dtype: ms.Type | None) -> Tensor:
    return Tensor(array) if dtype is None else Tensor(array).astype(dtype)


class _WithGradients(nn.Cell):
    """Computes (inputs, sensitivities) -> outputs, then the inputs' gradients, in one graph."""

    def __init__(self, cell: nn.Cell, num_inputs: int) -> None:
        super().__init__()
        self.cell, self.num_inputs = cell, num_inputs
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *both: Any) -> Any:
        inputs, sens = both[: self.num_inputs], both[self.num_inputs :]
        out = self.cell(*inputs)
        if len(sens) == 1:
            return out, self.gradient(self.cell)(*inputs, sens[0])
        return out, self.gradient(self.cell)(*inputs, sens)


def results(case: Case, kernels: Kernels, dtype: Dtype, rounded: bool) -> list[np.ndarray]:
    """Returns float32 outputs, then gradients of float inputs.

    With `rounded`, in float32 of inputs rounded to `dtype`.
    """
    narrow = mindspore_dtype(dtype)
    inputs = []
    for number, array in enumerate(case.inputs):
        own = tensor_of(array, narrow if number < case.num_wide else None)
        inputs.append(own.astype(ms.float32) if rounded and number < case.num_wide else own)
    cell = case.make(kernels)
    if not case.has_gradient:
        return _arrays(cell(*inputs))
    sens = []
    for seed, shape in enumerate(case.outputs):
        drawn = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        own = tensor_of(drawn, narrow)
        sens.append(own.astype(ms.float32) if rounded else own)
    out, gradients = _WithGradients(cell, len(inputs))(*inputs, *sens)
    pairs = zip(gradients, case.inputs, strict=True)
    return _arrays(out) + [g for gs, x in pairs if x.dtype == np.float32 for g in _arrays(gs)]


def _arrays(out: Any) -> list[np.ndarray]:
    several = out if isinstance(out, tuple) else (out,)
    return [one.astype(ms.float32).asnumpy() for one in several]


def difference(ours: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> float:
    """Returns the largest difference, as a share of each array's largest value.

    Infinite where a number is not finite.
    """
    worst = 0.0
    for one, other in zip(ours, plain, strict=True):
        if one.shape != other.shape or not np.isfinite(one).all():
            return float("inf")
        scale = max(LEAST, float(np.abs(other).max()))
        worst = max(worst, float(np.abs(one - other).max()) / scale)
    return worst


def compare(case: Case, fused: Fused) -> CheckLine:
    """Compares a fused kernel with its plain double. Raises what the fused kernel raises."""
    check = name_of(case, fused)
    passes = "forward and backward" if case.has_gradient else "forward"
    limit = TOLERANCE[fused.dtype]
    if case.is_plain_of(fused.make()):
        return skipped(check, "there is none: plain operations compute it")
    plain = results(case, Kernels(), fused.dtype, rounded=True)
    ours = results(case, fused.make(), fused.dtype, rounded=False)
    worst = difference(ours, plain)
    seen = f"{passes}, differs by {worst:.1e} of the largest value, allowed {limit:.0e}"
    return ok(check, seen) if worst <= limit else fails(check, seen, REMEDY)


def name_of(case: Case, fused: Fused) -> str:
    return f"{fused.name} {case.name}, {fused.dtype}"


def first_words(error: BaseException) -> str:
    """Returns what MindSpore's error says first, without its rules and headings."""
    lines = [line.strip() for line in str(error).splitlines()]
    words = [line for line in lines if line.strip("-") and not line.startswith("- ")]
    return (words or lines or [""])[0][:300]


def fused_kernels(device: str) -> list[Fused]:
    """Lists what can be compared on `device`: its own kernels, and those of Ascend that processors can run."""
    half = Fused("fused", lambda: AscendKernels(attention_dtype="float16"), "float16")
    if device == "Ascend":
        narrow = Fused("fused", lambda: AscendKernels(attention_dtype="bfloat16"), "bfloat16")
        return [Fused("fused", AscendKernels, "float32", has_attention=False), half, narrow]
    # The host's processors lack bfloat16 in operations around the fused ones.
    return [Fused("C", _native, "float32"), half]


def _native() -> Kernels:
    from mindgrpo.backend.kernels.native.kernels import NativeKernels

    return NativeKernels()


def kernel_checks(device: str) -> list[tuple[str, Callable[[], CheckLine]]]:
    """Lists (name, what makes its line) of every check on `device`."""
    # What runs compute with there; operations on integers are the same in all kernels.
    own = Fused("plain", Kernels, "float32")
    if device == "Ascend":
        own = fused_kernels(device)[-1]
    checks: list[tuple[str, Callable[[], CheckLine]]] = []
    for exact in exact_cases():
        checks.append((exact.name, partial(compare_exactly, exact, own.make(), own.dtype)))
    for fused in fused_kernels(device):
        if fused.name == "C" and native_library.library() is None:
            reason = "they cannot be compiled here, and runs go without"
            checks.append(("C kernels", partial(skipped, "C kernels", reason)))
            continue
        chosen = [case for case in cases() if fused.has_attention or not case.is_attention]
        checks += [(name_of(case, fused), partial(compare, case, fused)) for case in chosen]
    return checks


def kernel_lines(device: str, first: int, starts: Callable[[str], None]) -> Iterator[CheckLine]:
    """Makes the checks from number `first` on; `starts` as in transfers.py.

    Ends this process after a check that raises: what it leaves of the device's state is no ground for the next one.
    """
    for name, check in kernel_checks(device)[first:]:
        starts(name)
        try:
            line = check()
        except (RuntimeError, TypeError, ValueError) as error:
            missing = _UNSUPPORTED.search(str(error))
            if not missing:
                yield fails(name, f"{type(error).__name__}: {first_words(error)}", REMEDY)
                traceback.print_exception(error)
                raise SystemExit(1) from error
            line = skipped(name, f"the host's processors have no {missing[1]}")
        yield line
