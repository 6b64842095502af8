"""Names and sizes of dtypes, and resolution of a run's compute dtype and matmul precision.

Weights in graphs, the KV cache, weight sync and, on devices, activations use `context.compute_dtype`. Master weights,
optimizer state, gradient sums, norm statistics, softmax, log-probs and losses are float32.
`context.float32_matmul_precision` sets how GEMMs of float32 matrices are computed, with PyTorch's names. highest:
float32. high: each operand as the sum of three bfloat16 numbers, six products (native/bf16_gemm.h), or HF32 on Ascend.
medium: operands rounded to bfloat16, float32 accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mindgrpo.backend.targets import SHARED_MEMORY, Target
from mindgrpo.errors import UserError

Dtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
MatmulPrecision = Literal["highest", "high", "medium"]
PRECISION_KEY = "context.float32_matmul_precision"
# How many bfloat16 numbers each GEMM operand is split into: one takes 1 product, three take 6.
NUM_PARTS: Mapping[str, int] = {"high": 3, "medium": 1}
# oneDNN's environment variable, and CPU flags.
ISA_LIMIT, AMX_FLAG, BF16_FLAG = "ONEDNN_MAX_CPU_ISA", "amx_bf16", "avx512_bf16"
ARM_FLAG = "bf16"
CPU_INFO = Path("/proc/cpuinfo")
DTYPE_KEY = "context.compute_dtype"
WITHOUT = f"; set {DTYPE_KEY} to float32."


def numpy_dtype(dtype: Dtype) -> np.dtype:
    """Returns the numpy dtype. bfloat16 is MindSpore's extension type; casts round to nearest, ties to even."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    from mindspore.common import np_dtype

    return np.dtype(np_dtype.bfloat16)


def mindspore_dtype(dtype: Dtype) -> Any:
    import mindspore as ms

    return getattr(ms, dtype)


def bits_of(array: np.ndarray) -> np.ndarray:
    """Returns a view of `array` [...] as unsigned integers of the same item size."""
    return array.view(f"u{array.itemsize}")


def device_bits(tensor: Any) -> Any:
    """Returns a view of the device tensor [...] as int32 or int16, whichever has the same item size."""
    import mindspore as ms

    kind = ms.int32 if tensor.itemsize == 4 else ms.int16
    return tensor if tensor.dtype == kind else tensor.view(kind)


def resolve_matmul_precision(asked: str, target: Target, has_kernels: bool) -> MatmulPrecision:
    """Resolves context.float32_matmul_precision on `target`; `auto` is the fastest mode with float32 accuracy.

    `has_kernels`: whether our C kernels can be built on this host. Raises UserError for an unsupported mode.
    """
    on_processors = target == SHARED_MEMORY and has_kernels
    if asked == "auto":
        return "highest"
    if asked == "highest" or on_processors or (asked == "high" and target.device == "Ascend"):
        return asked  # type: ignore[return-value]
    if target == SHARED_MEMORY:
        why = "needs the C kernels, which cannot be made here: install gcc"
    elif target.device == "Ascend":
        why = "does not exist on Ascend, which has high (HF32)"
    else:
        why = f"exists on {SHARED_MEMORY}, not on {target}"
    raise UserError(f"{PRECISION_KEY} is '{asked}', which {why}; or set it to highest.")


