"""Plans of experts against what is counted slot by slot, and routes that go by sample from one packing to another.

Does not prove what graphs make of a plan: test_experts.py and test_golden_models.py do.
"""

from __future__ import annotations

import numpy as np
import pytest

from mindgrpo.algorithm.packing import MicroBatch, MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout
from mindgrpo.models.expert_plan import (
    load_of_fullest,
    merge_routes,
    plan_experts,
    routes_by_sample,
    with_plan,
)

LAYERS, EXPERTS, SLOTS = 2, 5, 2
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
    assert {own.dtype for own in plan} == {np.dtype(np.int32)}


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
                planned = with_plan(batch, samples, EXPERTS)
                expected = routes_of_tokens(batch)
                is_padding = (planned.routes < 0).all((0, 2))
                num_padding += int(is_padding.sum())
                np.testing.assert_array_equal(
                    planned.routes[:, ~is_padding], expected[:, ~is_padding]
                )
                np.testing.assert_array_equal(planned.home < 0, planned.routes < 0)
    # Prompts once a row, and each sample's tokens but the last.
    rows = packed.rows(shape)
    tokens = sum(len({c for placed in row for c in placed.inputs.tolist()}) for row in rows)
    padded_rows = -(-len(rows) // (shape.rows * num_shares)) * shape.rows * num_shares
    assert num_padding == padded_rows * shape.length - tokens


def test_the_load_is_that_of_the_fullest_expert_of_any_layer() -> None:
    even = np.array([[[0, 1], [2, 3]], [[2, 3], [1, 0]]], np.int16)
    assert load_of_fullest({0: even}, 4) == 1.0
    # The first layer's expert 0 has 3 of 6 slots, whose mean is 1.5; a token without experts is in neither.
    more = np.array([[[0, 1], [2, 1]], [[-1, -1], [-1, -1]], [[0, 3], [0, 3]]], np.int16)
    one = np.array([[[0, 2], [1, 2]]], np.int16)
    assert load_of_fullest({0: more, 1: one}, 4) == 3 / 1.5


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
