"""Plans are executed here on numpy arrays and compared bit for bit with the target's own cut.

Does not prove that a backend carries the pieces, nor how long a plan or a reshard takes.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import (
    Box,
    Layout,
    ParameterSpec,
    Position,
    Split,
)
from mindgrpo.weight_sync.plan import Move, Plan, plan_reshard
from mindgrpo.weight_sync.rounds import Transfer, _joined, in_rounds, pair_capacity, transfers
from mindgrpo.weights.local_weights import Places, Region, arrange

Weights = dict[str, NDArray[np.float32]]

BY_HAND = [
    (Mesh(1, 1), Mesh(1, 1)),
    (Mesh(8, 1), Mesh(1, 8)),
    (Mesh(1, 8), Mesh(8, 1)),
    (Mesh(1, 4, 2), Mesh(2, 4)),
    (Mesh(2, 4), Mesh(1, 4, 2)),
    (Mesh(1, 1, 8), Mesh(1, 8)),
    (Mesh(1, 1, 8), Mesh(1, 1)),
    (Mesh(1, 1), Mesh(1, 1, 8)),
    (Mesh(1, 1), Mesh(8, 1)),
    (Mesh(4, 2), Mesh(2, 4)),
    (Mesh(2, 2, 2), Mesh(2, 4)),
    (Mesh(2, 2, 2), Mesh(2, 1)),
]


def decoder_specs(
    num_layers: int,
    hidden: int = 6,
    heads: int = 8,
    kv_heads: int = 2,
    head_dim: int = 2,
    intermediate: int = 11,
    vocabulary: int = 13,
    tied: bool = False,
) -> tuple[ParameterSpec, ...]:
    specs: list[ParameterSpec] = []

    def add(
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        position: Position,
        unit: int = 1,
        replicate: bool = False,
    ) -> None:
        splits = () if dim is None else (Split("tp", dim, unit, replicate),)
        fused = re.sub(r"\.([qkv]|gate|up)_proj\.", ".fused.", name)
        specs.append(
            ParameterSpec(
                name,
                shape,
                splits,
                position=position,
                decay=len(shape) > 1,
                transposed=name.endswith("_proj.weight"),
                fused_key=fused if fused != name else "",
            )
        )

    embedding = (vocabulary, hidden)
    add("model.embed_tokens.weight", embedding, 0, "first_and_last" if tied else "first")
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        for key, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            name, rows, replicate = f"{layer}self_attn.{key}_proj.", count * head_dim, key != "q"
            add(name + "weight", (rows, hidden), 0, i, head_dim, replicate)
            add(name + "bias", (rows,), 0, i, head_dim, replicate)
        add(layer + "self_attn.o_proj.weight", (hidden, heads * head_dim), 1, i, head_dim)
        add(layer + "mlp.gate_proj.weight", (intermediate, hidden), 0, i)
        add(layer + "mlp.up_proj.weight", (intermediate, hidden), 0, i)
        add(layer + "mlp.down_proj.weight", (hidden, intermediate), 1, i)
        add(layer + "input_layernorm.weight", (hidden,), None, i)
        add(layer + "post_attention_layernorm.weight", (hidden,), None, i)
    add("model.norm.weight", (hidden,), None, "last")
    if not tied:
        add("lm_head.weight", embedding, 0, "last")
    return tuple(specs)


@lru_cache
def layouts(source: Mesh, target: Mesh, tied: bool = False) -> tuple[Layout, Layout]:
    """Five layers, so that stages are uneven; nine where eight stages need one each."""
    num_layers = 9 if max(source.pp, target.pp) == 8 else 5
    specs = decoder_specs(num_layers, tied=tied)
    return Layout.of(source, specs), Layout.of(target, specs)


@lru_cache
def planned(source: Mesh, target: Mesh, tied: bool = False) -> Plan:
    return plan_reshard(*layouts(source, target, tied))


def global_weights(layout: Layout) -> Weights:
    rng = np.random.default_rng(0)
    return {spec.name: rng.random(spec.shape, np.float32) for spec in layout.specs}


def view(array: NDArray[np.float32], box: Box) -> NDArray[np.float32]:
    index: Any = (*box.slices, ...)  # the dots keep a scalar an array
    part: NDArray[np.float32] = array[index]
    return part


def cut(weights: Weights, layout: Layout, rank: int) -> Weights:
    return {name: view(weights[name], box).copy() for name, box in layout.held_by(rank).items()}


class Cluster:
    """What the source holds, and the target as far as it has been filled."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.weights = global_weights(plan.source)
        ranks = range(plan.num_ranks)
        self.held = [plan.source.held_by(rank) for rank in ranks]
        self.wanted = [plan.target.held_by(rank) for rank in ranks]
        self.old = [cut(self.weights, plan.source, rank) for rank in ranks]
        self.new = [
            {name: np.full(box.shape, np.nan, np.float32) for name, box in held.items()}
            for held in self.wanted
        ]

    def take(self, rank: int, name: str, box: Box) -> NDArray[np.float32]:
        return view(self.old[rank][name], box.within(self.held[rank][name]))

    def put(self, rank: int, name: str, box: Box, values: NDArray[np.float32]) -> None:
        target = view(self.new[rank][name], box.within(self.wanted[rank][name]))
        assert np.isnan(target).all(), f"{name} {box} arrives twice on rank {rank}"
        target[...] = values

    def keep(self) -> None:
        for rank in range(self.plan.num_ranks):
            for move in self.plan.of(rank).keep:
                self.put(rank, move.name, move.box, self.take(rank, move.name, move.box))

    def check(self) -> None:
        for rank, new in enumerate(self.new):
            expected = cut(self.weights, self.plan.target, rank)
            assert new.keys() == expected.keys()
            for name, values in expected.items():
                assert new[name].tobytes() == values.tobytes(), f"{name} differs on rank {rank}"


