"""In which dtype a run computes: `context.compute_dtype`. What a device does not have is refused.

Weights in graphs, the generator's cache and what weight sync moves are of it; on devices activations too. Float32 are
the optimizer's own weights and moments, sums of gradients, norms' statistics, softmax, log-probs and losses.
"""

from __future__ import annotations

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.backend.matmul_precision import KEY as PRECISION
from mindgrpo.backend.matmul_precision import NUM_PARTS, MatmulPrecision
from mindgrpo.backend.targets import SHARED_MEMORY, Target
from mindgrpo.errors import UserError

KEY = "context.compute_dtype"
WITHOUT = f"; set {KEY} to float32."


def resolve(
    asked: str, target: Target, compiled: bool, has_kernels: bool, precision: str, key: str = KEY
) -> Dtype:
    """What `asked` means on `target`, where `auto` is bfloat16 on Ascend and float32 elsewhere. Raises UserError.

    `compiled` says whether graphs are, `has_kernels` whether C kernels of ours can be made here; `precision` is
    context.float32_matmul_precision; `key` is where it was asked.
    """
    if asked == "auto":
        # Whoever chooses how float32 matrices are multiplied has some.
        is_narrow = target.device == "Ascend" and precision == "auto" and compiled
        asked = "bfloat16" if is_narrow else "float32"
    if asked == "float32":
        return "float32"
    if not compiled:
        # MindSpore 2.9 adds a scalar to gradients of parameters that go through cells with a bprop.
        raise UserError(
            f"{key} is '{asked}', whose gradients MindSpore gets wrong without compiled graphs (context.mode 1); set "
            f"context.mode to 0 or {KEY} to float32."
        )
    if precision != "auto":
        raise UserError(
            f"{PRECISION} is '{precision}', but {key} {asked} leaves no product of float32 matrices; leave it out or "
            f"set {KEY} to float32."
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
    """Of how many bfloat16 numbers a product's factors are sums on processors; None: they are float32."""
    return NUM_PARTS["medium"] if dtype == "bfloat16" else NUM_PARTS.get(precision)
