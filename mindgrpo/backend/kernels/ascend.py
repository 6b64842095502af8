"""Kernels that use Ascend's fused operators; kernels without one fall back to plain MindSpore operations.

Norms, rotary embeddings and SwiGLU keep the dtype of their input. Fused attention (FlashAttention, arXiv:2205.14135)
supports float16 and bfloat16 only, and is therefore optional: in float16, gradients below 6e-8 underflow to zero, and
values above 65504 overflow. Packed rows are attended in one call with a mask instead of the TND (variable-length)
layout, which would need the lengths on the host before every call, at most 1024 runs, and a copy of the shared prefix
for each run. The mask handles any spans and is part of the graph, at the cost of computing masked scores. Rows of one
sample use the causal mode, which needs no mask of their size and skips half of the scores.

All operators can be imported on any machine; only calls on other devices fail. Evidence that each has a kernel, and a
backward if trained, is in the installed package: the `aclnn*` symbols of lib/plugin/libmindspore_ops_ascend.so and the
graphs that tests/test_ascend_calls.py compiles. Limits are from docstrings and CANN's pages of the kernels. Dimensions
as in mindspore_attention.py. `hidden` is a bool mask, True if a token does not attend to another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.mindspore_attention import (
    ContextMask,
    HeadAttention,
    PlainCachedAttention,
    PlainContextAttention,
    PlainPackedAttention,
    PlainPrefillAttention,
    RopeAndMask,
    SeenTokens,
)
from mindgrpo.backend.kernels.shapes import Activation, AdamWNumbers, Heads
from mindgrpo.errors import UserError

FusedOp = Callable[..., Any]
# Values of `sparse_mode`: apply the whole mask and skip no scores, or causal, which skips scores of later tokens and
# takes a triangular mask of a fixed size.
WHOLE_MASK, CAUSAL, TRIANGLE = 1, 2, 2048
# Value of `inner_precise`; precision matters, since the generator's log-probs are compared with the trainer's.
HIGH_PRECISION = 0
# Value of `mode`: rotates the two halves of a head (not interleaved pairs).
HALVES = 0
# Limits of flash_attention_score and incre_flash_attention.
DIM_STEP, MAX_DIM = 16, 512
MAX_QUERIES, MAX_GROUP = 256, 64
AttentionDtype = Literal["float16", "bfloat16"]
ATTENTION_DTYPES: dict[str, ms.Type] = {"float16": ms.float16, "bfloat16": ms.bfloat16}


@dataclass(frozen=True)
class AscendOps:
    """The fused MindSpore operators, replaceable by test doubles with the same arguments and dtypes."""

    flash_attention_score: FusedOp = ops.flash_attention_score
    incre_flash_attention: FusedOp = ops.incre_flash_attention
    rms_norm: FusedOp = ops.rms_norm
    add_rms_norm: FusedOp = ops.add_rms_norm
    # Its docstring announces removal after 2.9, and rms_norm's new arguments; in 2.10 both are unchanged.
    rotary_position_embedding: FusedOp = ops.rotary_position_embedding
    swiglu: FusedOp = ops.swiglu
    # Takes lists of tensors, and has a backward for a single combination of arguments.
    grouped_matmul: FusedOp = ops.auto_generate.grouped_matmul
    addmm: FusedOp = mint.addmm
    # The operator that mint.optim.AdamW calls.
    adamw: FusedOp = ops.auto_generate.AdamW()
    norm: FusedOp = mint.norm


def check_heads(heads: Heads) -> None:
    """Raises UserError for heads that fused attention does not support."""
    group = heads.queries // heads.kv
    for name, value, limit, is_valid in (
        (
            "head_dim",
            heads.dim,
            f"a multiple of {DIM_STEP} up to {MAX_DIM}",
            heads.dim % DIM_STEP == 0 and heads.dim <= MAX_DIM,
        ),
        (
            "query heads",
            heads.queries,
            f"at most {MAX_QUERIES} a rank",
            heads.queries <= MAX_QUERIES,
        ),
        ("query heads a key head", group, f"at most {MAX_GROUP}", group <= MAX_GROUP),
    ):
        if not is_valid:
            raise UserError(
                f"The model's {name} is {value}, but fused attention takes {limit}; leave attention_dtype out for "
                "plain attention in float32."
            )


class FusedRmsNorm(nn.Cell):
    """(x [..., H], weight [H]) -> x / sqrt(mean(x^2) + eps) * weight (arXiv:1910.07467), in x's dtype."""

    def __init__(self, norm: FusedOp, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps

    def construct(self, x: Any, weight: Any) -> Any:
        # The second output is the reciprocal root, which only the backward needs.
        return self.norm(x, ops.cast(weight, x.dtype), self.eps)[0]


class RopeAndHidden(RopeAndMask):
    """(positions [R, T], spans [R, T, 3]) -> hidden bool [R, 1, T, T], angles float32 [N, 1, 2 D]."""

    def construct(self, positions: Any, spans: Any) -> Any:
        hidden = ops.expand_dims(ops.logical_not(self.seen_in_rows(spans)), 1)
        return hidden, self.angles(positions)


class ContextHidden(ContextMask):
    """(positions [R, T], spans [R, T, 3], columns [G, R, L]) -> hidden bool [R, 1, L, T], angles float32 [n, 1, 2 D].

    Both are of this rank's tokens; the last dim of `hidden` concatenates the columns of all ranks.
    """

    def construct(self, positions: Any, spans: Any, columns: Any) -> Any:
        seen, own_positions = self.own(positions, spans, columns)
        return ops.expand_dims(ops.logical_not(seen), 1), self.angles(own_positions)


class RopeOfOneRun(SeenTokens):
    """(positions [R, T], spans) -> hidden bool [TRIANGLE, TRIANGLE] for any length, angles float32 [R, T, 2 D]."""

    def __init__(self, rotary: np.ndarray | None) -> None:
        super().__init__(rotary)
        self.triangle = Tensor(np.triu(np.ones((TRIANGLE, TRIANGLE), bool), 1))

    def construct(self, positions: Any, spans: Any) -> Any:
        return self.triangle, self.angles(positions).reshape(*spans.shape[:2], -1)


class _FusedAttention(HeadAttention):
    """Mixin with fused norms, rotary embeddings and flash attention, which computes in `dtype`."""

    def fuse(self, heads: Heads, fused: AscendOps, dtype: ms.Type) -> None:
        check_heads(heads)
        self.norm = FusedRmsNorm(fused.rms_norm, heads.norm_eps or 0.0)
        self.rotate = fused.rotary_position_embedding
        self.attend = fused.flash_attention_score
        self.dtype = dtype
        self.sparse_mode = WHOLE_MASK

    def apply_rope(self, heads: Any, angles: Any) -> Any:
        """Rotates heads [N, heads, D] by angles [N, 1, 2 D], as layout SBND with one sequence and angles S11D."""
        angles = ops.expand_dims(ops.cast(angles, heads.dtype), 1)
        return self.turned(heads, angles[:, :, :, : self.dim], angles[:, :, :, self.dim :])

    def turned(self, heads: Any, cos: Any, sin: Any) -> Any:
        cos, sin = ops.cast(cos, heads.dtype), ops.cast(sin, heads.dtype)
        return self.rotate(ops.expand_dims(heads, 1), cos, sin, HALVES).reshape(heads.shape)

    def mixed(self, queries: Any, keys: Any, values: Any, hidden: Any, rows: int) -> Any:
        """Attends: queries [n, queries, D], keys and values [N, kv, D], hidden [R, 1, L, T] or [T, T] ->
        [n, queries D]. With context parallelism, n is less than N.
        """
        mixed = self.attend(
            ops.cast(queries.reshape(rows, -1, self.queries * self.dim), self.dtype),
            ops.cast(keys.reshape(rows, -1, self.kv * self.dim), self.dtype),
            ops.cast(values.reshape(rows, -1, self.kv * self.dim), self.dtype),
            self.queries,
            attn_mask=hidden,
            scalar_value=self.scale,
            input_layout="BSH",
            sparse_mode=self.sparse_mode,
        )
        return ops.cast(mixed, queries.dtype).reshape(-1, self.queries * self.dim)


class FlashPackedAttention(_FusedAttention, PlainPackedAttention):
    def __init__(self, heads: Heads, fused: AscendOps, dtype: ms.Type) -> None:
        super().__init__(heads)
        self.fuse(heads, fused, dtype)


class FlashContextAttention(_FusedAttention, PlainContextAttention):
    """Attends with fewer queries than keys; never run on an NPU. The mask takes T^2 / G bytes per row."""

    def __init__(self, heads: Heads, fused: AscendOps, dtype: ms.Type, gather: nn.Cell) -> None:
        PlainContextAttention.__init__(self, heads, gather)
        self.fuse(heads, fused, dtype)


class FlashCausalAttention(FlashPackedAttention):
    """Causal attention in rows of a single run each; takes hidden and angles from RopeOfOneRun."""

    def __init__(self, heads: Heads, fused: AscendOps, dtype: ms.Type) -> None:
        super().__init__(heads, fused, dtype)
        self.sparse_mode = CAUSAL

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, hidden: Any, angles: Any
    ) -> Any:
        by_token = angles.reshape(-1, 1, 2 * self.dim)
        queries, keys, values = self.heads_of(qkv, bias, q_norm, k_norm, by_token)
        return self.mixed(queries, keys, values, hidden, angles.shape[0])


