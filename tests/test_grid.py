"""Coordinates and groups of ranks. Does not prove that a backend forms the same groups."""

from __future__ import annotations

from itertools import product

import pytest

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Grid

GRIDS = [Grid(*axes) for axes in product((1, 2, 3), (1, 2, 4), (1, 2, 5))]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rank_is_stage_then_data_then_model(grid: Grid) -> None:
    for rank in range(grid.size):
        at = grid.coordinates(rank)
        assert rank == (at.stage * grid.data_parallel + at.data) * grid.model_parallel + at.model
        assert grid.array[at.stage, at.data, at.model] == rank


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_group_shares_every_coordinate_but_its_own(grid: Grid) -> None:
    groups = {
        "model": (grid.model_group, grid.model_parallel),
        "data": (grid.data_group, grid.data_parallel),
        "stage": (grid.stage_group, grid.pipeline_stage),
    }
    for rank in range(grid.size):
        for axis, (group_of, length) in groups.items():
            group = group_of(rank)
            assert rank in group
            assert group == tuple(sorted(group)) and len(group) == length
            places = [grid.coordinates(other)._replace(**{axis: 0}) for other in group]
            assert len(set(places)) == 1
            assert all(group_of(other) == group for other in group)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_replicas_partition_the_grid_in_the_order_of_stages(grid: Grid) -> None:
    replicas = [grid.replica(data) for data in range(grid.data_parallel)]
    assert sorted(sum(replicas, ())) == list(range(grid.size))
    for data, replica in enumerate(replicas):
        places = [grid.coordinates(rank) for rank in replica]
        assert [(p.stage, p.data, p.model) for p in places] == [
            (stage, data, model)
            for stage in range(grid.pipeline_stage)
            for model in range(grid.model_parallel)
        ]


def test_groups_hold_plain_integers() -> None:
    grid = Grid(2, 2, 2)
    for rank in (*grid.model_group(3), *grid.replica(1), *grid.coordinates(5)):
        assert type(rank) is int


def test_text_names_the_axes_that_matter() -> None:
    assert str(Grid(1, 4, 2)) == "DP1/MP4/PP2"
    assert str(Grid(2, 4)) == "DP2/MP4"


def test_rank_outside_the_grid_is_refused_with_the_layout() -> None:
    with pytest.raises(UserError, match=r"rank 4 .* DP2/MP2, which has 4 ranks"):
        Grid(2, 2).coordinates(4)
    with pytest.raises(UserError, match="rank -1"):
        Grid(2, 2).model_group(-1)
    with pytest.raises(IndexError):
        Grid(2, 2).replica(2)
    assert not Grid(2, 2).holds(4)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_axis_must_be_a_positive_whole_number(value: object) -> None:
    with pytest.raises(UserError, match="model_parallel"):
        Grid(1, value)  # type: ignore[arg-type]


def test_the_array_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        Grid(1, 2).array[0, 0, 0] = 7
