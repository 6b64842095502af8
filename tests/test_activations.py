"""What graphs hold beside their pools, counted here tensor by tensor for one small layer, and how it grows.

Does not prove that a runtime frees what is no longer needed: scripts/bench/activations.py measures that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from mindgrpo.backend.kernels.rollout import LocalExperts
from mindgrpo.backend.kernels.shapes import Heads, Routing
from mindgrpo.plan.activations import (
    Block,
    ChunkLayers,
    Graphs,
    forward_bytes,
    update_bytes,
)
from mindgrpo.plan.micro_shapes import Kind

TOKENS, HIDDEN, INNER = 10, 8, 12
HEADS = Heads(queries=2, kv=1, dim=4)
BOTH = frozenset(("attention", "mlp"))
NOTHING: frozenset[str] = frozenset()
# Elements a token: the projection holds queries, keys and values; mixed are the queries' share.
QKV, MIXED = (2 + 2 * 1) * 4, 2 * 4
NORMED = 4 * HIDDEN  # each norm's input and its result, twice a layer
KEPT_BY: dict[Kind, int] = {
    # And the log-sum-exp of each head.
    "native": 4 * (NORMED + QKV + MIXED + 2 + 3 * INNER),
    # And the largest score and the sum of each head's softmax, eight float32 each.
    "fused": 2 * (NORMED + QKV + MIXED + 3 * INNER) + 2 * 2 * 8 * 4,
    # And each norm's scaled input, each head's scores; the MLP's gate, up, sigmoid, their product, and the result.
    "plain": 4 * (NORMED + 2 * HIDDEN + QKV + MIXED + 2 * TOKENS + 5 * INNER),
}


def graphs(kind: Kind, **other: object) -> Graphs:
    block = Block(HIDDEN, INNER, HEADS)
    size = 2 if kind == "fused" else 4
    made = Graphs(kind, block, 6, TOKENS, TOKENS, size, 1 << 20, summed=0)
    return replace(made, **other)  # type: ignore[arg-type]


def stage(layers: int, again: frozenset[str] = NOTHING, **other: object) -> ChunkLayers:
    made = ChunkLayers([again] * layers, [0] * layers, waiting=0, embedding=0, head=0)
    return replace(made, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KEPT_BY)
def test_each_layer_keeps_the_tensors_that_its_backward_pass_reads(kind: Kind) -> None:
    two, five = (update_bytes(graphs(kind), stage(layers)).kept for layers in (2, 5))
    assert five - two == 3 * TOKENS * KEPT_BY[kind]


@pytest.mark.parametrize("kind", KEPT_BY)
def test_a_token_keeps_a_row_for_each_of_its_experts(kind: Kind) -> None:
    number, chosen, inner = 16, 3, 5
    experts = LocalExperts(Routing(number, chosen, False, True, 1.0), 0, number, inner, (0,))
    dense, sparse = graphs(kind), graphs(kind)
    sparse = replace(sparse, block=replace(sparse.block, inner=0, experts=experts))
    size = dense.itemsize
    # What an expert gets and makes; gate and up, which the processors' kernel multiplies again; scores.
    widths = {"native": 2 * size, "fused": 3 * size, "plain": 4 * 4 + size}[kind]
    rows = chosen * (2 * HIDDEN * size + inner * widths) + 4 * (number + 2 * chosen)
    dense_mlp = INNER * (5 * 4 if kind == "plain" else 3 * size)
    kept = [update_bytes(one, stage(5)).kept for one in (dense, sparse)]
    assert kept[1] - kept[0] == 5 * TOKENS * (rows - dense_mlp)
    if kind == "native":
        # Gradients at work: of rows, and as wide as a token's experts gate and up, their product, and that again.
        at_work = chosen * (2 * HIDDEN + 4 * inner) + number + 2 * chosen
        working = update_bytes(sparse, stage(5)).working
        assert working == TOKENS * size * (2 * HIDDEN + at_work)
    # A layer of a model with both kinds is counted as the larger.
    both = replace(sparse, block=replace(sparse.block, inner=1000))
    assert update_bytes(both, stage(5)).kept == 5 * TOKENS * 1000 * dense_mlp // INNER + (
        kept[0] - 5 * TOKENS * dense_mlp
    )


@pytest.mark.parametrize("kind", KEPT_BY)
def test_of_tokens_that_ranks_share_out_each_keeps_its_own(kind: Kind) -> None:
    def kept(shares: int, again: frozenset[str] = NOTHING, **other: object) -> int:
        one = graphs(kind, token_shares=shares, **other)
        return update_bytes(one, stage(5, again, head=1 << 30)).kept

    flow = TOKENS * HIDDEN * graphs(kind).itemsize
    # Half of the inputs of two norms, and of what the products take that follow.
    inputs, factors = 2 * flow if kind == "plain" else flow, flow
    assert kept(1) - kept(2) == 5 * (inputs + factors)
    assert kept(1) - kept(2, gathers_again=False) == 5 * inputs
    assert kept(1, BOTH) - kept(2, BOTH) == 4 * flow // 2 + inputs + factors
    attention = frozenset(("attention",))
    assert kept(1, attention) - kept(2, attention) == 5 * inputs


@pytest.mark.parametrize("kind", KEPT_BY)
def test_of_rows_that_ranks_share_each_keeps_its_own_tokens(kind: Kind) -> None:
    def kept(again: frozenset[str], *, ranks: int) -> int:
        one = graphs(kind, tokens=TOKENS // ranks, context_ranks=ranks)
        return update_bytes(one, stage(4, again, head=1 << 30)).kept

    # Keys and values of the whole row, where they are not gathered again.
    context = TOKENS * 2 * HEADS.kv * HEADS.dim * graphs(kind).itemsize
    for again in (NOTHING, frozenset(("mlp",)), BOTH):
        layers = {NOTHING: 4 * (kind != "native"), BOTH: 1 * (kind != "native")}.get(again, 4)
        assert kept(again, ranks=2) == kept(again, ranks=1) // 2 + layers * context


@pytest.mark.parametrize("kind", KEPT_BY)
def test_a_layer_that_is_computed_again_keeps_its_input(kind: Kind) -> None:
    two, five = (update_bytes(graphs(kind), stage(layers, BOTH)).kept for layers in (2, 5))
    assert five - two == 3 * TOKENS * HIDDEN * graphs(kind).itemsize


def test_the_last_layer_before_the_head_is_kept_where_all_are_computed_again() -> None:
    for layers, kept in ((5, 4 * HIDDEN * 4 + KEPT_BY["native"]), (1, HIDDEN * 4)):
        need = update_bytes(graphs("native"), stage(layers, BOTH, head=1 << 30))
        assert need.kept == TOKENS * kept


@pytest.mark.parametrize(
    ("module", "elements"), [("attention", QKV + MIXED + 2), ("mlp", 3 * INNER)]
)
def test_a_module_that_is_computed_again_keeps_nothing_of_its_own(
    module: str, elements: int
) -> None:
    whole, less = (
        update_bytes(graphs("native"), stage(9, again)).kept
        for again in (NOTHING, frozenset((module,)))
    )
    assert whole - less == 9 * TOKENS * elements * 4


def test_gradients_of_one_layer_at_a_time_wait_to_be_added() -> None:
    for large, expected in (((1 << 30, 1 << 31, 1 << 30), 1 << 31), ((0, 0, 0), 1 << 29)):
        need = update_bytes(
            graphs("native"), stage(3, gradients=large, head=1 << 29, embedding=1 << 28)
        )
        assert need.gradients == expected


def test_micro_batches_wait_before_later_stages_as_the_inputs_of_layers() -> None:
    flow = TOKENS * HIDDEN * 4
    first = stage(5, waiting=3 * 5, head=None)
    middle = stage(5, waiting=2 * 5, head=None, embedding=None)
    last = stage(5, embedding=None)
    needs = [update_bytes(graphs("native"), one) for one in (first, middle, last)]
    # A result that goes on and its gradient, beside those of other micro-batches than the present one.
    assert [need.waiting for need in needs] == [(3 * 5 + 2) * flow, (2 * 5 + 2) * flow, 0]
    assert [need.kept for need in needs[:2]] == [5 * flow] * 2


def test_logits_beyond_a_chunk_take_no_more_than_a_chunk() -> None:
    rows = [graphs("native", vocabulary=1000, logits_bytes=4 * 1000 * n) for n in (3, 4, 10)]
    sizes = [forward_bytes(one, has_head=True) for one in rows]
    assert [sizes[1] - sizes[0], sizes[2] - sizes[1]] == [4 * 1000, 6 * 4 * 1000]
    beyond = forward_bytes(graphs("native", vocabulary=1000, logits_bytes=1 << 30), True)
    assert beyond == sizes[2]


def test_rows_of_one_sample_need_no_mask_of_their_size() -> None:
    long = {"tokens": 1 << 16, "row_length": 1 << 15}
    masked, causal = (
        forward_bytes(graphs("fused", is_causal=one, **long), False) for one in (False, True)
    )
    assert masked - causal == 2 * (1 << 30) - 2048 * 2048


def test_a_sum_over_ranks_makes_a_result_or_two() -> None:
    alone, own, exact = (forward_bytes(graphs("fused", summed=n), False) for n in (0, 2, 8))
    assert own - alone == TOKENS * HIDDEN * 2
    assert exact - alone == 2 * TOKENS * HIDDEN * 4