class FlashPrefillAttention(_FusedAttention, PlainPrefillAttention):
    """Prefill attention. A KV cache in the attention's dtype instead of float32 saves a cast at every decoded token."""

    def __init__(
        self, heads: Heads, fused: AscendOps, dtype: ms.Type, keys: Any, values: Any
    ) -> None:
        PlainPrefillAttention.__init__(self, heads, keys, values)
        self.fuse(heads, fused, dtype)

    def mixed(self, queries: Any, keys: Any, values: Any, mask: Any, rows: int) -> Any:
        # One mask [T, T] applies to all rows; [1, 1, T, T] is not among the documented shapes.
        hidden = (mask < 0.0).reshape(mask.shape[2:])
        return super().mixed(queries, keys, values, hidden, rows)


class _AnglesOfHeads(nn.Cell):
    """Angles [B, 1, 2 D] -> cos and sin [B, 1, 1, D].

    Without query and key norms, they are [B, 1, heads, D] for queries, keys and values together, with the identity
    rotation for values.
    """

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self.dim = heads.dim
        self.for_all = heads.norm_eps is None
        turning = heads.queries + heads.kv
        turns = (np.arange(turning + heads.kv) < turning).astype(np.float32).reshape(1, 1, -1, 1)
        self.turns, self.stays = Tensor(turns), Tensor(1.0 - turns)

    def construct(self, angles: Any) -> Any:
        cos, sin = mint.split(ops.expand_dims(angles, 1), [self.dim, self.dim], 3)
        if self.for_all:
            cos, sin = cos * self.turns + self.stays, sin * self.turns
        return cos, sin


