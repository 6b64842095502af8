"""What MindSpore's graphs make of kernels: each call that changes the generator's table runs once and in its place,
and what a kernel refuses reaches the user in the kernel's own words.

The graph compiler takes every operation for a pure function; native/rollout.h says what follows from that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from slots_by_hand import HIDDEN, Ranks
from small_generators import SETTINGS, WITH_C, generator_with, kernels_named, random_weights, run

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Heads
from mindgrpo.backend.kernels.native import library
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.rollout import NativeSlots
from mindgrpo.backend.kernels.rollout import GenerationBatch, KVCacheLayout
from mindgrpo.errors import UserError
from mindgrpo.rollout.embedded.engine import Request

pytestmark = WITH_C
ROWS = 3
SPANS_REFUSED = "kernel attention: span (2, 4, 4) of token 4 is not of its cluster"


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


class TwoCommits(nn.Cell):
    """Two tokens of every row; the second call takes what the first one gave only where `is_chained`."""

    def __init__(self, slots: NativeSlots, is_chained: bool) -> None:
        super().__init__()
        self.begin, self.commit, self.next = slots.begin(), slots.commit(), slots.commit()
        self.is_chained = is_chained

    def construct(self, ticket: Any, drawn: Any) -> Any:
        drawn = ops.depend(drawn, self.begin(ticket))
        x, left = self.commit(drawn)
        if self.is_chained:
            drawn = ops.depend(drawn, x)
        return left, self.next(drawn)[1]


def tokens_after(backend: CpuBackend, is_chained: bool) -> np.ndarray:
    """[ROWS, 2], 0 where no token was written."""
    slots = Ranks(SETTINGS, 50, 1, ROWS).slots[0]
    prompts = [np.ones(1, np.int32)] * ROWS
    job = GenerationBatch.of(prompts, range(ROWS), [2] * ROWS, np.zeros(ROWS, np.uint64))
    slots.start(job, KVCacheLayout(ROWS, 0, ROWS, 0))
    for row in range(ROWS):
        slots.enqueue(row, row)
    drawn = np.zeros((ROWS, HIDDEN + 2), np.float32)
    drawn[:, HIDDEN] = [20, 21, 22]
    graph = backend.graph(TwoCommits(slots, is_chained), "two commits")
    graph(Tensor([0], ms.int32), Tensor(drawn))
    return job.tokens


def test_of_two_equal_calls_both_run_if_the_second_takes_an_output_of_the_first(
    backend: CpuBackend,
) -> None:
    assert tokens_after(backend, is_chained=True).tolist() == [[20, 20], [21, 21], [22, 22]]


def test_two_equal_calls_without_that_are_merged_into_one(backend: CpuBackend) -> None:
    """Why the rule is there. If this fails, the compiler has learned better, and the rule may be dropped."""
    assert tokens_after(backend, is_chained=False).tolist() == [[20, 0], [21, 0], [22, 0]]


def test_every_step_of_the_decoding_graph_runs_once_where_all_steps_have_equal_values(
    backend: CpuBackend,
) -> None:
    """With weights of zero every kernel of every step gets the numbers that it got the step before."""
    weights = random_weights(backend)
    for target in weights.arrays.flat_buffers:
        target[...] = 0
    settings = replace(SETTINGS, stop_ids=())
    generator = generator_with(weights, backend, kernels_named("native"), settings, slots=4)
    completions = run(generator, [Request(np.ones(3, np.int32), (0, 1, 2))])
    assert [len(completion.tokens) for completion in completions] == [settings.max_tokens] * 3
    assert generator._decoder._slots.steps == (settings.max_tokens, 3 * settings.max_tokens)
    assert len({tuple(completion.tokens) for completion in completions}) == 3


def test_what_a_kernel_refuses_is_said_in_its_own_words(backend: CpuBackend) -> None:
    heads, rotary = Heads(1, 1, 2), np.zeros((16, 4), np.float32)
    spans = np.zeros((1, 8, 3), np.int32)
    spans[0, :, 2] = [0, 0, 0, 0, 4, 4, 4, 4]
    spans[0, 4:, :2] = (2, 4)
    nothing = Tensor([0.0], ms.float32)
    qkv = Tensor(np.zeros((8, heads.width), np.float32))
    for position, sentence in (
        (0, SPANS_REFUSED),
        (16, "kernel attention: position 16 of token 0 is not below the 16 rotary angles"),
    ):
        # A graph that has failed once does not run again.
        graph = backend.graph(NativeKernels().attention(heads, rotary), "attention")
        positions = Tensor(np.full((1, 8), position, np.int32))
        with pytest.raises(RuntimeError) as caught:
            graph(qkv, nothing, nothing, nothing, positions, Tensor(spans))
        assert str(caught.value) == sentence


def test_a_call_says_its_own_error_and_not_that_of_a_graph_before(backend: CpuBackend) -> None:
    spans = np.zeros((1, 8, 3), np.int32)
    spans[0, 4:] = (2, 4, 4)
    nothing, heads = Tensor([0.0], ms.float32), Heads(1, 1, 2)
    attention = NativeKernels().attention(heads, np.zeros((16, 4), np.float32))
    qkv, positions = (
        Tensor(np.zeros((8, heads.width), np.float32)),
        Tensor(np.zeros((1, 8), np.int32)),
    )
    with pytest.raises(RuntimeError, match="AOT kernel"):
        attention(qkv, nothing, nothing, nothing, positions, Tensor(spans))
    with pytest.raises(RuntimeError, match="^kernel square_sums: "):
        library.call_kernel("square_sums", np.ones(1, np.float32))
    assert str(library.kernel_error()) == SPANS_REFUSED


def test_memory_that_is_used_up_inside_a_graph_is_the_users_to_hear(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph_that_ends_with_a_number() -> None:
        raise RuntimeError("Return value from CPU AOT kernel is 2.")

    error = UserError("kernel attention: no memory for 8 bytes")
    monkeypatch.setattr(library, "kernel_error", lambda: error)
    with pytest.raises(UserError, match="no memory for 8 bytes"):
        backend.graph(graph_that_ends_with_a_number, "attention")()
