"""The kernels' contract in fused operations of Ascend; what has none is computed by MindSpore's other operations.

Norms, rotary positions and SwiGLU keep the dtype of what they get. Fused attention takes float16 and bfloat16 only, so
that it is a choice: of float16, gradients below 6e-8 are zero, and values above 65504 are infinite.
"""

from __future__ import annotations

from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import nn

from mindgrpo.backend.kernels.ascend_attention import (
    FlashCachedAttention,
    FlashPackedAttention,
    FlashPrefillAttention,
    FusedRmsNorm,
    RopeAndHidden,
)
from mindgrpo.backend.kernels.ascend_ops import AscendOps, FusedOp
from mindgrpo.backend.kernels.mindspore_ops import PlainKernels
from mindgrpo.backend.kernels.shapes import Activation, Heads

AttentionDtype = Literal["float16", "bfloat16"]
ATTENTION_DTYPES: dict[str, ms.Type] = {"float16": ms.float16, "bfloat16": ms.bfloat16}


class _FusedAddRmsNorm(nn.Cell):
    def __init__(self, norm: FusedOp, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        normed, _, total = self.norm(x, added, weight.astype(x.dtype), self.eps)
        return total, normed


class _FusedSwiGlu(nn.Cell):
    def __init__(self, swiglu: FusedOp) -> None:
        super().__init__()
        self.swiglu = swiglu

    def construct(self, both: Any) -> Any:
        return self.swiglu(both, -1)


class AscendKernels(PlainKernels):
    """`attention_dtype` is what attention computes in, None for plain attention in float32; `ops` is for tests."""

    def __init__(
        self, ops: AscendOps | None = None, attention_dtype: AttentionDtype | None = None
    ) -> None:
        if attention_dtype is not None and attention_dtype not in ATTENTION_DTYPES:
            raise ValueError(
                f"attention_dtype {attention_dtype!r} is none of {[*ATTENTION_DTYPES]}"
            )
        self._ops = ops or AscendOps()
        self._dtype = None if attention_dtype is None else ATTENTION_DTYPES[attention_dtype]

    def rms_norm(self, eps: float) -> nn.Cell:
        return FusedRmsNorm(self._ops.rms_norm, eps)

    def add_rms_norm(self, eps: float) -> nn.Cell:
        return _FusedAddRmsNorm(self._ops.add_rms_norm, eps)

    def glu(self, activation: Activation) -> nn.Cell:
        is_silu = activation == "silu"
        return _FusedSwiGlu(self._ops.swiglu) if is_silu else super().glu(activation)

    def rope_and_mask(self, rotary: np.ndarray) -> nn.Cell:
        return super().rope_and_mask(rotary) if self._dtype is None else RopeAndHidden(rotary)

    def attention(self, heads: Heads, rotary: np.ndarray) -> nn.Cell:
        if self._dtype is None:
            return super().attention(heads, rotary)
        return FlashPackedAttention(heads, self._ops, self._dtype)

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        if self._dtype is None:
            return super().prefill_attention(heads, keys, values)
        return FlashPrefillAttention(heads, self._ops, self._dtype, keys, values)

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        if self._dtype is None:
            return super().cached_attention(heads, keys, values)
        return FlashCachedAttention(heads, self._ops, self._dtype, keys, values)
