"""Doubles of the fused operations that AscendKernels calls: MindSpore's plain operations, from the documented formulas.

Same arguments as the installed functions (test_ascend_calls.py compares them). They compute in float32 and round to the
dtype of their first input, as the kernels do, but not in their order of sums; float32 itself goes through unrounded,
which the real attentions refuse. What mindgrpo never asks for is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from mindgrpo.backend.kernels.ascend import AscendKernels, AscendOps
from mindgrpo.backend.kernels.shapes import Heads

FAR = 2147483647
NEVER = -1e30


def mixed(
    query: Any, key: Any, value: Any, hidden: Any, scale: float, layout: str, heads: tuple[int, int]
) -> Any:
    """Softmax(Mask(scale * q k^T)) v, in the shape and dtype of the query; `hidden` broadcasts to [B, 1, S1, S2]."""
    queries, kv = heads
    q, k, v = query.astype(ms.float32), key.astype(ms.float32), value.astype(ms.float32)
    if layout == "BSH":
        batch, own, others = q.shape[0], q.shape[1], k.shape[1]
        q = q.reshape(batch, own, queries, -1).transpose(0, 2, 1, 3)
        k = k.reshape(batch, others, kv, -1).transpose(0, 2, 1, 3)
        v = v.reshape(batch, others, kv, -1).transpose(0, 2, 1, 3)
    # Query head h uses key head h // (queries / kv).
    k, v = ops.repeat_elements(k, queries // kv, 1), ops.repeat_elements(v, queries // kv, 1)
    scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) * scale
    if hidden is not None:
        scores = scores + hidden.astype(ms.float32) * NEVER
    out = ops.matmul(ops.softmax(scores, -1), v)
    if layout == "BSH":
        out = out.transpose(0, 2, 1, 3)
    return out.reshape(query.shape).astype(query.dtype)


def flash_attention_score(
    query,
    key,
    value,
    head_num,
    real_shift=None,
    drop_mask=None,
    padding_mask=None,
    attn_mask=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    keep_prob=1.0,
    scalar_value=1.0,
    pre_tokens=FAR,
    next_tokens=FAR,
    inner_precise=0,
    input_layout="BSH",
    sparse_mode=0,
):
    """`sparse_mode` 1: the whole mask, [B, 1, S1, S2] or [S1, S2], True is discarded; the band is not looked at.

    2: causal from the first column on, whose mask is a triangle [2048, 2048].
    """
    if input_layout != "BSH" or sparse_mode not in (1, 2) or keep_prob != 1.0:
        raise ValueError("the double takes layout BSH and sparse_mode 1 or 2, without dropout")
    if sparse_mode == 2:
        if tuple(attn_mask.shape) != (2048, 2048):
            raise ValueError("a compressed mask is [2048, 2048]")
        attn_mask = attn_mask[: query.shape[1], : key.shape[1]]
    kv = key.shape[2] // (query.shape[2] // head_num)
    return mixed(query, key, value, attn_mask, scalar_value, input_layout, (head_num, kv))


def incre_flash_attention(
    query,
    key,
    value,
    attn_mask=None,
    actual_seq_lengths=None,
    pse_shift=None,
    dequant_scale1=None,
    quant_scale1=None,
    dequant_scale2=None,
    quant_scale2=None,
    quant_offset2=None,
    antiquant_scale=None,
    antiquant_offset=None,
    block_table=None,
    num_heads=1,
    input_layout="BSH",
    scale_value=1.0,
    num_key_value_heads=0,
    block_size=0,
    inner_precise=1,
    kv_padding_size=None,
):
    """query [B, N, 1, D], keys and values in blocks [blocks, kv, block_size, D], table [B, S / block_size], mask
    [B, 1, S]; of equal actual lengths no more is read. Limits as CANN's page of the kernel has them."""
    if input_layout != "BNSD" or len(key) != 1 or len(value) != 1 or query.shape[2] != 1:
        raise ValueError("the double takes layout BNSD and one token of each sample")
    if len(actual_seq_lengths) != query.shape[0] or len(set(actual_seq_lengths)) != 1:
        raise ValueError("the double takes one length for all samples")
    batch, count = block_table.shape
    _, kv, size, dim = key[0].shape
    read = actual_seq_lengths[0]
    if size != block_size or size % 16 or not 0 < size <= 512 or count < -(-read // size):
        raise ValueError(f"blocks of {size} positions, {count} of them for {read}")
    if batch != query.shape[0] or attn_mask.shape[-1] < count * size:
        raise ValueError("a row of the table and of the mask for each sample, up to its last block")

    def of_samples(cache: Any) -> Any:
        # Processors gather no bfloat16.
        taken = ops.gather(cache.astype(ms.float32), block_table.reshape(-1), 0)
        taken = taken.reshape(batch, count, kv, size, dim)
        return taken.transpose(0, 2, 1, 3, 4).reshape(batch, kv, count * size, dim)[:, :, :read]

    hidden = ops.expand_dims(attn_mask, 1)[:, :, :, :read]
    keys, values, heads = of_samples(key[0]), of_samples(value[0]), (num_heads, num_key_value_heads)
    return mixed(query, keys, values, hidden, scale_value, input_layout, heads)


def rms_norm(x, gamma, epsilon=1e-6):
    """-> the norm in x's dtype, the reciprocal root float32."""
    wide = x.astype(ms.float32)
    root = ops.rsqrt((wide * wide).mean(-1, keep_dims=True) + epsilon)
    return (wide * root * gamma.astype(ms.float32)).astype(x.dtype), root


def add_rms_norm(x1, x2, gamma, epsilon=1e-6):
    """-> the norm of the sum, the reciprocal root float32, the sum."""
    total = x1 + x2
    normed, root = rms_norm(total, gamma, epsilon)
    return normed, root, total


def rotary_position_embedding(x, cos, sin, mode=0):
    """x [S, 1, N, D] with cos and sin [S, 1, 1, D] or as x; mode 0: x cos + (-second half, first half) sin."""
    if mode != 0 or len(x.shape) != 4 or cos.shape not in ((x.shape[0], 1, 1, x.shape[3]), x.shape):
        raise ValueError("the double turns halves, of layout SBND with S11D or SBND")
    half = x.shape[3] // 2
    turned = ops.concat((-x[:, :, :, half:], x[:, :, :, :half]), 3)
    return x * cos + turned * sin


def swiglu(input, dim=-1):
    first, second = ops.split(input, input.shape[dim] // 2, dim)
    return first * ops.sigmoid(first) * second


def grouped_matmul(
    x,
    weight,
    bias=None,
    scale=None,
    offset=None,
    antiquant_scale=None,
    antiquant_offset=None,
    group_list=None,
    split_item=0,
    group_type=-1,
    transpose_a=False,
    transpose_b=False,
):
    """x [M, K] with weight [E, K, N] by group: `group_list` int64 [E] are the rows' ends, the last of which is M."""
    extras = (bias, scale, offset, antiquant_scale, antiquant_offset)
    if (split_item, group_type, transpose_a, transpose_b) != (3, 0, False, False) or any(
        own is not None for own in extras
    ):
        raise ValueError("the double takes split_item 3 and group_type 0, which has a backward")
    (rows,), (matrices,) = x, weight
    if rows.dtype != matrices.dtype or group_list.dtype != ms.int64:
        raise TypeError("rows and matrices are of one dtype, ends int64")
    ends = group_list.astype(ms.float32)
    starts = ops.concat((ops.zeros_like(ends[:1]), ends[:-1]), 0)
    numbers = Tensor(np.arange(rows.shape[0], dtype=np.float32)[:, None])
    mine = ops.logical_and(numbers >= starts, numbers < ends).astype(ms.float32)
    out = 0.0
    for e in range(matrices.shape[0]):
        own = ops.matmul(rows.astype(ms.float32), matrices[e].astype(ms.float32))
        out = out + own * mine[:, e : e + 1]
    return (out.astype(rows.dtype),)


def addmm(input, mat1, mat2, *, beta=1, alpha=1):
    if (beta, alpha) != (1, 1):
        raise ValueError("the double has no factors")
    product = ops.matmul(mat1.astype(ms.float32), mat2.astype(ms.float32))
    return (input.astype(ms.float32) + product).astype(mat1.dtype)


def adamw(
    var, m, v, max_v, gradient, step, lr, beta1, beta2, decay, eps, amsgrad=False, maximize=False
):
    """In place, with `step` the steps before this one; as documented but for the third moment."""
    if amsgrad or maximize:
        raise ValueError("the double has no AMSGrad and does not maximize")
    kept = var * (1.0 - lr * decay)
    count = step + 1.0
    first = m * beta1 + gradient * (1.0 - beta1)
    second = v * beta2 + gradient * gradient * (1.0 - beta2)
    root = ops.sqrt(second / (1.0 - ops.pow(beta2, count))) + eps
    moved = kept - lr * (first / (1.0 - ops.pow(beta1, count))) / root
    done = ops.depend(ops.assign(m, first), moved)
    done = ops.depend(ops.assign(v, second), done)
    return ops.depend(ops.assign(var, moved), done)


def norm(input, p="fro", dim=None, keepdim=False, *, dtype=None):
    if (p, dim, keepdim, dtype) != ("fro", None, False, None):
        raise ValueError("the double is the 2-norm of all")
    return ops.sqrt((input * input).sum())


DOUBLES = AscendOps(
    flash_attention_score,
    incre_flash_attention,
    rms_norm,
    add_rms_norm,
    rotary_position_embedding,
    swiglu,
    grouped_matmul,
    addmm,
    adamw,
    norm,
)


# -- what the tests with doubles have in common ---------------------------------------------------------------------

HEADS = [
    Heads(4, 2, 16),
    Heads(4, 4, 48, has_bias=True),
    Heads(6, 1, 32, has_bias=True, norm_eps=1e-6),
    Heads(2, 2, 64, norm_eps=1e-5, query_scale=0.3),
]
# Largest difference, as a share of the largest value.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@contextmanager
def eager() -> Iterator[None]:
    """Without compiling, which takes longer than all the rest; what is not eager goes through graphs."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=ms.GRAPH_MODE)


def fused(dtype: str | None = "float32") -> AscendKernels:
    """AscendKernels with doubles; with float32, which real ones refuse, nothing hides behind float16's rounding."""
    kernels = AscendKernels(ops=DOUBLES, attention_dtype=None if dtype == "float32" else dtype)
    if dtype == "float32":
        kernels._dtype = ms.float32
    return kernels


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def assert_close(ours: np.ndarray, plain: np.ndarray, tolerance: float) -> None:
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert np.abs(ours - plain).max() <= tolerance * max(1e-3, float(np.abs(plain).max()))


def rotary_of(heads: Heads) -> np.ndarray:
    angles = np.outer(np.arange(80), 0.7 ** np.arange(heads.dim // 2))
    angles = np.concatenate([angles, angles], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def weights_of(heads: Heads) -> list[np.ndarray]:
    """bias, q_norm, k_norm"""
    nothing = np.zeros(1, np.float32)
    bias = floats(heads.width) if heads.has_bias else nothing
    return [bias, *(floats(heads.dim, seed=i) if heads.norm_eps else nothing for i in (1, 2))]