class FlashCachedAttention(_FusedAttention, PlainCachedAttention):
    """Decode attention on the paged KV cache that FlashPrefillAttention fills.

    The page size is a multiple of 16 positions up to 512; 128 is recommended. With shared pages, the cache has fewer
    pages than the slots read in total, which CANN's page of the kernel does not allow: a check of the doctor tells
    whether it works.
    """

    def __init__(
        self, heads: Heads, fused: AscendOps, dtype: ms.Type, keys: Any, values: Any
    ) -> None:
        PlainCachedAttention.__init__(self, heads, keys, values)
        self.fuse(heads, fused, dtype)
        self.decode = fused.incre_flash_attention
        self.widths = [self.queries, self.kv, self.kv]

    def heads_of(self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, angles: Any) -> Any:
        """Like HeadAttention.heads_of, with `angles` of _AnglesOfHeads: without norms, one rotation for all heads."""
        if self.has_bias:
            qkv = qkv + ops.cast(bias, qkv.dtype)
        heads = qkv.reshape(-1, sum(self.widths), self.dim)
        if self.has_norm:
            queries, keys, values = mint.split(heads, self.widths, 1)
            queries = self.turned(self.norm(queries, q_norm), *angles)
            return queries, self.turned(self.norm(keys, k_norm), *angles), values
        return mint.split(self.turned(heads, *angles), self.widths, 1)

    def mixed_with_cache(self, queries: Any, keys: Any, values: Any, mask: Any, pages: Any) -> Any:
        rows, length = mask.shape[0], mask.shape[2]
        # Each KV head of a slot is a separate sequence with a single KV head; cache blocks are [block, 1, position, D].
        block = length // pages.shape[1]
        shape = (-1, 1, block, self.dim)
        mixed = self.decode(
            ops.cast(queries.reshape(rows, self.group, 1, self.dim), self.dtype),
            (ops.cast(keys.reshape(shape), self.dtype),),
            (ops.cast(values.reshape(shape), self.dtype),),
            attn_mask=mask < 0.0,
            # The real lengths would have to be known on the host before it launches the kernel.
            actual_seq_lengths=(length,) * rows,
            block_table=pages,
            num_heads=self.group,
            input_layout="BNSD",
            scale_value=self.scale,
            num_key_value_heads=1,
            block_size=block,
            inner_precise=HIGH_PRECISION,
        )
        return ops.cast(mixed, queries.dtype).reshape(-1, self.queries * self.dim)


