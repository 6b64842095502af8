"""AscendKernels, with doubles for its fused operations, and the plain kernels agree: values and gradients.

In float32 tightly, so that what is passed to the operations and made of their results is right, and in the dtypes of
the real ones to their rounding. Does not prove that an Ascend device computes what the doubles do, nor how fast.
test_ascend_caches.py is of the generator; test_ascend_calls.py compares calls and doubles with the installed package.
"""

from __future__ import annotations

from typing import Any

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
from mindspore import Tensor, nn, ops

from mindgrpo.algorithm.packing import MicroShape, micro_batches, pack
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.doctor.probes.kernel_cases import AttentionOfRows
from mindgrpo.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    """Before anything is computed, as it sets the device."""
    return CpuBackend({})


class Gradient(nn.Cell):
    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell = cell
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)

    def construct(self, *inputs: Any) -> Any:
        return self.gradient(self.cell)(*inputs)


def assert_cells_agree(cells: list[nn.Cell], inputs: list[np.ndarray], tolerance: float) -> None:
    """Two cells: their outputs, and their gradients with regard to float32 inputs."""
    results: list[list[np.ndarray]] = []
    for cell in cells:
        tensors = [Tensor(x) for x in inputs]
        made = cell(*tensors)
        outs = list(made) if isinstance(made, tuple) else [made]
        sens = [Tensor(floats(*out.shape, seed=i)) for i, out in enumerate(outs)]
        grads = Gradient(cell)(*tensors, tuple(sens) if len(sens) > 1 else sens[0])
        pairs = zip(grads, inputs, strict=True)
        outs += [grad for grad, x in pairs if x.dtype == np.float32]
        results.append([out.asnumpy() for out in outs])
    for ours, plain in zip(*results, strict=True):
        assert_close(ours, plain, tolerance)


@eager()
def test_norms_and_gates_agree() -> None:
    x, added, weight = floats(37, 48), floats(37, 48, seed=1), floats(48)
    for name, argument, inputs in (
        ("rms_norm", 1e-5, [x, weight]),
        ("add_rms_norm", 1e-5, [x, added, weight]),
        ("glu", "silu", [floats(37, 96)]),
        ("glu", "gelu_tanh", [floats(37, 96)]),
    ):
        cells = [getattr(kernels, name)(argument) for kernels in (fused(), Kernels())]
        assert_cells_agree(cells, inputs, 1e-5)


@eager()
def test_experts_agree_with_rows_behind_them_and_an_expert_without_any() -> None:
    counts = np.array([5, 0, 9], np.int32)
    x = floats(20, 16)
    x[14:] = 0.0
    inputs = [x, counts, floats(3, 16, 24), floats(3, 12, 16)]
    cells = [kernels.expert_mlp("silu") for kernels in (fused(), Kernels())]
    assert_cells_agree(cells, inputs, TOLERANCE["float32"])
    cells = [kernels.expert_matmul() for kernels in (fused(), Kernels())]
    ours, plain = (cell(*map(Tensor, (x, inputs[2], counts))).asnumpy() for cell in cells)
    assert not ours[14:].any() and not plain[14:].any()
    assert_cells_agree(cells, [x[:14], inputs[2], counts], TOLERANCE["float32"])


# -- packed rows --------------------------------------------------------------------------------------------------


class Groups:
    """What packing reads of a rollout: groups of completions, some of one token, that share prompts."""

    def __init__(self, sizes: list[tuple[int, list[int]]]) -> None:
        self.group_ids = [i for i, (_, own) in enumerate(sizes) for _ in own]
        self.prompt_ids = [np.ones(prompt, np.int32) for prompt, own in sizes for _ in own]
        self.completion_ids = [np.ones(n, np.int32) for _, own in sizes for n in own]
        self.completion_lengths = np.array([n for _, own in sizes for n in own])
        self.action_mask = [np.ones(n, bool) for _, own in sizes for n in own]

    def __len__(self) -> int:
        return len(self.group_ids)


