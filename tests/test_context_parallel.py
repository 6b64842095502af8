"""Rows whose tokens ranks share: who has which columns, what each predicts, and its attention beside the unsplit one.

All ranks' parts are computed in one process. Does not prove that ranks exchange them: test_distributed.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from distributed import cases as c
from mindspore import Tensor, nn, ops
from small_generators import WITH_C
from tables import each_row
from test_packing import random_samples, samples_of

from mindgrpo.algorithm.context_split import BLOCK, deal_columns
from mindgrpo.algorithm.packing import MicroShape, PackedRollout, most_picks
from mindgrpo.backend.contract import AloneGroup
from mindgrpo.backend.kernels.contract import Kernels
from mindgrpo.backend.kernels.native.kernels import NativeKernels
from mindgrpo.backend.kernels.native.library import call_kernel
from mindgrpo.backend.kernels.shapes import Heads
from mindgrpo.doctor.probes.kernel_cases import AttentionOfRows
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.lora import TARGETS, LoraSettings, adapter_specs
from mindgrpo.models.parallel_cells import GatherTokens
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout

# Of clusters that follow each other in a row: a prompt's length, and those of the runs that share it.
Clusters = Sequence[tuple[int, Sequence[int]]]
CLUSTERS: Sequence[Clusters] = (((37, (50, 33, 1)), (5, ())), ((21, (64,)), (1, (3, 90)), (70, ())))


def spans_of(clusters: Clusters, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Spans [T, 3] and positions [T], padding behind the clusters."""
    spans, positions = np.zeros((length, 3), np.int32), np.zeros(length, np.int32)
    spans[:, 2] = np.arange(length)
    at = 0
    for prompt, runs in clusters:
        first = at
        for count, prefix in ((prompt, 0), *((run, prompt) for run in runs)):
            spans[at : at + count] = (first if prefix else 0, prefix, at)
            positions[at : at + count] = prefix + np.arange(count)
            at += count
    assert at <= length
    return spans, positions


def seen(spans: np.ndarray) -> np.ndarray:
    """How many keys each column sees, counted one by one."""
    keys = np.arange(len(spans))
    return np.array(
        [
            np.count_nonzero(((keys >= p) & (keys < p + n)) | ((keys >= s) & (keys <= column)))
            for column, (p, n, s) in enumerate(spans)
        ]
    )


