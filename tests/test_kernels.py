"""C kernels and MindSpore's own operations agree, values and gradients, on ragged rows with shared prompts.

Does not prove that either is right: test_golden_models.py holds whole models to transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import library_path
from mindgrpo.backend.kernels.shapes import Heads, Vocabulary
from mindgrpo.doctor.probes.kernel_cases import AttentionOfRows
from mindgrpo.models.decoder_config import DecoderConfig
from mindgrpo.models.rotary import rotary_table

pytestmark = pytest.mark.skipif(library_path() is None, reason="no C compiler on this machine")

HEADS = [
    Heads(4, 2, 16),
    Heads(4, 4, 48, has_bias=True),
    Heads(6, 1, 20, has_bias=True, norm_eps=1e-6),
    Heads(2, 2, 64, norm_eps=1e-6),
]


def config(dim: int) -> DecoderConfig:
    class Config:
        head_dim, rope_theta, rope_scaling, latent = dim, 10000.0, None, None

    return Config()  # type: ignore[return-value]


class Graph(nn.Cell):
    """(outputs, gradients of sum(output * sensitivity) with regard to float inputs)."""

    def __init__(self, cell: nn.Cell, num_floats: int) -> None:
        super().__init__()
        self.cell = cell
        self.gradient = ops.GradOperation(get_all=True, sens_param=True)
        self.floats = num_floats

    def construct(self, *inputs: Any) -> Any:
        return self.gradient(self.cell)(*inputs)


def both(
    make: Callable[[Kernels], nn.Cell], inputs: list[np.ndarray], seed: int = 0, outputs: int = 1
) -> list[tuple[list[np.ndarray], list[np.ndarray]]]:
    """(outputs, gradients) of the native and of the plain cell."""
    results = []
    for kernels in (NativeKernels(), Kernels()):
        cell = make(kernels)
        tensors = [Tensor(x) for x in inputs]
        out = cell(*tensors)
        out = out if isinstance(out, tuple) else (out,)
        rng = np.random.default_rng(seed)
        sens = [Tensor(rng.normal(size=o.shape).astype(np.float32)) for o in out[:outputs]]
        gradients = Graph(cell, 0)(*tensors, sens[0] if len(sens) == 1 else tuple(sens))
        floats = [
            g.asnumpy() for g, x in zip(gradients, inputs, strict=False) if x.dtype == np.float32
        ]
        results.append(([o.asnumpy() for o in out], floats))
    return results


def assert_same(results: list[tuple[list[np.ndarray], list[np.ndarray]]], tolerance: float) -> None:
    for ours, plain in zip(
        results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True
    ):
        scale = max(1e-3, float(np.abs(plain).max()))
        assert np.abs(ours - plain).max() <= tolerance * scale


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def test_norms_gate_and_rows_by_index_agree() -> None:
    x, added, weight = floats(37, 48), floats(37, 48, seed=1), floats(48)
    assert_same(both(lambda k: k.rms_norm(1e-6), [x, weight]), 1e-5)
    assert_same(both(lambda k: k.add_rms_norm(1e-6), [x, added, weight], outputs=2), 1e-5)
    # MindSpore's sigmoid on CPU is off by up to 1e-5.
    assert_same(both(lambda k: k.glu("silu"), [floats(37, 96)]), 3e-5)
    tokens = np.random.default_rng(0).integers(-5, 60, 31).astype(np.int32)
    results = both(lambda k: k.embedding(7), [tokens, floats(40, 16)])
    assert_same(results, 1e-6)


def ragged_rows(seed: int, rows: int = 2, length: int = 70) -> tuple[np.ndarray, np.ndarray]:
    """positions and spans of random groups that share a prompt, of lone runs, and of padding."""
    rng = np.random.default_rng(seed)
    positions = np.zeros((rows, length), np.int32)
    spans = np.zeros((rows, length, 3), np.int32)
    spans[:, :, 2] = np.arange(length)
    for row in range(rows):
        at = 0
        while True:
            prompt, own = int(rng.integers(1, 12)), rng.integers(0, 20, rng.integers(1, 4))
            if at + prompt + own.sum() > length - int(rng.integers(0, 5)):
                break
            start = at
            spans[row, at : at + prompt] = (0, 0, at)
            positions[row, at : at + prompt] = np.arange(prompt)
            at += prompt
            for count in own:
                spans[row, at : at + count] = (start, prompt, at)
                positions[row, at : at + count] = prompt + np.arange(count)
                at += count
    return positions, spans


@pytest.mark.parametrize(("heads", "seed"), [(own, i % 2) for i, own in enumerate(HEADS)], ids=str)
def test_attention_agrees_on_shared_prompts_runs_and_padding(heads: Heads, seed: int) -> None:
    positions, spans = ragged_rows(seed)
    rotary = rotary_table(config(heads.dim), 80)
    inputs = attention_inputs(heads, seed, positions, spans)
    results = both(partial(AttentionOfRows, heads=heads, rotary=rotary), inputs)
    assert_same(results, 3e-5)
    # With angles in the place of positions, the same numbers.
    inputs[4] = rotary[positions]
    of_angles = both(partial(AttentionOfRows, heads=heads, rotary=None), inputs)
    for (outs, gradients), (others, other_gradients) in zip(results, of_angles, strict=True):
        for one, other in zip(
            [*outs, *gradients[:4]], [*others, *other_gradients[:4]], strict=True
        ):
            np.testing.assert_array_equal(one, other)


def attention_inputs(
    heads: Heads, seed: int, positions: np.ndarray, spans: np.ndarray
) -> list[np.ndarray]:
    nothing = np.zeros(1, np.float32)
    bias = floats(heads.width) if heads.has_bias else nothing
    norms = [floats(heads.dim, seed=i) if heads.norm_eps else nothing for i in (1, 2)]
    return [floats(positions.size, heads.width, seed=seed), bias, *norms, positions, spans]


def test_runs_that_are_their_own_prefix_see_all_of_themselves() -> None:
    """Windows of an image, beside runs with a causal mask; and the answer does not depend on the other runs."""
    heads, lengths = HEADS[0], (5, 33, 1, 16, 9)
    spans, causal = np.zeros((1, 64, 3), np.int32), np.zeros((1, 64, 3), np.int32)
    ends = np.cumsum(lengths)
    for length, end in zip(lengths, ends, strict=True):
        spans[0, end - length : end] = (end - length, length, end - length)
        causal[0, end - length : end] = (0, 0, end - length)
    positions = np.arange(64, dtype=np.int32)[None]
    made = partial(AttentionOfRows, heads=heads, rotary=rotary_table(config(heads.dim), 80))
    inputs = attention_inputs(heads, 0, positions, spans)
    results = both(made, inputs)
    assert_same(results, 3e-5)
    # A run's last token sees as much with a mask as without, and the first only itself.
    inputs[5] = causal
    masked = both(made, inputs)[0][0][0]
    whole = results[0][0][0]
    np.testing.assert_allclose(masked[ends - 1], whole[ends - 1], atol=1e-6)
    assert np.abs(masked - whole)[0].max() > 0.01


@pytest.mark.parametrize("real", [50, 41, 0])
def test_log_prob_pieces_agree_with_padding_and_foreign_labels(real: int) -> None:
    vocabulary = Vocabulary(100, 50, real, 0.7)
    labels = np.random.default_rng(0).integers(80, 170, 33).astype(np.int32)
    logits = floats(33, 50) * 3
    results = []
    for kernels in (NativeKernels(), Kernels()):
        stats = kernels.log_prob_stats(vocabulary)(Tensor(logits), Tensor(labels)).asnumpy()
        total = stats[:, 0] + np.log(np.maximum(stats[:, 1], 1e-30))
        others = [floats(33, seed=i) for i in range(3)]
        others[2][::2] = 0.0
        gradient = kernels.log_prob_grad(vocabulary)(
            *(Tensor(x) for x in (logits, labels, total, *others))
        )
        # A share without tokens has no mass, whatever its top says.
        shown = stats if real else stats[:, 3:]
        results.append(([shown, gradient.asnumpy()[:, :real]], []))
    if real:
        assert_same(results, 2e-5)
    assert np.array_equal(results[0][0][0] == 0, results[1][0][0] == 0)


def test_a_span_that_reaches_into_another_cluster_is_refused() -> None:
    heads = HEADS[0]
    rotary = rotary_table(config(heads.dim), 16)
    kernels = NativeKernels()
    spans = np.zeros((1, 8, 3), np.int32)
    spans[0, :, 2] = [0, 0, 0, 0, 4, 4, 4, 4]
    spans[0, 4:, :2] = (2, 4)
    nothing = Tensor([0.0], ms.float32)
    positions = Tensor(np.arange(8, dtype=np.int32)[None])
    with pytest.raises(RuntimeError):
        AttentionOfRows(kernels, heads, rotary)(
            Tensor(floats(8, heads.width)), nothing, nothing, nothing, positions, Tensor(spans)
        ).asnumpy()


class Picked(nn.Cell):
    def __init__(self, pick: nn.Cell) -> None:
        super().__init__()
        self.pick = pick

    def construct(self, x: Any, picks: Any) -> Any:
        return self.pick(picks, x)


def test_the_gradient_of_rows_that_are_picked_often_is_not_a_sum_of_two_byte_numbers() -> None:
    # Of ones, float16 adds up 2048 and no more.
    picks = np.array([1] * 4096 + [-1, 0, -1, 3], np.int32)
    x = Tensor(np.ones((4, 8), np.float16))
    gradient = ms.grad(Picked(Kernels().pick()))(x, Tensor(picks))
    assert gradient.dtype == ms.float16
    np.testing.assert_array_equal(gradient.asnumpy()[:, 0], [1, 4096, 0, 1])


def test_tokens_of_other_shards_take_rows_all_over_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[np.ndarray] = []
    real = ops.unsorted_segment_sum

    def recorded(x: Any, rows: Any, count: int) -> Any:
        taken.append(rows.asnumpy())
        return real(x, rows, count)

    monkeypatch.setattr(ops, "unsorted_segment_sum", recorded)
    tokens, table = np.arange(1024, dtype=np.int32), np.ones((256, 4), np.float32)
    cell, dout = Kernels().exact_embedding(512), np.ones((1024, 4), np.float32)
    out = cell(Tensor(tokens), Tensor(table)).asnumpy()
    assert (out.any(axis=1) == (tokens >= 512) & (tokens < 768)).all()
    _, gradient = cell.bprop(Tensor(tokens), Tensor(table), Tensor(out), Tensor(dout))
    np.testing.assert_array_equal(gradient.asnumpy(), 1.0)
    assert np.bincount(taken[0]).max() <= 8
