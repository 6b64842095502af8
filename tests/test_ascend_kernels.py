"""AscendKernels, with doubles for its fused operations, and the plain kernels agree: values, gradients, caches, tokens.

In float32 tightly, so that what is passed to the operations and made of their results is right, and in the dtypes of
the real ones to their rounding. Does not prove that an Ascend device computes what the doubles do, nor how fast.
test_ascend_calls.py holds the calls and the doubles to the installed package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from ascend_doubles import DOUBLES
from mindspore import Parameter, Tensor, nn, ops
from small_generators import assert_same, generator_with, random_weights, requests_of, run

from mindgrpo.algorithm.packing import MicroShape, micro_batches, pack
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels import ascend
from mindgrpo.backend.kernels.ascend import AscendKernels
from mindgrpo.backend.kernels.contract import NEVER, Heads, Kernels
from mindgrpo.backend.kernels.mindspore_ops import PlainKernels
from mindgrpo.errors import UserError

HEADS = [
    Heads(4, 2, 16),
    Heads(4, 4, 48, has_bias=True),
    Heads(6, 1, 32, has_bias=True, norm_eps=1e-6),
    Heads(2, 2, 64, norm_eps=1e-5, query_scale=0.3),
]
# Largest difference, as a share of the largest value.
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(autouse=True)
def float32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles compute in float32 as well, so that nothing hides behind float16's rounding."""
    monkeypatch.setitem(ascend.ATTENTION_DTYPES, "float32", ms.float32)


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    """Before anything is computed, as it sets the device."""
    return CpuBackend({}, "shared_memory")


@pytest.fixture
def eager(backend: CpuBackend) -> Iterator[None]:
    """Without compiling, which takes longer than all the rest; what is not eager here goes through graphs."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.GRAPH_MODE)


EAGER = pytest.mark.usefixtures("eager")


def fused(dtype: str | None = "float32") -> AscendKernels:
    return AscendKernels(ops=DOUBLES, attention_dtype=dtype)  # type: ignore[arg-type]


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def assert_close(ours: np.ndarray, plain: np.ndarray, tolerance: float) -> None:
    assert ours.shape == plain.shape and ours.dtype == plain.dtype
    assert np.abs(ours - plain).max() <= tolerance * max(1e-3, float(np.abs(plain).max()))


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


@EAGER
def test_norms_and_gates_agree() -> None:
    x, added, weight = floats(37, 48), floats(37, 48, seed=1), floats(48)
    for name, argument, inputs in (
        ("rms_norm", 1e-5, [x, weight]),
        ("add_rms_norm", 1e-5, [x, added, weight]),
        ("glu", "silu", [floats(37, 96)]),
        ("glu", "gelu_tanh", [floats(37, 96)]),
    ):
        cells = [getattr(kernels, name)(argument) for kernels in (fused(), PlainKernels())]
        assert_cells_agree(cells, inputs, 1e-5)


# -- packed rows --------------------------------------------------------------------------------------------------


class Packed(nn.Cell):
    def __init__(self, kernels: Kernels, heads: Heads, rotary: np.ndarray) -> None:
        super().__init__()
        self.rope_and_mask = kernels.rope_and_mask(rotary)
        self.attention = kernels.attention(heads, rotary)

    def construct(
        self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, spans: Any
    ) -> Any:
        one, other = self.rope_and_mask(positions, spans)
        return self.attention(qkv, bias, q_norm, k_norm, one, other)


def rotary_of(heads: Heads) -> np.ndarray:
    angles = np.outer(np.arange(80), 0.7 ** np.arange(heads.dim // 2))
    angles = np.concatenate([angles, angles], 1)
    return np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


def weights_of(heads: Heads) -> list[np.ndarray]:
    """bias, q_norm, k_norm"""
    nothing = np.zeros(1, np.float32)
    bias = floats(heads.width) if heads.has_bias else nothing
    return [bias, *(floats(heads.dim, seed=i) if heads.norm_eps else nothing for i in (1, 2))]


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


@EAGER
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_rows_agree_in_float32(heads: Heads) -> None:
    rotary = rotary_of(heads)
    cells = [Packed(kernels, heads, rotary) for kernels in (fused(), PlainKernels())]
    assert_cells_agree(cells, packed_inputs(heads), TOLERANCE["float32"])


@EAGER
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_packed_rows_agree_to_the_rounding_of_the_attention(dtype: str) -> None:
    heads = HEADS[2]
    rotary, inputs = rotary_of(heads), packed_inputs(heads)
    cells = [Packed(kernels, heads, rotary) for kernels in (fused(dtype), PlainKernels())]
    assert_cells_agree(cells, inputs, TOLERANCE[dtype])
    with pytest.raises(AssertionError):
        assert_cells_agree(cells, inputs, TOLERANCE["float32"])


def test_packed_rows_agree_in_a_graph() -> None:
    heads = HEADS[2]
    rotary = rotary_of(heads)
    cells = [Packed(kernels, heads, rotary) for kernels in (fused(), PlainKernels())]
    assert_cells_agree(cells, packed_inputs(heads), TOLERANCE["float32"])


@EAGER
def test_without_a_dtype_attention_is_the_plain_one() -> None:
    heads = HEADS[2]
    cells = [Packed(kernels, heads, rotary_of(heads)) for kernels in (fused(None), PlainKernels())]
    assert_cells_agree(cells, packed_inputs(heads), 0.0)


# -- prompts and caches -------------------------------------------------------------------------------------------


def caches(heads: Heads, slots: int, length: int, dtype: Any = ms.float32) -> list[Parameter]:
    rows = slots * heads.kv * length
    return [
        Parameter(Tensor(floats(rows, heads.dim, seed=i)).astype(dtype), f"cache{i}")
        for i in (1, 2)
    ]


def cached_results(
    kernels: Kernels, heads: Heads, dtype: Any = ms.float32
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Two prompts of 5 into slots 0, 2 and 3 of four, then a token of each slot: outputs, and the caches."""
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
    at = np.array([4, 0, 10, 7])
    mask = np.where(np.arange(length) <= at[:, None], 0.0, NEVER).astype(np.float32)
    decode = kernels.cached_attention(heads, *buffers)
    inputs = (mask[:, None], angles[at][:, None], (starts + at[:, None]).reshape(-1))
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


@EAGER
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_prompts_and_cached_tokens_agree(heads: Heads, dtype: str) -> None:
    (ours, our_caches), (plain, plain_caches) = (
        cached_results(kernels, heads) for kernels in (fused(dtype), PlainKernels())
    )
    for one, other in zip(ours, plain, strict=True):
        assert_close(one, other, TOLERANCE[dtype])
    for one, other in zip(our_caches, plain_caches, strict=True):
        assert_close(one, other, TOLERANCE["float32"])


def test_a_cache_may_have_the_dtype_of_the_attention() -> None:
    heads = HEADS[0]
    ours, our_caches = cached_results(fused("float16"), heads, ms.float16)
    plain, plain_caches = cached_results(PlainKernels(), heads)
    for one, other in zip(ours + our_caches, plain + plain_caches, strict=True):
        assert_close(one, other, TOLERANCE["float16"])


def test_a_generator_with_them_writes_the_same_tokens(backend: CpuBackend) -> None:
    weights = random_weights(backend)
    # Its heads are of 8, which no fused attention takes; the doubles do.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.backend.kernels.ascend_attention.DIM_STEP", 8)
        ours = run(generator_with(weights, backend, fused()), requests_of())
    assert_same(ours, run(generator_with(weights, backend, PlainKernels()), requests_of()))


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
