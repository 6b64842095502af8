"""Plans of experts against what is counted slot by slot, and routes that go by sample from one packing to another.

Does not prove what graphs make of a plan: test_experts.py and test_golden_models.py do.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.models.expert_plan import (
    ExpertInputs,
    ExpertSpread,
    capacity,
    plan_experts,
    plan_spread,
    rows_by_expert,
)
from mindgrpo.models.expert_routes import (
    Margins,
    TokenShare,
    load_by_expert,
    load_of_fullest,
    margins_of,
    merge_routes,
    routes_by_sample,
    routes_of,
)

LAYERS, EXPERTS, SLOTS = 2, 5, 2
SIZES = (LAYERS, SLOTS)
# Prompts and completions: three groups, one of which fills no row by itself.
LENGTHS = (((1, 2, 3), (5, 7, 1)), ((4, 4), (9, 2)), ((6, 1, 6, 2, 5, 3), (8,)))


def rollout() -> Rollout:
    rng = np.random.default_rng(0)
    prompts, completions, groups = [], [], []
    for group, (prompt, lengths) in enumerate(LENGTHS):
        for length in lengths:
            prompts.append(np.array(prompt, np.int32))
            completions.append(rng.integers(0, 60, length).astype(np.int32))
            groups.append(group)
    count = len(prompts)
    none = [np.zeros(len(own), np.float32) for own in completions]
    return Rollout.single_turn(prompts, completions, ["stop"] * count, none, groups)


def routes_of_tokens(batch: MicroBatch) -> np.ndarray:
    """int32 [layers, tokens, slots]: what a router makes of a token and its position, of padding as well."""
    positions = np.take_along_axis(batch.positions, batch.own_columns, 1)
    numbers = (batch.tokens * 7 + positions * 3).reshape(-1)
    first = np.stack([numbers % EXPERTS, (numbers // 2) % EXPERTS])
    return np.stack([first, (first + 1 + numbers % 3) % EXPERTS], 2).astype(np.int32)


def test_a_plan_names_each_slots_row_by_expert_and_in_the_order_of_the_slots() -> None:
    rng = np.random.default_rng(1)
    routes = np.argsort(rng.random((LAYERS, 20, EXPERTS - 1)), 2)[:, :, :SLOTS].astype(np.int32)
    routes[:, 3] = -1
    routes[1, 4, 1] = -1
    plan = plan_experts(routes, EXPERTS)
    for layer in range(LAYERS):
        slots = [(e, s) for s, e in enumerate(routes[layer].reshape(-1).tolist()) if e >= 0]
        by_expert = [slot for _, slot in sorted(slots)]
        assert plan.order[layer].tolist() == by_expert + [-1] * (40 - len(by_expert))
        assert plan.counts[layer].tolist() == [
            sum(e == i for e, _ in slots) for i in range(EXPERTS)
        ]
        rows = {slot: row for row, slot in enumerate(by_expert)}
        assert plan.home[layer].reshape(-1).tolist() == [rows.get(s, -1) for s in range(40)]
    assert {own.dtype for own in plan[:-1]} == {np.dtype(np.int32)}


def _take(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of `x`, zeros for -1."""
    return np.where((rows >= 0)[:, None], x[np.maximum(rows, 0)], 0)


