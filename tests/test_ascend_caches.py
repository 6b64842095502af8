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
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.embedded.pages import PageTable


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    """Before anything is computed, as it sets the device."""
    return CpuBackend({})


# Slots 0 and 3 have the second prompt and share its first page, slot 2 has the first prompt, slot 1 is free.
ROOM, PROMPT, PARTS = KVCacheConfig(4, 4, None, 21, 20), 21, ([2], [0, 3])


def caches(heads: Heads, dtype: Any = ms.float32) -> list[Parameter]:
    rows = ROOM.pages * ROOM.page_size * heads.kv
    return [
        Parameter(Tensor(floats(rows, heads.dim, seed=i)).astype(dtype), f"cache{i}")
        for i in (1, 2)
    ]


def cached_results(
    kernels: Kernels,
    heads: Heads,
    dtype: Any = ms.float32,
    at: tuple[int, ...] = (39, 0, 20, 27),
    read: int = 48,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Prompts of 21 and 19 tokens, then a token of each slot at `at`: outputs, and all pages but the spare one."""
    table, buffers = PageTable(ROOM, heads.kv), caches(heads, dtype)
    copies = []
    for index, (slots, length) in enumerate(zip(PARTS, (PROMPT, PROMPT - 2), strict=True)):
        table.enter(slots, length, [20] * len(slots))
        copies.append(table.prompt_copies(index, PROMPT, length, slots))
    source, rows = (Tensor(np.concatenate(own)) for own in zip(*copies, strict=True))
    angles, weights = rotary_of(heads), [Tensor(x) for x in weights_of(heads)]
    causal = np.where(np.tril(np.ones((PROMPT, PROMPT))), 0.0, NEVER).astype(np.float32)
    prompt_angles = np.tile(angles[:PROMPT, None], (2, 1, 1))
    inputs = Tensor(causal[None, None]), Tensor(prompt_angles), source, rows
    prefill = kernels.prefill_attention(heads, *buffers)
    outs = [prefill(Tensor(floats(2 * PROMPT, heads.width)), *weights, *inputs)]
    columns = np.array(at)
    mask = np.where(np.arange(read) <= columns[:, None], 0.0, NEVER).astype(np.float32)
    inputs = (
        Tensor(np.repeat(mask[:, None], heads.kv, 0)),
        Tensor(angles[columns][:, None]),
        Tensor(table.cache_rows(np.arange(4), columns)),
        Tensor(table.pages(np.arange(4), read)),
    )
    decode = AttentionToCache(kernels, heads, *buffers)
    outs.append(decode(Tensor(floats(4, heads.width, seed=3)), *weights, *inputs))
    spare = ROOM.page_size * heads.kv
    stored = [buffer.asnumpy().astype(np.float32)[spare:] for buffer in buffers]
    return [out.asnumpy() for out in outs], stored


# Every shape of heads, and every dtype: none of the shapes has more to do in one dtype than in another.
@eager()
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [*((heads, "float32") for heads in HEADS), (HEADS[2], "float16"), (HEADS[2], "bfloat16")],
    ids=str,
)
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
    heads, at = HEADS[2], (19, 0, 20, 27)
    (part, part_caches), (whole, whole_caches) = (
        cached_results(make(), heads, at=at, read=read) for read in (32, 48)
    )
    for one, other in zip(part + part_caches, whole + whole_caches, strict=True):
        assert_close(one, other, 1e-6)
    cut, _ = cached_results(make(), heads, at=at, read=16)
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
    # Slots that are read no further than the longest sample in them.
    reads: set[int] = set()

    def read_length(length: int, position: int) -> int:
        reads.add(min(length, position // 4 * 4 + 4))
        return min(length, position // 4 * 4 + 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.rollout.embedded.plain.read_length", read_length)
        patch.setattr("mindgrpo.rollout.embedded.kv_cache.LANES", 4)
        assert_same(run(generator_with(weights, backend, Kernels(), slots=8), requests_of()), plain)
    assert len(reads) > 1