@each_row("num_ranks", [1, 2, 3, 4, 8])
@each_row("clusters", [*CLUSTERS, ((768, ()),), ((128, (160,) * 4),), ()])
def test_ranks_have_as_many_columns_and_attend_to_as_much(
    clusters: Clusters, num_ranks: int
) -> None:
    spans, _ = spans_of(clusters, 768)
    columns = deal_columns(spans, num_ranks)
    assert columns.dtype == np.int32 and columns.shape == (num_ranks, 768 // num_ranks)
    assert (np.diff(columns) > 0).all() and sorted(columns.ravel()) == [*range(768)]
    costs = seen(spans)
    by_rank = costs[columns].sum(1)
    # What a round of blocks may differ by goes to whoever has least: no more than the costliest block.
    assert by_rank.max() - by_rank.min() <= np.sort(costs)[-BLOCK:].sum()
    if len(clusters) == 1:
        assert by_rank.max() <= 1.03 * by_rank.mean()


def test_a_shared_prompt_costs_once() -> None:
    """Of two rows of equal work for a rank that has the prompt and one that has not, neither counts it per sample."""
    spans, _ = spans_of(((256, (64,) * 4),), 512)
    columns = deal_columns(spans, 2)
    in_prompt = [np.count_nonzero(own < 256) for own in columns]
    # Completions see 256 keys more: the rank that has more of them has fewer columns of the prompt's end.
    assert seen(spans)[columns].sum(1).ptp() < 0.02 * seen(spans).sum() and sum(in_prompt) == 256


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 4])
def test_what_ranks_predict_of_samples_is_all_of_them_once(num_ranks: int, group: int) -> None:
    samples = random_samples(17, seed=group, group=group)
    whole, split = (MicroShape(3, 20, context_ranks=n) for n in (1, num_ranks))
    packed = PackedRollout(samples)
    by_rank = [packed.micro_batches(split, 1, 0, part=part) for part in range(num_ranks)]
    for number, one in enumerate(packed.micro_batches(whole, 1, 0)):
        parts = [batches[number] for batches in by_rank]
        values = np.arange(one.picks.size, dtype=np.float32) + 1.0
        expected = one.gather(one.spread(samples.generator_logps))
        found = [part.gather(part.spread(samples.generator_logps)) for part in parts]
        for sample, logps in expected.items():
            np.testing.assert_array_equal(sum(own[sample] for own in found), logps)
        columns = parts[0].columns
        for part, own in zip(parts, columns, strict=True):
            assert part.tokens.shape == (3, 20 // num_ranks)
            np.testing.assert_array_equal(part.tokens, np.take_along_axis(one.tokens, own, 1))
            np.testing.assert_array_equal(part.spans, one.spans)
            np.testing.assert_array_equal(part.columns, columns)
            # A pick's token, and its label, are those that the whole row has in its place.
            picked = part.picks[part.picks >= 0]
            rows, at = np.divmod(picked, own.shape[1])
            places = rows * 20 + own[rows, at]
            pairs = {*zip(one.picks.tolist(), one.labels.tolist(), strict=True)}
            assert {
                *zip(places.tolist(), part.labels[part.picks >= 0].tolist(), strict=True)
            } <= pairs
        assert sum((part.picks >= 0).sum() for part in parts) == (one.picks >= 0).sum()
        # Segments: one number a sample on all ranks, whose shares add up to one.
        sums = np.zeros(num_ranks * parts[0].picks.size)
        for part in parts:
            numbers, shares = part.segments()
            np.add.at(sums, numbers, shares * part.actions)
        num_samples = sum(own.size > 0 for own in expected.values())
        np.testing.assert_allclose(sums[:num_samples], 1.0, rtol=1e-6)
        assert not sums[num_samples:].any() and values.size
    rows = packed.rows(split)
    assert most_picks(rows, split, 1) == max(
        np.count_nonzero(batch.picks >= 0) for batches in by_rank for batch in batches
    )


def test_one_long_sample_is_shared_evenly() -> None:
    (batch,) = PackedRollout(samples_of([(100, 412)])).micro_batches(
        MicroShape(1, 512, context_ranks=4), 1, 0, part=2
    )
    assert batch.tokens.shape == (1, 128) and 64 < np.count_nonzero(batch.picks >= 0) <= 128


@dataclass(frozen=True)
class Rows:
    """Inputs of attention for all of the rows' tokens, and the kernels' results there."""

    heads: Heads
    positions: np.ndarray
    spans: np.ndarray

    def inputs(self) -> list[np.ndarray]:
        """qkv, bias and the norms' weights; dmixed."""
        rng = np.random.default_rng(0)
        heads, nothing = self.heads, np.zeros(1, np.float32)

        def drawn(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        count = self.positions.size
        bias = drawn(heads.width) if heads.has_bias else nothing
        norms = [drawn(heads.dim) if heads.norm_eps else nothing for _ in range(2)]
        return [drawn(count, heads.width), bias, *norms, drawn(count, heads.queries * heads.dim)]

    def constants(self, *more: int) -> list[np.ndarray]:
        heads = self.heads
        angles = np.outer(np.arange(512), 1e4 ** (-np.arange(heads.dim // 2) * 2 / heads.dim))
        angles = np.concatenate([angles, angles], 1)
        rotary = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
        sizes = np.array([heads.queries, heads.kv, heads.dim, 0, *more], np.int32)
        return [rotary, sizes, np.array([heads.norm_eps or 0.0, heads.scale], np.float32)]

    def computed(
        self, kernel: str, inputs: list[np.ndarray], place: list[np.ndarray], dmixed: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns mixed and log-sum-exp, and the gradients of `inputs`."""
        out = [np.empty_like(dmixed), np.empty((len(dmixed), self.heads.queries), np.float32)]
        call_kernel(kernel, *inputs, *place, *out)
        gradients = [np.full_like(own, np.nan) for own in inputs]
        call_kernel(f"{kernel}_grad", *inputs, *place, *out, dmixed, *gradients)
        return out, gradients


HEADS = [
    Heads(4, 2, 16),
    Heads(4, 4, 48, has_bias=True),
    Heads(6, 1, 20, has_bias=True, norm_eps=1e-6),
]


@WITH_C
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("length", "num_ranks"), [(256, 2), (256, 4), (384, 3), (256, 1)])
def test_own_queries_have_the_bits_of_the_unsplit_row_and_gradients_add_up(
    heads: Heads, length: int, num_ranks: int
) -> None:
    spans, positions = map(
        np.stack, zip(*(spans_of(clusters, length) for clusters in CLUSTERS), strict=True)
    )
    rows = Rows(heads, positions, spans)
    qkv, bias, q_norm, k_norm, dmixed = rows.inputs()
    place = [positions, spans, *rows.constants()]
    whole, gradients = rows.computed("attention", [qkv, bias, q_norm, k_norm], place, dmixed)

    columns = np.stack([deal_columns(own, num_ranks) for own in spans], 1)
    tokens = (columns + np.arange(len(spans))[:, None] * length).reshape(num_ranks, -1)
    of_queries = heads.queries * heads.dim
    kv = np.ascontiguousarray(qkv[tokens.ravel(), of_queries:])
    sums = [np.zeros_like(own) for own in gradients]
    for index, own in enumerate(tokens):
        inputs = [np.ascontiguousarray(qkv[own, :of_queries]), kv, bias, q_norm, k_norm]
        place = [positions, spans, columns, *rows.constants(index)]
        out, parts = rows.computed("context_attention", inputs, place, dmixed[own])
        for found, expected in zip(out, whole, strict=True):
            assert found.tobytes() == expected[own].tobytes()
        sums[0][own, :of_queries] = parts[0]
        sums[0][tokens.ravel(), of_queries:] += parts[1]
        for total, part in zip(sums[1:], parts[2:], strict=True):
            total += part
    for found, expected in zip(sums, gradients, strict=True):
        assert np.abs(found - expected).max() <= 3e-6 * max(1e-6, np.abs(expected).max())


@WITH_C
@pytest.mark.parametrize("wrong", [(0, 1), (0, 999), (1, 0)], ids=["twice", "outside", "order"])
def test_columns_that_are_no_deal_are_refused(wrong: tuple[int, int]) -> None:
    spans, positions = (own[None] for own in spans_of(((20, ()),), 32))
    rows = Rows(Heads(1, 1, 8), positions, spans)
    qkv, bias, q_norm, k_norm, dmixed = rows.inputs()
    columns = deal_columns(spans[0], 2)[:, None]
    at, value = wrong
    columns[0, 0, 0 if at == 0 else 1] = value if at == 0 else columns[0, 0, 0]
    inputs = [qkv[:16, :8].copy(), qkv[:, 8:].copy(), bias, q_norm, k_norm]
    if at == 0 and value == 1:
        columns[0, 0, 0] = columns[0, 0, 1]
    with pytest.raises(RuntimeError, match="is not the next of row 0"):
        rows.computed(
            "context_attention",
            inputs,
            [positions, spans, columns, *rows.constants(0)],
            dmixed[:16],
        )


@pytest.mark.parametrize("model", ["QWEN2", "QWEN3", "OLMO2", "GEMMA3"])
@pytest.mark.parametrize("splits_tokens", [False, True])
def test_every_gradient_is_summed_over_ranks_that_share_rows(
    model: str, splits_tokens: bool
) -> None:
    """Each has other tokens; a parameter without it would be trained on a part of them."""
    specs = parameter_specs(decoder_config(getattr(c, model), "here"), splits_tokens)
    specs += adapter_specs(specs, LoraSettings(3, 1.0, TARGETS))
    layout = Layout.of(Mesh(2, 2, 1, 2), specs)
    assert all(spec.data_axes == {"dp", "cp"} for spec in specs)
    # None is cut over them, so that weights are synchronised and saved as those of replicas.
    for spec in specs:
        assert all(
            {rank ^ 2, rank ^ 4} <= {*own}
            for own in layout.ranks_by_box(spec.name).values()
            for rank in own
        )


class ContextOfRows(nn.Cell):
    """Attention of own tokens, its context made of positions, spans and columns."""

    def __init__(self, kernels: Kernels, heads: Heads, rotary: np.ndarray, again: bool) -> None:
        super().__init__()
        gather = GatherTokens(AloneGroup(0), False)
        self.inputs = kernels.context_inputs(rotary, 0)
        how = 0, gather, gather.scatter, again
        self.attention = kernels.context_attention(heads, rotary, *how)

    def construct(self, qkv: Any, bias: Any, q_norm: Any, k_norm: Any, *rows: Any) -> Any:
        return self.attention(qkv, bias, q_norm, k_norm, *self.inputs(*rows))


@WITH_C
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("kernels", [Kernels, NativeKernels])
def test_cells_of_a_rank_that_has_all_tokens_are_those_of_whole_rows(
    kernels: type[Kernels], again: bool
) -> None:
    """Exchanges aside, which the runs of test_distributed.py have."""
    spans, positions = map(
        np.stack, zip(*(spans_of(clusters, 256) for clusters in CLUSTERS), strict=True)
    )
    rows = Rows(HEADS[2], positions, spans)
    *floats, dmixed = rows.inputs()
    rotary, *_ = rows.constants()
    columns = np.broadcast_to(np.arange(256, dtype=np.int32), (1, 2, 256)).copy()
    gradient = ops.GradOperation(get_all=True, sens_param=True)

    def computed(cell: nn.Cell, *integers: np.ndarray) -> list[np.ndarray]:
        """Mixed, and the gradients of the four floats."""
        tensors = [Tensor(own) for own in (*floats, *integers)]
        made = cell(*tensors), *gradient(cell)(*tensors, Tensor(dmixed))[:4]
        return [own.asnumpy() for own in made]

    whole = computed(AttentionOfRows(kernels(), rows.heads, rotary), positions, spans)
    cell = ContextOfRows(kernels(), rows.heads, rotary, again)
    shared = computed(cell, positions, spans, columns)
    if kernels is NativeKernels:
        assert shared[0].tobytes() == whole[0].tobytes()
    for ours, expected in zip(shared, whole, strict=True):
        assert np.abs(ours - expected).max() <= 3e-6 * np.abs(expected).max()