def _results(plans: list[ExpertInputs], layer: int, spread: tuple[int, int]) -> list[np.ndarray]:
    """By rank [N K, 3]: what comes back for each slot of (rank, slot), with the expert that it met."""
    ep, etp = spread
    own = [plan.order[layer] for plan in plans]
    sent = [
        np.where(order >= 0, [np.full_like(order, rank + 1), order + 1], 0).T
        for rank, order in enumerate(own)
    ]
    rows = len(sent[0]) // ep
    arrived = []
    for rank in range(ep * etp):
        # Blocks of those with the same columns; then what each with other columns got.
        expert_rank = rank // etp
        blocks = [
            sent[source * etp + column][expert_rank * rows : (expert_rank + 1) * rows]
            for column in range(etp)
            for source in range(ep)
        ]
        arrived.append(np.concatenate(blocks))
    made = []
    for rank, plan in enumerate(plans):
        by_expert, back = plan.by_expert[layer], plan.as_arrived[layer]
        first = rank // etp * len(plan.counts[layer])
        experts = first + np.repeat(np.arange(len(plan.counts[layer])), plan.counts[layer])
        met = np.zeros((len(by_expert), 1), np.int64)
        met[: len(experts), 0] = experts + 1
        of_rows = np.concatenate([_take(arrived[rank], by_expert), met], 1)
        made.append(_take(of_rows, back))
    results = []
    for rank, plan in enumerate(plans):
        column = rank % etp
        returned = []
        for source in range(ep):
            block = made[source * etp + column].reshape(etp, ep, rows, -1)
            returned.append(block[column, rank // etp])
        results.append(_take(np.concatenate(returned), plan.home[layer].reshape(-1)))
    return results


@pytest.mark.parametrize("spread", [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["random", "one expert has all", "a rank has nothing"])
def test_every_slot_of_every_rank_meets_its_expert_and_comes_back(
    spread: tuple[int, int], kind: str
) -> None:
    rng, (ep, etp), tokens, experts = np.random.default_rng(2), spread, 13, 8
    by_rank = []
    for _ in range(ep * etp):
        routes = np.argsort(rng.random((LAYERS, tokens, experts)), 2)[:, :, :SLOTS]
        routes[:, 3] = -1
        by_rank.append(routes.astype(np.int32))
    if kind == "one expert has all":
        for routes in by_rank:
            routes[:, :, 0], routes[:, :, 1] = 5, -1
    if kind == "a rank has nothing":
        by_rank[0][:] = -1
    sent = np.stack([rows_by_expert(routes, experts) for routes in by_rank])
    rows = capacity(sent, ExpertSpread(ep, etp, 0), tokens * SLOTS)
    assert rows >= sent.reshape(len(sent), LAYERS, ep, -1).sum(-1).max()
    plans = [
        plan_spread(routes, sent, ExpertSpread(ep, etp, member), rows)
        for member, routes in enumerate(by_rank)
    ]
    assert {own.dtype for plan in plans for own in plan[:-1]} == {np.dtype(np.int32)}
    for layer in range(LAYERS):
        for rank, results in enumerate(_results(plans, layer, spread)):
            wanted = by_rank[rank][layer].reshape(-1)
            slots = np.arange(tokens * SLOTS)
            expected = np.stack([np.full_like(slots, rank + 1), slots + 1, wanted + 1], 1)
            np.testing.assert_array_equal(results, np.where((wanted >= 0)[:, None], expected, 0))


def test_the_capacity_is_a_multiple_of_an_even_share_and_enough() -> None:
    spread = ExpertSpread(8, 1, 0)
    even = np.full((8, 1, 16), 3, np.int32)
    assert capacity(even, spread, 48) == 2 * 6
    uneven = even.copy()
    uneven[2, 0, :2] = 9
    assert capacity(uneven, spread, 48) == 3 * 6
    uneven[2, 0] = [48, *[0] * 15]
    assert capacity(uneven, spread, 48) == 48


@pytest.mark.parametrize(("shape", "num_shares"), [(MicroShape(2, 24), 2), (MicroShape(1, 32), 1)])
@pytest.mark.parametrize("context_ranks", [1, 2])
def test_routes_of_one_packing_are_those_of_the_same_tokens_in_another(
    shape: MicroShape, num_shares: int, context_ranks: int
) -> None:
    packed = PackedRollout(rollout())
    recorded = MicroShape(3, 16)
    by_rank = []
    for share in range(2):
        batches = packed.micro_batches(recorded, 2, share)
        by_rank.append(routes_by_sample(batches, [routes_of_tokens(b) for b in batches]))
    samples = merge_routes(by_rank)
    lengths = packed.rollout.total_lengths
    assert {i: own.shape for i, own in samples.items()} == {
        i: (length - 1, LAYERS, SLOTS) for i, length in enumerate(lengths)
    }
    shape = MicroShape(shape.rows, shape.length, context_ranks=context_ranks)
    num_padding = 0
    for share in range(num_shares):
        for part in range(context_ranks):
            for batch in packed.micro_batches(shape, num_shares, share, part=part):
                routes = routes_of(batch, samples, SIZES)
                plan = plan_experts(routes, EXPERTS)
                expected = routes_of_tokens(batch)
                is_padding = (routes < 0).all((0, 2))
                num_padding += int(is_padding.sum())
                np.testing.assert_array_equal(routes[:, ~is_padding], expected[:, ~is_padding])
                np.testing.assert_array_equal(plan.home < 0, routes < 0)
    # Prompts once a row, and each sample's tokens but the last.
    rows = packed.rows(shape)
    tokens = sum(len({c for placed in row for c in placed.inputs.tolist()}) for row in rows)
    padded_rows = -(-len(rows) // (shape.rows * num_shares)) * shape.rows * num_shares
    assert num_padding == padded_rows * shape.length - tokens


def test_the_load_is_that_of_the_fullest_expert_of_any_layer() -> None:
    even = np.array([[[0, 1], [2, 3]], [[2, 3], [1, 0]]], np.int16)
    assert load_of_fullest(load_by_expert([even], LAYERS, 4)) == 1.0
    # The first layer's expert 0 has 3 of 6 slots, whose mean is 1.5; a token without experts is in neither.
    more = np.array([[[0, 1], [2, 1]], [[-1, -1], [-1, -1]], [[0, 3], [0, 3]]], np.int16)
    one = np.array([[[0, 2], [1, 2]]], np.int16)
    assert load_of_fullest(load_by_expert([more, one], LAYERS, 4)) == 3 / 1.5


def test_ranks_that_share_out_tokens_record_and_plan_their_own() -> None:
    packed = PackedRollout(rollout())
    batches = packed.micro_batches(MicroShape(2, 24), 1, 0)
    whole = [routes_of_tokens(batch) for batch in batches]
    halves = [TokenShare(index, 2) for index in range(2)]
    by_rank = []
    for share in halves:
        own = [routes[:, share.within(routes.shape[1])] for routes in whole]
        by_rank.append(routes_by_sample(batches, own, share))
    merged = merge_routes(by_rank)
    for sample, own in routes_by_sample(batches, whole).items():
        np.testing.assert_array_equal(merged[sample], own)
    for batch in batches:
        parts = [routes_of(batch, merged, SIZES, share) for share in halves]
        np.testing.assert_array_equal(np.concatenate(parts, 1), routes_of(batch, merged, SIZES))


def test_ranks_that_share_rows_merge_what_each_has_recorded() -> None:
    packed = PackedRollout(rollout())
    shape = MicroShape(2, 24, context_ranks=2)
    by_rank = []
    for part in range(2):
        batches = packed.micro_batches(shape, 1, 0, part=part)
        by_rank.append(routes_by_sample(batches, [routes_of_tokens(b) for b in batches]))
    assert any((own < 0).any() for own in by_rank[0].values())
    merged = merge_routes(by_rank)
    batches = packed.micro_batches(MicroShape(2, 24), 1, 0)
    whole = routes_by_sample(batches, [routes_of_tokens(b) for b in batches])
    for sample, own in whole.items():
        np.testing.assert_array_equal(merged[sample], own)


@pytest.mark.parametrize("shape", [MicroShape(2, 24), MicroShape(1, 40, max_per_row=1)])
@pytest.mark.parametrize(
    ("num_shares", "context_ranks", "parts"), [(1, 1, 1), (2, 1, 2), (1, 2, 1)]
)
def test_margins_are_added_up_over_every_samples_tokens_however_these_are_packed(
    shape: MicroShape, num_shares: int, context_ranks: int, parts: int
) -> None:
    packed, found = PackedRollout(rollout()), Margins()
    shape = replace(shape, context_ranks=context_ranks)
    for share, part in product(range(num_shares), range(context_ranks)):
        for batch in packed.micro_batches(shape, num_shares, share, part=part):
            margins = routes_of_tokens(batch).sum(2) / 64
            for index in range(parts):
                own = TokenShare(index, parts)
                found += margins_of(batch, margins[:, own.within(margins.shape[1])], own)
    whole = packed.micro_batches(MicroShape(1, 40, max_per_row=1), 1, 0)
    recorded = routes_by_sample(whole, [routes_of_tokens(batch) for batch in whole])
    expected = np.concatenate([own.sum(2).reshape(-1) / 64 for own in recorded.values()])
    assert (found.total, found.count) == (expected.sum(), expected.size)
    assert found.least == expected.min()