def run_moves(plan: Plan) -> None:
    cluster = Cluster(plan)
    cluster.keep()
    for rank in range(plan.num_ranks):
        for move in plan.of(rank).receive:
            cluster.put(rank, move.name, move.box, cluster.take(move.source, move.name, move.box))
    cluster.check()


Stored = dict[str, NDArray[np.float32]]


def stored(weights: Weights, layout: Layout, rank: int) -> Stored:
    """The tensors of a rank as it stores them; what no parameter fills is NaN."""
    fused, places = arrange(layout, rank), Places(layout, rank)
    tensors = {entry.key: np.full(entry.shape, np.nan, np.float32) for entry in fused}
    for name, box in layout.held_by(rank).items():
        region, values = places.region(name), view(weights[name], box)
        swaps = layout.by_name[name].transposed
        tensors[region.key][region.slices] = values.swapaxes(-1, -2) if swaps else values
    return tensors


def pair_rounds(plan: Plan, bucket_bytes: int) -> dict[tuple[int, int], list[list[Transfer]]]:
    """What each sender sends to each receiver in each round, as both of them compute it."""
    capacity = pair_capacity(plan, bucket_bytes)
    found = {}
    moves = {rank: plan.of(rank) for rank in range(plan.num_ranks)}
    givers, takers = (
        [Places(layout, rank) for rank in range(plan.num_ranks)]
        for layout in (plan.source, plan.target)
    )
    pairs = {(move.source, move.target) for own in moves.values() for move in own.send}
    for source, target in sorted(pairs):
        sent = [move for move in moves[source].send if move.target == target]
        assert sent == [move for move in moves[target].receive if move.source == source]
        places = givers[source], takers[target]
        found[source, target] = in_rounds(transfers(sent, *places), capacity)
    return found


def put(tensors: Stored, region: Region, values: NDArray[np.float32]) -> None:
    assert np.isnan(tensors[region.key][region.slices]).all(), f"{region} arrives twice"
    tensors[region.key][region.slices] = values
    assert tensors[region.key][region.slices].flags.c_contiguous == region.is_contiguous


def run_rounds(plan: Plan, bucket_bytes: int) -> int:
    """Moves what ranks store. Returns the number of rounds."""
    weights, ranks = global_weights(plan.source), range(plan.num_ranks)
    old = [stored(weights, plan.source, rank) for rank in ranks]
    wanted = [stored(weights, plan.target, rank) for rank in ranks]
    new = [{key: np.full_like(value, np.nan) for key, value in own.items()} for own in wanted]
    for rank in ranks:
        places = Places(plan.source, rank), Places(plan.target, rank)
        for part in transfers(plan.of(rank).keep, *places):
            put(new[rank], part.target, old[rank][part.source.key][part.source.slices])
    by_pair = pair_rounds(plan, bucket_bytes)
    for (source, target), rounds in by_pair.items():
        for part in chain(*rounds):
            put(new[target], part.target, old[source][part.source.key][part.source.slices])
    for found, expected in zip(new, wanted, strict=True):
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values, err_msg=key)
    check_sizes(plan, by_pair, bucket_bytes)
    return max(map(len, by_pair.values()), default=0)


def check_sizes(
    plan: Plan, by_pair: dict[tuple[int, int], list[list[Transfer]]], bucket_bytes: int
) -> None:
    """No rank sends or receives more than a bucket, but for rows that are larger than its share of one."""
    capacity, sums = pair_capacity(plan, bucket_bytes), Counter()
    for (source, target), rounds in by_pair.items():
        for number, parts in enumerate(rounds):
            assert parts, "a round without a part"
            size = sum(part.size for part in parts)
            # Of experts a row is one of a matrix.
            *outer, _ = parts[0].source.shape if parts[0].source.shape[1:] else (size, 1)
            assert size <= capacity or (len(parts) == 1 and prod(outer) == 1)
            sums["from", source, number] += min(size, capacity)
            sums["to", target, number] += min(size, capacity)
    assert max(sums.values(), default=0) * plan.itemsize <= max(bucket_bytes, capacity * 8)


