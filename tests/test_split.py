"""Which part of a parameter each rank holds. Does not prove that a model computes with it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import (
    Box,
    Layout,
    ParameterSpec,
    Position,
    Split,
    StageLayers,
    box_of,
    layers_of_stage,
    local_shape,
)


def spec_of(
    shape: tuple[int, ...],
    dim: int | None,
    unit: int = 1,
    replicate: bool = False,
    position: Position = "first",
    name: str = "w",
) -> ParameterSpec:
    splits = () if dim is None else (Split("tp", dim, unit, replicate),)
    return ParameterSpec(name, shape, splits, position=position, decay=True)


def boxes_of(spec: ParameterSpec, ways: int) -> list[Box]:
    """By the ranks of a model group."""
    return [box_of(spec, Mesh(1, ways), {"tp": index}) for index in range(ways)]


def num_replicas(spec: ParameterSpec, ways: int) -> int:
    boxes = boxes_of(spec, ways)
    return boxes.count(boxes[0])


SPLITS = [
    spec_of((13, 6), 0, name="vocabulary no tp divides"),
    spec_of((3, 2), 0, name="fewer rows than ranks"),
    spec_of((5, 16), 1, name="columns"),
    spec_of((16, 3), 0, unit=2, name="eight heads"),
    spec_of((6, 16), 1, unit=2, name="eight heads in columns"),
    spec_of((4, 3), 0, unit=2, replicate=True, name="two key heads"),
    spec_of((2,), 0, unit=2, replicate=True, name="bias of one key head"),
    spec_of((7,), None, name="norm"),
    spec_of((), None, name="scalar"),
]


@each_row("ways", [1, 2, 4, 8])
@each_row("spec", SPLITS)
def test_boxes_put_together_are_the_parameter(spec: ParameterSpec, ways: int) -> None:
    whole = np.arange(np.prod(spec.shape, dtype=int)).reshape(spec.shape)
    replicas = num_replicas(spec, ways)
    boxes = boxes_of(spec, ways)
    groups = [boxes[first : first + replicas] for first in range(0, ways, replicas)]
    assert all(len(set(group)) == 1 for group in groups)
    shares = [whole[group[0].slices] for group in groups]
    if not spec.splits:
        assert len(shares) == 1 and np.array_equal(shares[0], whole)
    else:
        assert np.array_equal(np.concatenate(shares, axis=spec.splits[0].dim), whole)
        assert len({box for box in boxes if box.size}) == sum(map(bool, map(np.size, shares)))


@each_row("ways", [1, 2, 4, 8])
@each_row("spec", SPLITS)
def test_local_shape_fits_every_rank_and_is_no_larger_than_the_first(
    spec: ParameterSpec, ways: int
) -> None:
    shape, boxes = local_shape(spec, Mesh(1, ways)), boxes_of(spec, ways)
    assert shape == boxes[0].shape
    for box in boxes:
        assert all(own <= room for own, room in zip(box.shape, shape, strict=True))
        for split in spec.splits:
            assert box.start[split.dim] % split.unit == box.stop[split.dim] % split.unit == 0


def test_shares_are_rounded_up_and_the_last_may_be_empty() -> None:
    vocabulary = spec_of((13, 6), 0)
    sizes = [box.shape[0] for box in boxes_of(vocabulary, 8)]
    assert sizes == [2, 2, 2, 2, 2, 2, 1, 0]
    assert local_shape(vocabulary, Mesh(1, 8)) == (2, 6)


def test_neighbours_share_a_key_head_where_ranks_outnumber_heads() -> None:
    keys = spec_of((4, 3), 0, unit=2, replicate=True)
    starts = [box.start[0] for box in boxes_of(keys, 4)]
    assert starts == [0, 0, 2, 2]
    assert [num_replicas(keys, ways) for ways in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert num_replicas(spec_of((7,), None), 4) == 4


def test_query_heads_meet_their_key_head_on_the_same_rank() -> None:
    num_heads, num_kv_heads, unit = 8, 2, 2
    queries = spec_of((num_heads * unit, 3), 0, unit=unit)
    keys = spec_of((num_kv_heads * unit, 3), 0, unit=unit, replicate=True)
    for ways in (1, 2, 4, 8):
        for query, key in zip(boxes_of(queries, ways), boxes_of(keys, ways), strict=True):
            needed = {
                head // (num_heads // num_kv_heads)
                for head in range(query.start[0] // unit, query.stop[0] // unit)
            }
            assert needed == set(range(key.start[0] // unit, key.stop[0] // unit))


def test_heads_that_do_not_divide_are_refused_with_their_number() -> None:
    with pytest.raises(UserError, match=r"num_attention_heads 6 .* model_parallel 4 .*divisor"):
        boxes_of(spec_of((12, 3), 0, unit=2), 4)
    keys = spec_of((12, 3), 0, unit=2, replicate=True)
    with pytest.raises(UserError, match=r"num_key_value_heads 6 .* model_parallel 4 "):
        local_shape(keys, Mesh(1, 4))
    with pytest.raises(UserError, match="num_key_value_heads 6"):
        Layout.of(Mesh(1, 4), (keys,))


def test_a_dim_that_cuts_a_head_is_refused() -> None:
    with pytest.raises(UserError, match="head size 4"):
        spec_of((6, 3), 0, unit=4)


def test_boxes_intersect_as_index_sets_do() -> None:
    def cells(box: Box | None) -> set[tuple[int, ...]]:
        return set() if box is None else set(product(*map(range, box.start, box.stop)))

    spans = [(a, b) for a in range(4) for b in range(a, 4)]
    boxes = [Box((a, c), (b, d)) for (a, b), (c, d) in product(spans, spans)]
    for one, other in product(boxes, boxes):
        common = one.intersect(other)
        assert cells(common) == cells(one) & cells(other)
        assert common is None or common.size == len(cells(common)) > 0


def test_a_box_within_another_addresses_the_same_elements() -> None:
    whole = np.arange(40).reshape(5, 8)
    outer, inner = Box((1, 2), (5, 8)), Box((2, 3), (4, 6))
    assert np.array_equal(whole[outer.slices][inner.within(outer).slices], whole[inner.slices])
    with pytest.raises(ValueError):
        outer.within(inner)


@each_row("num_layers", [1, 4, 5, 9, 80])
@each_row("stages", [1, 2, 3, 4, 8])
def test_stages_take_every_layer_once_and_differ_by_one_at_most(
    num_layers: int, stages: int
) -> None:
    if num_layers < stages:
        with pytest.raises(UserError, match="each of which needs a layer; lower pipeline_stage"):
            layers_of_stage(num_layers, stages)
        return
    ranges = layers_of_stage(num_layers, stages)
    assert [layer for (layers,) in ranges for layer in layers] == list(range(num_layers))
    lengths = [len(layers) for (layers,) in ranges]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_offset_moves_layers_as_in_mindformers() -> None:
    lengths = [len(layers) for (layers,) in layers_of_stage(48, 5, [0, 1, 1, 1, 0])]
    assert lengths == [9, 10, 10, 10, 9]
    assert layers_of_stage(8, 2, [-1, 1]) == ((range(0, 3),), (range(3, 8),))
    assert layers_of_stage(8, 2, 0) == layers_of_stage(8, 2, (0, 0))


@pytest.mark.parametrize("offset", [[1, 1], [0], [0, 0, 0], [0, 1]])
def test_offset_that_does_not_add_up_is_refused(offset: list[int]) -> None:
    with pytest.raises(UserError, match=r"offset .* 2 entries .* sum 0"):
        layers_of_stage(8, 2, offset)


def test_a_number_as_offset_is_refused_unless_it_is_0() -> None:
    with pytest.raises(UserError, match="offset is 1"):
        layers_of_stage(8, 2, 1)
    with pytest.raises(UserError, match=r"as \[0, 8\]"):
        layers_of_stage(8, 2, [-4, 4])


def test_chunks_are_dealt_to_stages_in_turn_and_none_is_without_a_layer() -> None:
    for num_layers, stages, chunks in product(range(1, 26), range(2, 5), range(2, 4)):
        if num_layers < stages * chunks:
            with pytest.raises(UserError, match=r"lower pipeline_stage \d or pp_interleave_num \d"):
                layers_of_stage(num_layers, stages, 0, chunks)
            continue
        dealt = layers_of_stage(num_layers, stages, 0, chunks)
        parts = [dealt[part % stages][part // stages] for part in range(stages * chunks)]
        assert [layer for part in parts for layer in part] == list(range(num_layers))
        lengths = [len(part) for part in parts]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1
        assert layers_of_stage(num_layers, stages) == layers_of_stage(num_layers, stages, 0, 1)


def test_offset_moves_layers_of_chunks_as_in_mindformers() -> None:
    dealt = layers_of_stage(9, 2, [[1, 0], [0, 0]], 2)
    assert dealt == ((range(0, 3), range(5, 7)), (range(3, 5), range(7, 9)))
    for offset in ([1, 0], [[1, 0]], [[1, 0], [0]], [[1, 0, 0], [0]], [[0, 0], [0, 0]]):
        with pytest.raises(UserError, match=r"2 lists \(one a chunk\) of 2 entries .* sum 1"):
            layers_of_stage(9, 2, offset, 2)
    with pytest.raises(UserError, match=r"as \[1, 2, 0, 1\]"):
        layers_of_stage(4, 2, [[0, 1], [-1, 0]], 2)


def test_places_become_stages() -> None:
    def stages_of(position: Position, stage_layers: StageLayers) -> tuple[int, ...]:
        spec = spec_of((2,), None, position=position)
        return Layout(Mesh(1, 1, len(stage_layers)), (spec,), stage_layers).stages_of("w")

    stage_layers = layers_of_stage(5, 3)
    expected: dict[Position, tuple[int, ...]] = {
        "first": (0,),
        "last": (2,),
        "first_and_last": (0, 2),
        1: (0,),
        2: (1,),
        4: (2,),
    }
    for position, stages in expected.items():
        assert stages_of(position, stage_layers) == stages
    assert stages_of("first_and_last", ((range(5),),)) == (0,)
    interleaved = ((range(1), range(2, 3)), (range(1, 2), range(3, 5)))
    assert [stages_of(layer, interleaved) for layer in range(5)] == [(0,), (1,), (0,), (1,), (1,)]
    with pytest.raises(ValueError, match="layer 5"):
        stages_of(5, stage_layers)


def small_layout(mesh: Mesh) -> Layout:
    specs = (
        spec_of((13, 6), 0, position="first_and_last", name="embedding"),
        *(spec_of((4, 6), 0, 2, True, position=i, name=f"key.{i}") for i in range(5)),
        spec_of((6,), None, position="last", name="norm"),
    )
    return Layout.of(mesh, specs)


@pytest.mark.parametrize("mesh", [Mesh(1, 1), Mesh(2, 2, 2), Mesh(1, 8), Mesh(1, 4, 5)], ids=str)
def test_held_by_and_ranks_by_box_agree(mesh: Mesh) -> None:
    layout = small_layout(mesh)
    held = {
        (spec.name, rank): box
        for rank in range(mesh.size + 3)
        for spec in layout.specs
        for name, box in layout.held_by(rank).items()
        if name == spec.name
    }
    told = {
        (spec.name, rank): box
        for spec in layout.specs
        for box, ranks in layout.ranks_by_box(spec.name).items()
        for rank in ranks
    }
    assert held == told
    for (name, rank), box in held.items():
        assert box == boxes_of(layout.by_name[name], mesh.tp)[mesh.index(rank, "tp")] and box.size
        assert mesh.index(rank, "pp") in layout.stages_of(name)


def test_one_replica_holds_everything() -> None:
    layout = small_layout(Mesh(2, 2, 2))
    for replica in layout.mesh.groups(("pp", "tp")):
        for spec in layout.specs:
            seen = np.zeros(spec.shape, int)
            for rank in replica:
                if spec.name in layout.held_by(rank):
                    seen[layout.held_by(rank)[spec.name].slices] += 1
            assert seen.min() >= 1


def test_ranks_off_the_mesh_and_empty_shares_hold_nothing() -> None:
    layout = small_layout(Mesh(1, 8))
    assert layout.held_by(8) == {}
    assert "embedding" not in layout.held_by(7) and "norm" in layout.held_by(7)
    assert sum(box.size for box in layout.held_by(7).values()) == 5 * 2 * 6 + 6


def test_what_a_caller_does_to_the_answer_does_not_change_the_layout() -> None:
    layout = small_layout(Mesh(1, 2))
    layout.held_by(0).clear()
    assert layout.held_by(0)