def packed_bytes(k: int, n: int, num_parts: int, leaves: int = 1) -> int:
    """Returns an upper bound on the bytes of a matrix [k, n] packed for bfloat16 GEMMs in tiles of 32 x 64.

    Each of the `leaves` of k (see Kernels.matmul) is packed separately.
    """
    return 2 * num_parts * leaves * (-(-k // leaves // 32) * 32) * (-(-n // 64) * 64)


def slow_products(
    precision: MatmulPrecision, environment: Mapping[str, str], dtype: str = "float32"
) -> list[str]:
    """Returns a warning if bfloat16 GEMMs are slower than float32 ones on this host's CPU; else an empty list.

    `dtype` is context.compute_dtype.
    """
    if precision == "high":
        return [
            f"{PRECISION_KEY} high is no faster than highest here: it makes six products of bfloat16"
        ]
    is_narrow = dtype == "bfloat16"
    has_bfloat16 = _uses(BF16_FLAG, ("BF16", "FP16", "AMX"), environment)
    has_bfloat16 = has_bfloat16 or _uses(AMX_FLAG, ("AMX",), environment)
    has_bfloat16 = has_bfloat16 or _uses(ARM_FLAG, (), environment)
    if (precision == "highest" and not is_narrow) or has_bfloat16:
        return []
    slow = f"{PRECISION_KEY} {precision} is slower than highest"
    if is_narrow:
        slow = "context.compute_dtype bfloat16 is slower than float32"
    return [f"{slow} here: the processor has no instructions for bfloat16"]


def _uses(flag: str, names: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Returns whether the CPU has `flag` and ONEDNN_MAX_CPU_ISA, if set, contains one of `names`."""
    limit = environment.get(ISA_LIMIT, "").upper()
    if limit not in ("", "DEFAULT") and not any(name in limit for name in names):
        return False
    try:
        return flag in CPU_INFO.read_text().split()
    except OSError:
        return False


def resolve_compute_dtype(
    asked: str,
    target: Target,
    compiled: bool,
    has_kernels: bool,
    precision: str,
    key: str = DTYPE_KEY,
) -> Dtype:
    """Resolves a compute dtype `asked` for on `target`; `auto` is bfloat16 on Ascend and float32 elsewhere.

    `compiled`: whether graphs are compiled. `has_kernels`: whether our C kernels can be built on this host.
    `precision` is context.float32_matmul_precision; if it is not auto, `auto` is float32. `key` is the configuration
    key that asks. Raises UserError for an unsupported dtype.
    """
    if asked == "auto":
        # Setting float32_matmul_precision implies float32 matrices.
        is_narrow = target.device == "Ascend" and precision == "auto" and compiled
        asked = "bfloat16" if is_narrow else "float32"
    if asked == "float32":
        return "float32"
    if not compiled:
        # MindSpore 2.9 adds a scalar to gradients of parameters that go through cells with a bprop.
        raise UserError(
            f"{key} is '{asked}', whose gradients MindSpore gets wrong without compiled graphs (context.mode 1); set "
            f"context.mode to 0 or {DTYPE_KEY} to float32."
        )
    if precision != "auto":
        raise UserError(
            f"{PRECISION_KEY} is '{precision}', but {key} {asked} leaves no product of float32 matrices; leave it out "
            f"or set {DTYPE_KEY} to float32."
        )
    if target == SHARED_MEMORY and asked == "float16":
        raise UserError(
            f"{key} is 'float16', but processors compute in float32 or bfloat16{WITHOUT}"
        )
    if target == SHARED_MEMORY and not has_kernels:
        raise UserError(
            f"{key} is 'bfloat16', which needs the C kernels, which cannot be made here: install gcc{WITHOUT}"
        )
    if target != SHARED_MEMORY and target.device == "CPU" and asked == "bfloat16":
        raise UserError(
            f"{key} is 'bfloat16', for which MindSpore has no operations on {target}; take float16{WITHOUT}"
        )
    return "bfloat16" if asked == "bfloat16" else "float16"


def num_product_parts(dtype: Dtype, precision: MatmulPrecision) -> int | None:
    """Returns how many bfloat16 numbers each GEMM operand is split into on CPU; None for float32 operands."""
    return NUM_PARTS["medium"] if dtype == "bfloat16" else NUM_PARTS.get(precision)


def num_head_parts(num_parts: int | None, fp32_lm_head: bool) -> int | None:
    """Returns num_product_parts of the LM head's GEMM, given `num_parts` of all others.

    With `fp32_lm_head`, split operands have enough parts for float32 accuracy.
    """
    return NUM_PARTS["high"] if fp32_lm_head and num_parts else num_parts