def drawn_mesh(choose: random.Random, stages: tuple[int, ...]) -> Mesh:
    while True:
        dp, tp, pp = choose.randint(1, 8), choose.choice((1, 2, 4, 8)), choose.choice(stages)
        if dp * tp * pp <= 8:
            return Mesh(dp, tp, pp)


def pairs() -> Iterator[tuple[Mesh, Mesh]]:
    yield from BY_HAND
    choose = random.Random(11)
    for _ in range(200):
        train, infer = drawn_mesh(choose, (1, 2, 3, 4, 8)), drawn_mesh(choose, (1,))
        yield choose.choice(((train, infer), (infer, train)))


def check_only_what_is_missing_moves(plan: Plan) -> None:
    missing = 0
    for rank in range(plan.num_ranks):
        held, own = plan.source.held_by(rank), 0
        for name, wanted in plan.target.held_by(rank).items():
            mine, needed = (np.zeros(plan.source.by_name[name].shape, bool) for _ in range(2))
            needed[wanted.slices] = True
            if name in held:
                mine[held[name].slices] = True
            own += int((needed & ~mine).sum())
        for move in plan.of(rank).receive:
            assert move.name not in held or move.box.intersect(held[move.name]) is None
        assert plan.received_bytes(rank) == own * plan.itemsize
        missing += own * plan.itemsize
    assert plan.bytes_moved == plan.lower_bound == missing


def check_senders_and_receivers_tell_of_the_same_moves(plan: Plan) -> None:
    sent: Counter[Move] = Counter()
    received: Counter[Move] = Counter()
    for rank in range(plan.num_ranks + 2):
        mine = plan.of(rank)
        assert all(move.source == move.target == rank for move in mine.keep)
        assert all(move.target == rank != move.source for move in mine.receive)
        assert all(move.source == rank != move.target for move in mine.send)
        assert sum(move.size for move in mine.send) * plan.itemsize == plan.sent_bytes(rank)
        assert sum(move.size for move in mine.receive) * plan.itemsize == plan.received_bytes(rank)
        assert Counter(plan.moves_in(rank)) == Counter(mine.keep + mine.receive)
        sent.update(mine.send)
        received.update(mine.receive)
    assert sent == received and set(sent.values()) <= {1}


def check_ranks_that_hold_the_same_send_alike(plan: Plan) -> None:
    largest = max(part.size for part in plan.segments) * plan.itemsize
    for rank in range(plan.source.mesh.size):
        loads = [plan.sent_bytes(other) for other in plan.source.mesh.group(rank, ("dp",))]
        assert max(loads) - min(loads) <= largest


def check_rounds_through_buckets(plan: Plan) -> None:
    run_rounds(plan, 64)
    run_rounds(plan, 333)
    assert run_rounds(plan, 1 << 20) == (plan.bytes_moved > 0)


def check_another_is_the_same(plan: Plan) -> None:
    """Ranks plan on their own, and have to agree."""
    source, target = (Layout.of(side.mesh, side.specs) for side in (plan.source, plan.target))
    other = plan_reshard(source, target, plan.itemsize)
    for rank in range(plan.num_ranks):
        assert plan.of(rank) == other.of(rank)
    assert pair_rounds(plan, 96) == pair_rounds(other, 96)