def packed_inputs(heads: Heads) -> list[np.ndarray]:
    """Two rows of 40 as packing.py makes them: shared prompts, a group that is split, lone samples, padding."""
    rollout: Any = Groups([(7, [9, 5, 1]), (3, [12, 12, 12]), (5, [8]), (1, [4, 3])])
    shape = MicroShape(2, 40)
    batch = micro_batches(rollout, pack(rollout, range(len(rollout)), shape), shape, 1, 0)[0]
    assert (batch.spans[:, :, 1] > 0).any() and (batch.spans[:, -1, 2] == 39).any()
    qkv = floats(batch.positions.size, heads.width)
    return [qkv, *weights_of(heads), batch.positions, batch.spans]


@eager()
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_rows_agree_in_float32(heads: Heads) -> None:
    rotary = rotary_of(heads)
    cells = [AttentionOfRows(kernels, heads, rotary) for kernels in (fused(), Kernels())]
    assert_cells_agree(cells, packed_inputs(heads), TOLERANCE["float32"])


@eager()
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_rows_of_one_sample_agree_without_a_mask_of_their_size(heads: Heads) -> None:
    """What comes after a sample is of no use and of no effect; its last token is no input."""
    rollout: Any = Groups([(7, [33]), (5, [8])])
    shape = MicroShape(2, 40, 1)
    batch = micro_batches(rollout, pack(rollout, range(2), shape), shape, 1, 0)[0]
    qkv, rotary, used = floats(80, heads.width), rotary_of(heads), np.zeros(80, bool)
    used[:39] = used[40:52] = True
    inputs = [qkv, *weights_of(heads), batch.positions, batch.spans]
    sens = floats(80, heads.queries * heads.dim, seed=1) * used[:, None].astype(np.float32)
    found = []
    for kernels in (fused(), Kernels()):
        cell = AttentionOfRows(kernels, heads, rotary, is_causal=True)
        tensors = [Tensor(x) for x in inputs]
        gradients = Gradient(cell)(*tensors, Tensor(sens))[:4]
        found.append([cell(*tensors).asnumpy()[used], *(one.asnumpy() for one in gradients)])
    for ours, plain in zip(*found, strict=True):
        assert_close(ours, plain, TOLERANCE["float32"])


@eager()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_rows_agree_to_the_rounding_of_the_attention(dtype: str) -> None:
    heads = HEADS[2]
    rotary, inputs = rotary_of(heads), packed_inputs(heads)
    cells = [AttentionOfRows(kernels, heads, rotary) for kernels in (fused(dtype), Kernels())]
    assert_cells_agree(cells, inputs, TOLERANCE[dtype])
    with pytest.raises(AssertionError):
        assert_cells_agree(cells, inputs, TOLERANCE["float32"])


def test_packed_rows_agree_in_a_graph() -> None:
    heads = HEADS[2]
    rotary = rotary_of(heads)
    cells = [AttentionOfRows(kernels, heads, rotary) for kernels in (fused(), Kernels())]
    assert_cells_agree(cells, packed_inputs(heads), TOLERANCE["float32"])


@eager()
def test_without_a_dtype_attention_is_the_plain_one() -> None:
    heads = HEADS[2]
    cells = [
        AttentionOfRows(kernels, heads, rotary_of(heads)) for kernels in (fused(None), Kernels())
    ]
    assert_cells_agree(cells, packed_inputs(heads), 0.0)


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heads, match",
    [
        (Heads(2, 2, 24), "head_dim is 24, but fused attention takes a multiple of 16 up to 512"),
        (Heads(2, 2, 528), "head_dim is 528"),
        (Heads(512, 16, 16), "query heads is 512"),
        (Heads(128, 1, 16), "query heads a key head is 128"),
    ],
)
def test_heads_that_no_fused_attention_takes_are_the_users_to_hear(
    heads: Heads, match: str
) -> None:
    with pytest.raises(UserError, match=match):
        fused("float16").attention(heads, rotary_of(heads))


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="attention_dtype 'float64' is none of"):
        fused("float64")
