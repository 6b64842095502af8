"""Plans are executed here on numpy arrays and compared bit for bit with the target's own cut.

Does not prove that a backend carries the pieces, nor how long a plan or a reshard takes.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import lru_cache
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
from mindgrpo.weight_sync.rounds import Piece, rounds

Weights = dict[str, NDArray[np.float32]]

# Worlds of 4 have no kind of pair that those of 2 and 8 lack.
WORLDS = (1, 2, 8)
DEGREES = (1, 2, 4, 8)
TRAIN_MESHES = [
    Mesh(size // (mp * pp), mp, pp)
    for size in WORLDS
    for pp in DEGREES
    for mp in DEGREES
    if size % (mp * pp) == 0
]
INFER_MESHES = [mesh for mesh in TRAIN_MESHES if mesh.pp == 1]
PAIRS = [(train, infer) for train in TRAIN_MESHES for infer in INFER_MESHES]


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
        decay = len(shape) > 1
        splits = () if dim is None else (Split("mp", dim, unit, replicate),)
        specs.append(ParameterSpec(name, shape, splits, position=position, decay=decay))

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


def run_rounds(plan: Plan, bucket_bytes: int) -> int:
    """Every round: all senders fill their buckets, then all receivers read. Returns the number."""
    cluster = Cluster(plan)
    cluster.keep()
    capacity = bucket_bytes // plan.itemsize
    all_rounds = rounds(plan, bucket_bytes)
    for pieces in all_rounds:
        buckets: defaultdict[int, NDArray[np.float32]] = defaultdict(
            lambda: np.full(capacity, np.nan, np.float32)
        )
        assert pieces, "a round without a piece"
        for piece in pieces:
            fill_bucket(cluster, buckets[piece.move.source], piece)
        for piece in pieces:
            start = piece.sender_offset
            values = buckets[piece.move.source][start : start + piece.box.size]
            cluster.put(
                piece.move.target, piece.move.name, piece.box, values.reshape(piece.box.shape)
            )
    cluster.check()
    return len(all_rounds)


def fill_bucket(cluster: Cluster, bucket: NDArray[np.float32], piece: Piece) -> None:
    values = cluster.take(piece.move.source, piece.move.name, piece.box).ravel()
    target = bucket[piece.sender_offset : piece.sender_offset + values.size]
    assert target.size == values.size, "a piece reaches beyond its bucket"
    assert np.isnan(target).all() or target.tobytes() == values.tobytes(), "pieces overlap"
    target[:] = values


def pair_id(value: object) -> str:
    return str(value)


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_the_target_gets_exactly_its_cut(train: Mesh, infer: Mesh) -> None:
    for source, target in ((train, infer), (infer, train)):
        run_moves(planned(source, target))


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_tied_embeddings_reach_both_ends(train: Mesh, infer: Mesh) -> None:
    for source, target in ((train, infer), (infer, train)):
        run_moves(planned(source, target, tied=True))


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_rounds_carry_the_same_through_small_buckets(train: Mesh, infer: Mesh) -> None:
    for bucket_bytes in (64, 333, 1 << 20):
        plan = planned(train, infer, tied=bucket_bytes == 333)
        num_rounds = run_rounds(plan, bucket_bytes)
        if bucket_bytes == 1 << 20:
            assert num_rounds == (plan.bytes_moved > 0)


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_no_byte_moves_that_need_not(train: Mesh, infer: Mesh) -> None:
    for source, target in (layouts(train, infer), layouts(infer, train)):
        plan = plan_reshard(source, target, itemsize=2)
        missing = 0
        for rank in range(plan.num_ranks):
            held, own = source.held_by(rank), 0
            for name, wanted in target.held_by(rank).items():
                mine, needed = (np.zeros(source.by_name[name].shape, bool) for _ in range(2))
                needed[wanted.slices] = True
                if name in held:
                    mine[held[name].slices] = True
                own += int((needed & ~mine).sum())
            assert plan.received_bytes(rank) == own * 2
            missing += own * 2
        assert plan.bytes_moved == plan.lower_bound == missing


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_what_a_rank_holds_is_never_sent_to_it(train: Mesh, infer: Mesh) -> None:
    for plan in (planned(train, infer), planned(infer, train)):
        for rank in range(plan.num_ranks):
            held = plan.source.held_by(rank)
            for move in plan.of(rank).receive:
                assert move.name not in held or move.box.intersect(held[move.name]) is None


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_senders_and_receivers_tell_of_the_same_moves(train: Mesh, infer: Mesh) -> None:
    plan = planned(train, infer)
    sent: Counter[Move] = Counter()
    received: Counter[Move] = Counter()
    for rank in range(plan.num_ranks + 2):
        mine = plan.of(rank)
        assert all(move.source == move.target == rank for move in mine.keep)
        assert all(move.target == rank != move.source for move in mine.receive)
        assert all(move.source == rank != move.target for move in mine.send)
        assert sum(move.size for move in mine.send) * 4 == plan.sent_bytes(rank)
        assert sum(move.size for move in mine.receive) * 4 == plan.received_bytes(rank)
        assert Counter(plan.moves_in(rank)) == Counter(mine.keep + mine.receive)
        sent.update(mine.send)
        received.update(mine.receive)
    assert sent == received and set(sent.values()) <= {1}


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_ranks_that_hold_the_same_send_alike(train: Mesh, infer: Mesh) -> None:
    for plan in (planned(train, infer), planned(infer, train)):
        largest = max(part.size for part in plan.segments) * plan.itemsize
        for rank in range(plan.source.mesh.size):
            loads = [plan.sent_bytes(other) for other in plan.source.mesh.group(rank, ("dp",))]
            assert max(loads) - min(loads) <= largest


@pytest.mark.parametrize("train, infer", PAIRS, ids=pair_id)
def test_the_same_layouts_give_the_same_plan_and_rounds(train: Mesh, infer: Mesh) -> None:
    one = plan_reshard(*layouts(train, infer))
    layouts.cache_clear()
    other = plan_reshard(*layouts(train, infer))
    for rank in range(one.num_ranks):
        assert one.of(rank) == other.of(rank)
    assert rounds(one, 96) == rounds(other, 96)


@pytest.mark.parametrize(
    "train, infer",
    [(Mesh(1, 4, 2), Mesh(2, 4)), (Mesh(4, 2), Mesh(1, 8)), (Mesh(1, 1), Mesh(8, 1))],
)
def test_a_rank_sees_its_own_pieces_of_the_same_rounds(train: Mesh, infer: Mesh) -> None:
    plan = planned(train, infer)
    everything = rounds(plan, 96)
    for rank in range(plan.num_ranks):
        own = [
            [piece for piece in pieces if rank in (piece.move.source, piece.move.target)]
            for pieces in everything
        ]
        mine = rounds(plan, 96, rank=rank)
        assert mine == own


def test_a_part_for_many_stands_in_the_bucket_once() -> None:
    plan = planned(Mesh(1, 1), Mesh(8, 1))
    (pieces,) = rounds(plan, sum(part.size for part in plan.segments) * 4)
    assert len({(piece.move.name, piece.sender_offset) for piece in pieces}) == len(plan.segments)
    assert len(pieces) == 7 * len(plan.segments)


def test_the_design_layout_keeps_its_stage_and_fetches_the_other() -> None:
    source, target = layouts(Mesh(1, 4, 2), Mesh(2, 4))
    plan = plan_reshard(source, target)
    for rank in range(8):
        want, have = target.held_by(rank).keys(), source.held_by(rank).keys()
        assert {move.name for move in plan.of(rank).keep} == want & have
        assert {move.name for move in plan.of(rank).receive} == want - have


def test_parts_that_are_cut_along_different_dims_meet() -> None:
    rows = ParameterSpec("w", (7, 10), (Split("mp", 0),), position="first", decay=True)
    columns = replace(rows, splits=(Split("mp", 1),))
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
        assert len(rounds(plan, 4)) == len(specs)
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


def test_a_bucket_smaller_than_a_row_is_refused_with_the_size_that_would_do() -> None:
    plan = planned(Mesh(1, 1), Mesh(2, 1))
    with pytest.raises(UserError, match="bucket of 60 bytes") as refusal:
        rounds(plan, 60)
    enough = int(re.findall(r"to (\d+) bytes", str(refusal.value))[0])
    assert run_rounds(plan, enough)


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