class _FusedAddRmsNorm(nn.Cell):
    def __init__(self, norm: FusedOp, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps

    def construct(self, x: Any, added: Any, weight: Any) -> Any:
        normed, _, total = self.norm(x, added, ops.cast(weight, x.dtype), self.eps)
        return total, normed


class _FusedSwiGlu(nn.Cell):
    def __init__(self, swiglu: FusedOp) -> None:
        super().__init__()
        self.swiglu = swiglu

    def construct(self, both: Any) -> Any:
        return self.swiglu(both, -1)


class _GroupedMatMul(nn.Cell):
    """Grouped GEMM in one kernel: (x [S, K], weight [E, K, M], counts [E]) -> [S, M].

    The zero rows after those of all experts are given to the last expert.
    """

    def __init__(self, grouped_matmul: FusedOp) -> None:
        super().__init__()
        self.grouped_matmul = grouped_matmul

    def construct(self, x: Any, weight: Any, counts: Any) -> Any:
        ends = ops.cast(ops.cumsum(counts, 0), ms.int64)
        ends = ops.concat((ends[:-1], ops.zeros_like(ends[:1]) + x.shape[0]), 0)
        return self.grouped_matmul(
            (x,), (ops.cast(weight, x.dtype),), group_list=ends, split_item=3, group_type=0
        )[0]


class _GroupedExpertMlp(nn.Cell):
    def __init__(self, grouped_matmul: FusedOp, swiglu: FusedOp) -> None:
        super().__init__()
        self.product, self.swiglu = _GroupedMatMul(grouped_matmul), swiglu

    def construct(self, x: Any, counts: Any, gate_up: Any, down: Any) -> Any:
        return self.product(self.swiglu(self.product(x, gate_up, counts), -1), down, counts)


class _AddMatMul(nn.Cell):
    def __init__(self, addmm: FusedOp) -> None:
        super().__init__()
        self.addmm = addmm

    def construct(self, bias: Any, x: Any, weight: Any) -> Any:
        return self.addmm(ops.cast(bias, x.dtype), x, weight)


class _Largest(nn.Cell):
    """x [B, V] -> top-k by mint.topk, an aclnn kernel; ops.topk is only registered for the AI CPU."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def construct(self, x: Any) -> Any:
        return mint.topk(x, self.count, 1)


class _AdamW(nn.Cell):
    def __init__(
        self, adamw: FusedOp, beta1: float, beta2: float, eps: float, weight_decay: float
    ) -> None:
        super().__init__()
        self.adamw, self.numbers = adamw, (beta1, beta2, weight_decay, eps)

    def construct(
        self, weight: Any, gradient: Any, first: Any, second: Any, lr: Any, before: Any
    ) -> Any:
        # The third moment is AMSGrad's, which is off.
        return self.adamw(weight, first, second, second, gradient, before, lr, *self.numbers)


class _Squares(nn.Cell):
    def __init__(self, norm: FusedOp) -> None:
        super().__init__()
        self.norm = norm

    def construct(self, x: Any) -> Any:
        norm = self.norm(x)
        return norm * norm


class AscendKernels(Kernels):
    """Fused kernels. `attention_dtype` None falls back to plain float32 attention; `ops` is replaced in tests."""

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

    def expert_mlp(self, activation: Activation) -> nn.Cell:
        if activation != "silu":
            return super().expert_mlp(activation)
        return _GroupedExpertMlp(self._ops.grouped_matmul, self._ops.swiglu)

    def expert_matmul(self, in_float32: bool = False) -> nn.Cell:
        return _GroupedMatMul(self._ops.grouped_matmul)

    def add_matmul(self) -> nn.Cell:
        return _AddMatMul(self._ops.addmm)

    def largest(self, count: int) -> nn.Cell:
        return _Largest(count)

    def rope_and_mask(self, rotary: np.ndarray | None, is_causal: bool = False) -> nn.Cell:
        if self._dtype is None:
            return super().rope_and_mask(rotary)
        return RopeOfOneRun(rotary) if is_causal else RopeAndHidden(rotary)

    def attention(
        self, heads: Heads, rotary: np.ndarray | None, is_causal: bool = False
    ) -> nn.Cell:
        if self._dtype is None:
            return super().attention(heads, rotary)
        made = FlashCausalAttention if is_causal else FlashPackedAttention
        return made(heads, self._ops, self._dtype)

    def context_inputs(self, rotary: np.ndarray | None, index: int) -> nn.Cell:
        if self._dtype is None:
            return super().context_inputs(rotary, index)
        return ContextHidden(rotary, index)

    def context_attention(
        self,
        heads: Heads,
        rotary: np.ndarray | None,
        index: int,
        gather: nn.Cell,
        scatter: nn.Cell,
        gathers_again: bool = False,
    ) -> nn.Cell:
        if self._dtype is None:
            return super().context_attention(heads, rotary, index, gather, scatter)
        return FlashContextAttention(heads, self._ops, self._dtype, gather)

    def prefill_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        if self._dtype is None:
            return super().prefill_attention(heads, keys, values)
        return FlashPrefillAttention(heads, self._ops, self._dtype, keys, values)

    def cached_angles(self, heads: Heads) -> nn.Cell:
        return super().cached_angles(heads) if self._dtype is None else _AnglesOfHeads(heads)

    def cached_attention(self, heads: Heads, keys: Any, values: Any) -> nn.Cell:
        if self._dtype is None:
            return super().cached_attention(heads, keys, values)
        return FlashCachedAttention(heads, self._ops, self._dtype, keys, values)

    def adamw_cell(self, beta1: float, beta2: float, eps: float, weight_decay: float) -> nn.Cell:
        return _AdamW(self._ops.adamw, beta1, beta2, eps, weight_decay)

    def adamw_inputs(self, numbers: AdamWNumbers) -> Sequence[Any]:
        # aclnnApplyAdamWV2 takes the number of steps before this one.
        return ms.mutable(float(numbers.lr)), Tensor([numbers.count - 1], ms.float32)

    def squares(self) -> nn.Cell:
        return _Squares(self._ops.norm)
