"""What AscendKernels calls is what the installed MindSpore has: arguments, dtypes, backward, kernels. On any machine.

Arguments are bound to the installed functions, dtypes compared with their docstrings, and the real operations compiled
for this processor: the compiler infers types and shapes and writes the backward before it refuses the first operation
that a processor has no kernel for. Does not prove what an Ascend device computes: its own checks come after that.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import ascend_doubles
import mindspore as ms
import numpy as np
import pytest
from ascend_doubles import DOUBLES, eager
from docstring_types import check_types
from mindspore import Parameter, Tensor, mint, nn, ops

from mindgrpo.backend.arithmetic.device import AdamWCell
from mindgrpo.backend.cpu.backend import CpuBackend
from mindgrpo.backend.kernels import ascend
from mindgrpo.backend.kernels.ascend import AscendKernels, AscendOps
from mindgrpo.backend.kernels.shapes import AdamWSettings, Heads
from mindgrpo.doctor.probes.kernel_cases import AttentionToCache

REAL = AscendOps()
NAMES = [field.name for field in fields(AscendOps)]
HEADS = Heads(4, 2, 16, has_bias=True, norm_eps=1e-6)
ROWS, LENGTH, SLOTS, DIM, PAGE = 2, 8, 3, 16, 16
KERNELS_OF_THE_PLUGIN = (
    "aclnnFlashAttentionScore",
    "aclnnFlashAttentionScoreGrad",
    "aclnnIncreFlashAttentionV4",
    "aclnnRmsNorm",
    "aclnnRmsNormGrad",
    "aclnnAddRmsNorm",
    "aclnnRotaryPositionEmbedding",
    "aclnnRotaryPositionEmbeddingGrad",
    "aclnnSwiGlu",
    "aclnnSwiGluGrad",
    "aclnnGroupedMatmulV4",
    "aclnnAddmm",
    "aclnnApplyAdamWV2",
    "aclnnLinalgVectorNorm",
)


@pytest.fixture(scope="module", autouse=True)
def backend() -> CpuBackend:
    return CpuBackend({})


def checked(name: str, calls: list[str]) -> Callable[..., Any]:
    """The double, each call of which has to be one that the installed function documents."""
    real, double = getattr(REAL, name), getattr(DOUBLES, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        check_types(real, inspect.signature(real).bind(*args, **kwargs).arguments)
        calls.append(name)
        return double(*args, **kwargs)

    return call


# -- the calls ----------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: Any = np.float32) -> Tensor:
    return Tensor(np.zeros(shape, dtype))


def cache() -> list[Parameter]:
    rows = SLOTS * HEADS.kv * 2 * PAGE
    return [Parameter(zeros(rows, HEADS.dim), f"cache{i}") for i in range(2)]


class Layer(nn.Cell):
    """Everything that training calls: packed rows between norms, and a gate."""

    def __init__(self, kernels: AscendKernels) -> None:
        super().__init__()
        rotary = np.zeros((LENGTH, 2 * HEADS.dim), np.float32)
        self.norm, self.add_norm = kernels.rms_norm(1e-6), kernels.add_rms_norm(1e-6)
        self.rope_and_mask = kernels.rope_and_mask(rotary)
        self.attention, self.glu = kernels.attention(HEADS, rotary), kernels.glu("silu")

    def construct(
        self, x: Any, weight: Any, bias: Any, q_norm: Any, k_norm: Any, positions: Any, spans: Any
    ) -> Any:
        context = self.rope_and_mask(positions, spans)
        x, normed = self.add_norm(x, self.norm(x, weight), weight)
        mixed = self.attention(normed, bias, q_norm, k_norm, *context)
        return self.glu(ops.concat((mixed, x), 1))


def layer_inputs() -> list[Tensor]:
    tokens, positions = ROWS * LENGTH, zeros(ROWS, LENGTH, dtype=np.int32)
    weights = [zeros(HEADS.width), zeros(HEADS.width), zeros(HEADS.dim), zeros(HEADS.dim)]
    return [
        zeros(tokens, HEADS.width),
        *weights,
        positions,
        zeros(ROWS, LENGTH, 3, dtype=np.int32),
    ]


def prefill(kernels: AscendKernels) -> Any:
    mask, source = zeros(1, 1, LENGTH, LENGTH), zeros(SLOTS * HEADS.kv, dtype=np.int32)
    rows = zeros(SLOTS * HEADS.kv, dtype=np.int32)
    context = (mask, zeros(ROWS * LENGTH, 1, 2 * HEADS.dim), source, rows)
    inputs = layer_inputs()
    return kernels.prefill_attention(HEADS, *cache())(inputs[0], *inputs[2:5], *context)


def decode(kernels: AscendKernels) -> Any:
    count = SLOTS * HEADS.kv
    mask, rows = zeros(count, 1, 2 * PAGE), zeros(count, dtype=np.int32)
    context = (mask, zeros(SLOTS, 1, 2 * HEADS.dim), rows, zeros(count, 2, dtype=np.int32))
    weights = layer_inputs()[2:5]
    cell = AttentionToCache(kernels, HEADS, *cache())
    return cell(zeros(SLOTS, HEADS.width), *weights, *context)


def project(kernels: AscendKernels) -> Any:
    return kernels.add_matmul()(zeros(HEADS.width), zeros(SLOTS, DIM), zeros(DIM, HEADS.width))


def train(kernels: AscendKernels) -> Any:
    return Layer(kernels)(*layer_inputs())


def optimize(kernels: AscendKernels) -> Any:
    weight, first, second = (Parameter(zeros(DIM), name) for name in ("weight", "first", "second"))
    settings = AdamWSettings(0.9, 0.95, 1e-8, 0.1)
    cell = AdamWCell(
        [(weight, Parameter(zeros(DIM), "gradient"), first, second, True)], settings, kernels
    )
    return cell(Tensor(1.0), *kernels.adamw_inputs(settings.at(1, 1e-3, 1.0)))


def norm(kernels: AscendKernels) -> Any:
    return kernels.squares()(zeros(ROWS, DIM))


class Gradient(nn.Cell):
    def __init__(self, cell: nn.Cell) -> None:
        super().__init__()
        self.cell, self.gradient = cell, ops.GradOperation(get_all=True)

    def construct(self, *inputs: Any) -> Any:
        return self.gradient(self.cell)(*inputs)


def backward(kernels: AscendKernels) -> Any:
    return Gradient(Layer(kernels))(*layer_inputs())


def expert_inputs() -> list[Tensor]:
    return [zeros(LENGTH, DIM), Tensor([3, 0], ms.int32), zeros(2, DIM, 8), zeros(2, 4, DIM)]


def experts(kernels: AscendKernels) -> Any:
    return kernels.expert_mlp("silu")(*expert_inputs())


def experts_backward(kernels: AscendKernels) -> Any:
    return Gradient(kernels.expert_mlp("silu"))(*expert_inputs())


CALLS = (train, prefill, decode, project, experts, optimize, norm)


def call_eagerly(table: AscendOps, dtype: str) -> None:
    with eager():
        for call in CALLS:
            call(AscendKernels(ops=table, attention_dtype=dtype))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_call_binds_to_the_installed_function_with_documented_types(dtype: str) -> None:
    calls: list[str] = []
    call_eagerly(AscendOps(**{name: checked(name, calls) for name in NAMES}), dtype)
    assert set(calls) == set(NAMES)


def test_a_dtype_that_is_not_documented_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ascend.ATTENTION_DTYPES, "float32", ms.float32)
    table = replace(DOUBLES, flash_attention_score=checked("flash_attention_score", []))
    with pytest.raises(AssertionError, match="query is {'float32'}, not {.*16"):
        call_eagerly(table, "float32")
    half, mask = zeros(1, 4, 32, dtype=np.float16), zeros(4, 4)
    arguments = {"query": half, "key": half, "value": half, "head_num": 2}
    check_types(REAL.flash_attention_score, arguments)
    for wrong in ({"attn_mask": mask}, {"key": zeros(1, 4, 32)}, {"head_num": 2.0}):
        with pytest.raises(AssertionError):
            check_types(REAL.flash_attention_score, arguments | wrong)
    with pytest.raises(AssertionError):
        check_types(REAL.rms_norm, {"x": half, "gamma": zeros(32), "epsilon": 1e-6})


def test_an_argument_that_the_installed_function_does_not_have_fails() -> None:
    def misspelt(*args: Any, attn_mask: Any, **kwargs: Any) -> Any:
        return checked("flash_attention_score", [])(*args, atten_mask=attn_mask, **kwargs)

    with pytest.raises(TypeError, match="unexpected keyword argument 'atten_mask'"):
        call_eagerly(replace(DOUBLES, flash_attention_score=misspelt), "float16")


@pytest.mark.parametrize("name", NAMES)
def test_doubles_have_the_arguments_of_the_installed_functions(name: str) -> None:
    real, double = getattr(REAL, name), getattr(ascend_doubles, name)
    home = mint if name in ("addmm", "norm") else ops
    home = ops.auto_generate if name == "grouped_matmul" else home
    is_primitive = name == "adamw" and isinstance(real, ops.auto_generate.AdamW)
    assert is_primitive or real is getattr(home, name)
    assert double is getattr(DOUBLES, name)
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (double, real)
    )
    assert ours == theirs


# -- the compiler -------------------------------------------------------------------------------------------------


def refusal(call: Callable[[AscendKernels], Any], table: AscendOps, dtype: str) -> str:
    with pytest.raises((RuntimeError, TypeError)) as caught:
        call(AscendKernels(ops=table, attention_dtype=dtype))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("call", [*CALLS, backward, experts_backward])
def test_the_compiler_refuses_only_that_this_is_no_ascend_device(
    call: Callable[[AscendKernels], Any],
) -> None:
    for dtype in ("float16", "bfloat16"):
        assert re.search(r"Unsupported op \[\w+\] on CPU", refusal(call, REAL, dtype))


def test_a_wrong_dtype_or_number_of_heads_is_refused_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other_heads(query: Any, key: Any, value: Any, head_num: int, **kwargs: Any) -> Any:
        return ops.flash_attention_score(query, key, value, 3, **kwargs)

    refused = refusal(train, replace(REAL, flash_attention_score=other_heads), "float16")
    assert "FlashAttentionScore" in refused and "Unsupported op" not in refused
    monkeypatch.setitem(ascend.ATTENTION_DTYPES, "float32", ms.float32)
    assert "[IncreFlashAttention], the input argument[key]" in refusal(decode, REAL, "float32")


def test_the_backward_is_that_of_the_fused_operations(tmp_path: Path) -> None:
    ms.set_context(save_graphs=1, save_graphs_path=str(tmp_path))
    try:
        refusal(backward, REAL, "bfloat16")
    finally:
        ms.set_context(save_graphs=0)
    text = "\n".join(path.read_text(errors="replace") for path in sorted(tmp_path.rglob("*.ir")))
    calls = {
        name: re.findall(rf"PrimFunc_{name}\((.*)", text)
        for name in (
            "FlashAttentionScoreGrad",
            "RmsNormGrad",
            "RotaryPositionEmbeddingGrad",
            "SwigluGrad",
        )
    }
    assert all(calls.values()), {name: len(lines) for name, lines in calls.items()}
    # Gradients of the angles are not asked for: the kernel would take at most 1024 rows then.
    assert all(", None, I64(0))" in line for line in calls["RotaryPositionEmbeddingGrad"])


def test_the_packages_ascend_plugin_names_their_kernels() -> None:
    plugin = Path(ms.__file__).parent / "lib/plugin/libmindspore_ops_ascend.so"
    if not plugin.exists():
        pytest.skip("this MindSpore comes without the Ascend plugin")
    content = plugin.read_bytes()
    missing = [name for name in KERNELS_OF_THE_PLUGIN if f"{name}\0".encode() not in content]
    assert missing == []
