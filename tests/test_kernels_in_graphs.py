"""What a kernel refuses inside one of MindSpore's graphs reaches the user in the kernel's own words."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from small_generators import WITH_C

from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.native import library
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.errors import UserError

pytestmark = WITH_C
ROWS = 3
SPANS_REFUSED = "kernel attention: span (2, 4, 4) of token 4 is not of its cluster"


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend({})


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
            graph(qkv, nothing, nothing, nothing, positions, Tensor(spans), Tensor(rotary))
        assert str(caught.value) == sentence


def test_a_call_says_its_own_error_and_not_that_of_a_graph_before(backend: CpuBackend) -> None:
    spans = np.zeros((1, 8, 3), np.int32)
    spans[0, 4:] = (2, 4, 4)
    nothing, heads = Tensor([0.0], ms.float32), Heads(1, 1, 2)
    rotary = np.zeros((16, 4), np.float32)
    attention = NativeKernels().attention(heads, rotary)
    qkv, positions = (
        Tensor(np.zeros((8, heads.width), np.float32)),
        Tensor(np.zeros((1, 8), np.int32)),
    )
    with pytest.raises(RuntimeError, match="AOT kernel"):
        attention(qkv, nothing, nothing, nothing, positions, Tensor(spans), Tensor(rotary))
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
