"""The fused operations of MindSpore 2.9 that AscendKernels calls: one table, so that tests can put doubles in it.

All import on any machine; only a call on another device than an Ascend one is refused. That each has a kernel, and
those of training a backward, is what the installed package says: `aclnn*` in lib/plugin/libmindspore_ops_ascend.so and
the graphs that tests/test_ascend_calls.py compiles. Limits: the docstrings, and CANN's pages of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspore import ops

FusedOp = Callable[..., Any]


@dataclass(frozen=True)
class AscendOps:
    """Each is called as the installed function of that name is: positions, keywords and dtypes."""

    flash_attention_score: FusedOp = ops.flash_attention_score
    incre_flash_attention: FusedOp = ops.incre_flash_attention
    rms_norm: FusedOp = ops.rms_norm
    add_rms_norm: FusedOp = ops.add_rms_norm
    # Its docstring announces that it goes after 2.9, as rms_norm's does other arguments.
    rotary_position_embedding: FusedOp = ops.rotary_position_embedding
    swiglu: FusedOp = ops.swiglu
