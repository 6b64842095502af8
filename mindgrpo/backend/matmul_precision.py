"""In what products of float32 matrices are computed: `context.float32_matmul_precision`, in PyTorch's words.

highest: float32. high: each factor as the sum of three bfloat16 numbers, six products (native/bf16_gemm.h), or on
Ascend HF32. medium: each factor rounded to bfloat16, float32 sums.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from mindgrpo.backend.targets import SHARED_MEMORY, Target
from mindgrpo.errors import UserError

MatmulPrecision = Literal["highest", "high", "medium"]
KEY = "context.float32_matmul_precision"
# Of how many bfloat16 numbers each factor of a product is the sum: of one 1 product is made of it, of three 6.
NUM_PARTS: Mapping[str, int] = {"high": 3, "medium": 1}
# oneDNN's own variable, and the processor's flags.
ISA_LIMIT, AMX_FLAG, BF16_FLAG = "ONEDNN_MAX_CPU_ISA", "amx_bf16", "avx512_bf16"
CPU_INFO = Path("/proc/cpuinfo")


def resolve(asked: str, target: Target, has_kernels: bool) -> MatmulPrecision:
    """What `asked` means on `target`, where `auto` is the fastest that is accurate to float32. Raises UserError.

    `has_kernels` says whether C kernels of ours can be made here.
    """
    on_processors = target == SHARED_MEMORY and has_kernels
    if asked == "auto":
        return "high" if on_processors and has_amx(os.environ) else "highest"
    if asked == "highest" or on_processors or (asked == "high" and target.device == "Ascend"):
        return asked  # type: ignore[return-value]
    if target == SHARED_MEMORY:
        why = "needs the C kernels, which cannot be made here: install gcc"
    elif target.device == "Ascend":
        why = "does not exist on Ascend, which has high (HF32)"
    else:
        why = f"exists on {SHARED_MEMORY}, not on {target}"
    raise UserError(f"{KEY} is '{asked}', which {why}; or set it to highest.")


def packed_bytes(k: int, n: int, num_parts: int) -> int:
    """At most, of a matrix [k, n] that is packed for products of bfloat16: whole blocks of 32 x 64."""
    return 2 * num_parts * (-(-k // 32) * 32) * (-(-n // 64) * 64)


def has_amx(environment: Mapping[str, str]) -> bool:
    """Whether oneDNN multiplies bfloat16 by the processor's AMX."""
    return _uses(AMX_FLAG, ("AMX",), environment)


def slow_products(
    precision: MatmulPrecision, environment: Mapping[str, str], dtype: str = "float32"
) -> list[str]:
    """A sentence where products of bfloat16 take longer than those of float32 on this host's processors.

    `dtype` is context.compute_dtype.
    """
    is_narrow = dtype == "bfloat16"
    if (precision == "highest" and not is_narrow) or has_amx(environment):
        return []
    has_bfloat16 = _uses(BF16_FLAG, ("BF16", "FP16", "AMX"), environment)
    if (precision == "medium" or is_narrow) and has_bfloat16:
        return []
    lacks = "AMX" if has_bfloat16 else "instructions for bfloat16"
    slow = f"{KEY} {precision} is slower than highest"
    if is_narrow:
        slow = "context.compute_dtype bfloat16 is slower than float32"
    return [f"{slow} here: the processor has no {lacks}"]


def _uses(flag: str, names: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether the processor has it, and ONEDNN_MAX_CPU_ISA, if set, has one of these in its name."""
    limit = environment.get(ISA_LIMIT, "").upper()
    if limit not in ("", "DEFAULT") and not any(name in limit for name in names):
        return False
    try:
        return flag in CPU_INFO.read_text().split()
    except OSError:
        return False
