"""The generator's attentions of AscendKernels, with doubles, and the plain ones: outputs, caches, whole completions.

Does not prove more than test_ascend_kernels.py does: nothing of an Ascend device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from ascend_doubles import (
    HEADS,
    TOLERANCE,
    assert_close,
    eager,
    floats,
    fused,
    rotary_of,
    weights_of,
)
from mindspore import Parameter, Tensor
from small_generators import assert_same, generator_with, random_weights, requests_of, run

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import NEVER, Heads
from mindgrpo.doctor.probes.kernel_cases import AttentionToCache


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    """Before anything is computed, as it sets the device."""
    return CpuBackend({})


def caches(heads: Heads, slots: int, length: int, dtype: Any = ms.float32) -> list[Parameter]:
    rows = slots * heads.kv * length
    return [
        Parameter(Tensor(floats(rows, heads.dim, seed=i)).astype(dtype), f"cache{i}")
        for i in (1, 2)
    ]


def cached_results(
    kernels: Kernels,
    heads: Heads,
    dtype: Any = ms.float32,
    at: tuple[int, ...] = (4, 0, 10, 7),
    read: int = 11,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Two prompts of 5 into slots 0, 2 and 3 of four, then a token of each slot at `at`: outputs, and the caches."""
    slots, length, prompt = 4, 11, 5
    buffers = caches(heads, slots, length, dtype)
    angles, weights = rotary_of(heads), [Tensor(x) for x in weights_of(heads)]
    starts = np.arange(slots * heads.kv).reshape(slots, heads.kv) * length
    causal = np.where(np.tril(np.ones((prompt, prompt))), 0.0, NEVER).astype(np.float32)
    prompt_angles = np.tile(angles[:prompt, None], (2, 1, 1))
    rows = (starts[[0, 2, 3]][:, :, None] + np.arange(prompt)).reshape(-1)
    prefill = kernels.prefill_attention(heads, *buffers)
    outs = [
        prefill(
            Tensor(floats(2 * prompt, heads.width)),
            *weights,
            Tensor(causal[None, None]),
            Tensor(prompt_angles),
            Tensor([1, 0, 1], ms.int32),
            Tensor(rows.astype(np.int32)),
        )
    ]
    columns = np.array(at)
    mask = np.where(np.arange(length) <= columns[:, None], 0.0, NEVER).astype(np.float32)
    decode = AttentionToCache(kernels, heads, *buffers, read)
    inputs = (mask[:, None], angles[columns][:, None], (starts + columns[:, None]).reshape(-1))
    mask, at_angles, at_rows = inputs
    outs.append(
        decode(
            Tensor(floats(slots, heads.width, seed=3)),
            *weights,
            Tensor(mask),
            Tensor(at_angles),
            Tensor(at_rows.astype(np.int32)),
        )
    )
    stored = [buffer.asnumpy().astype(np.float32) for buffer in buffers]
    return [out.asnumpy() for out in outs], stored


@eager()
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prompts_and_cached_tokens_agree(heads: Heads, dtype: str) -> None:
    (ours, our_caches), (plain, plain_caches) = (
        cached_results(kernels, heads) for kernels in (fused(dtype), Kernels())
    )
    for one, other in zip(ours, plain, strict=True):
        assert_close(one, other, TOLERANCE[dtype])
    for one, other in zip(our_caches, plain_caches, strict=True):
        assert_close(one, other, TOLERANCE["float32"])


@eager()
@pytest.mark.parametrize("make", [Kernels, fused])
def test_what_is_not_read_of_a_cache_changes_nothing(make: Callable[[], Kernels]) -> None:
    heads = HEADS[2]
    (part, part_caches), (whole, whole_caches) = (
        cached_results(make(), heads, at=(4, 0, 7, 7), read=read) for read in (8, 11)
    )
    for one, other in zip(part + part_caches, whole + whole_caches, strict=True):
        assert_close(one, other, 1e-6)
    cut, _ = cached_results(make(), heads, at=(4, 0, 7, 7), read=7)
    assert np.abs(cut[1][2:] - whole[1][2:]).max() > 1e-3


def test_a_cache_may_have_the_dtype_of_the_attention() -> None:
    heads = HEADS[0]
    ours, our_caches = cached_results(fused("float16"), heads, ms.float16)
    plain, plain_caches = cached_results(Kernels(), heads)
    for one, other in zip(ours + our_caches, plain + plain_caches, strict=True):
        assert_close(one, other, TOLERANCE["float16"])


def test_a_generator_with_them_writes_the_same_tokens(backend: CpuBackend) -> None:
    weights = random_weights(backend)
    plain = run(generator_with(weights, backend, Kernels()), requests_of())
    # Its heads are of 8, which no fused attention takes; the doubles do.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.backend.kernels.ascend.DIM_STEP", 8)
        assert_same(run(generator_with(weights, backend, fused()), requests_of()), plain)
    # Caches that are read no further than the longest sample in them.
    reads: set[int] = set()

    def read_length(length: int, position: int) -> int:
        reads.add(min(length, position // 4 * 4 + 4))
        return min(length, position // 4 * 4 + 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.rollout.embedded.plain.read_length", read_length)
        assert_same(run(generator_with(weights, backend, Kernels(), slots=8), requests_of()), plain)
    assert len(reads) > 1