def test_a_plan_brings_the_target_what_it_lacks_and_nothing_else(
    subtests: pytest.Subtests,
) -> None:
    """Rounds are made of a plan's moves, whatever the layouts: some of the plans go through them."""
    for number, (source, target) in enumerate(pairs()):
        tied, itemsize = number % 2 == 1, (4, 2)[number // 2 % 2]
        with subtests.test(source=str(source), target=str(target), tied=tied, itemsize=itemsize):
            plan = plan_reshard(*layouts(source, target, tied), itemsize)
            run_moves(plan)
            check_only_what_is_missing_moves(plan)
            check_senders_and_receivers_tell_of_the_same_moves(plan)
            check_ranks_that_hold_the_same_send_alike(plan)
            if number < len(BY_HAND) or number % 20 == 0:
                check_another_is_the_same(plan)
                check_rounds_through_buckets(plan)


def test_tensors_that_are_cut_alike_move_whole_and_in_place() -> None:
    """Where no share is short: padding would lie between what is stored side by side."""
    specs = decoder_specs(5, intermediate=12, vocabulary=16)
    source, target = (Layout.of(mesh, specs) for mesh in (Mesh(1, 4, 2), Mesh(2, 4)))
    plan = plan_reshard(source, target)
    num_fused = 0
    for rounds in pair_rounds(plan, 1 << 20).values():
        moved = list(chain(*rounds))
        keys = [part.source.key for part in moved]
        assert all(part.source.is_contiguous and part.target.is_contiguous for part in moved)
        # Parameters that are stored side by side are one: no tensor is sent to a rank twice.
        assert len(keys) == len(set(keys))
        num_fused += sum(".fused." in key for key in keys)
    assert num_fused > 0


def test_the_design_layout_keeps_its_stage_and_fetches_the_other() -> None:
    source, target = layouts(Mesh(1, 4, 2), Mesh(2, 4))
    plan = plan_reshard(source, target)
    for rank in range(8):
        want, have = target.held_by(rank).keys(), source.held_by(rank).keys()
        assert {move.name for move in plan.of(rank).keep} == want & have
        assert {move.name for move in plan.of(rank).receive} == want - have


def test_parts_that_are_cut_along_different_dims_meet() -> None:
    rows = ParameterSpec("w", (7, 10), (Split("tp", 0),), position="first", decay=True)
    columns = replace(rows, splits=(Split("tp", 1),))
    source, target = (Layout.of(Mesh(2, 4), (spec,)) for spec in (rows, columns))
    plan = plan_reshard(source, target)
    run_moves(plan)
    run_rounds(plan, 64)
    assert plan.bytes_moved == plan.lower_bound


def test_scalars_and_empty_models_are_carried() -> None:
    scalar = (ParameterSpec("s", (), position="first", decay=False),)
    for specs in (scalar, ()):
        plan = plan_reshard(Layout.of(Mesh(1, 1), specs), Layout.of(Mesh(1, 4), specs))
        run_moves(plan)
        assert plan.bytes_moved == plan.lower_bound == len(specs) * 3 * 4


def with_moves(plan: Plan, rows: NDArray[np.int64]) -> Plan:
    return replace(
        plan,
        part_of_move=plan.part_of_move[rows],
        source_of_move=plan.source_of_move[rows],
        target_of_move=plan.target_of_move[rows],
    )


def test_a_move_left_out_or_doubled_does_not_pass_the_simulation() -> None:
    plan = planned(Mesh(1, 4, 2), Mesh(2, 4))
    last = len(plan.part_of_move) - 1
    shorter = with_moves(plan, np.arange(last))
    longer = with_moves(plan, np.append(np.arange(last + 1), last))
    with pytest.raises(AssertionError, match="differs"):
        run_moves(shorter)
    with pytest.raises(AssertionError, match="twice"):
        run_moves(longer)


def test_layouts_of_different_models_are_refused() -> None:
    source, target = layouts(Mesh(1, 1), Mesh(1, 2))
    fewer = replace(target, specs=target.specs[:-1])
    wider = replace(target, specs=(replace(target.specs[0], shape=(14, 6)), *target.specs[1:]))
    with pytest.raises(UserError, match=r"lm_head\.weight has the shape .* None in DP1/MP2"):
        plan_reshard(source, fewer)
    with pytest.raises(UserError, match=r"lm_head\.weight has the shape None"):
        plan_reshard(fewer, source)
    with pytest.raises(UserError, match=r"\(13, 6\) .* \(14, 6\)"):
        plan_reshard(source, wider)


def test_a_bucket_smaller_than_a_row_carries_one() -> None:
    assert run_rounds(planned(Mesh(1, 1), Mesh(2, 1)), 1)


def test_a_72b_model_on_1024_ranks_can_be_planned() -> None:
    specs = decoder_specs(80, 8192, 64, 8, 128, 29568, 152064)
    source, target = Layout.of(Mesh(8, 8, 16), specs), Layout.of(Mesh(128, 8), specs)
    plan = plan_reshard(source, target, itemsize=2)
    assert plan.bytes_moved == plan.lower_bound
    for rank in (0, 777, 1023):
        mine = plan.of(rank)
        total = sum(move.size for move in mine.keep + mine.receive)
        assert total == sum(box.size for box in plan.target.held_by(rank).values())
        assert sum(move.size for move in mine.receive) * 2 == plan.received_bytes(rank)


def test_parts_whose_columns_follow_each_other_move_as_one_only_in_the_same_rows() -> None:
    def region(rows: slice, columns: slice) -> Region:
        return Region("w", (rows, columns), (4, 6))

    upper, lower = slice(0, 2), slice(2, 4)
    left, right = slice(0, 3), slice(3, 6)
    first, beside, below = region(upper, left), region(upper, right), region(lower, right)
    assert [*_joined([Transfer(first, first), Transfer(beside, beside)])] == [
        Transfer(region(upper, slice(0, 6)), region(upper, slice(0, 6)))
    ]
    apart = [Transfer(first, first), Transfer(below, below)]
    assert [*_joined(apart)] == apart
