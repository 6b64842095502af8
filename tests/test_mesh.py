"""Coordinates and groups of ranks. Does not prove that a backend forms the same groups."""

from __future__ import annotations

from itertools import product

import pytest

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import Mesh

MESHES = [Mesh(*axes) for axes in product((1, 2, 3), (1, 2, 4), (1, 2, 5))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rank_is_stage_then_data_then_model(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        assert rank == (at.stage * mesh.data_parallel + at.data) * mesh.model_parallel + at.model
        assert mesh.array[at.stage, at.data, at.model] == rank


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_group_shares_every_coordinate_but_its_own(mesh: Mesh) -> None:
    groups = {
        "model": (mesh.model_group, mesh.model_parallel),
        "data": (mesh.data_group, mesh.data_parallel),
        "stage": (mesh.stage_group, mesh.pipeline_stage),
    }
    for rank in range(mesh.size):
        for axis, (group_of, length) in groups.items():
            group = group_of(rank)
            assert rank in group
            assert group == tuple(sorted(group)) and len(group) == length
            places = [mesh.coordinates(other)._replace(**{axis: 0}) for other in group]
            assert len(set(places)) == 1
            assert all(group_of(other) == group for other in group)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_replicas_partition_the_mesh_in_the_order_of_stages(mesh: Mesh) -> None:
    replicas = [mesh.replica(data) for data in range(mesh.data_parallel)]
    assert sorted(sum(replicas, ())) == list(range(mesh.size))
    for data, replica in enumerate(replicas):
        places = [mesh.coordinates(rank) for rank in replica]
        assert [(p.stage, p.data, p.model) for p in places] == [
            (stage, data, model)
            for stage in range(mesh.pipeline_stage)
            for model in range(mesh.model_parallel)
        ]


def test_groups_hold_plain_integers() -> None:
    mesh = Mesh(2, 2, 2)
    for rank in (*mesh.model_group(3), *mesh.replica(1), *mesh.coordinates(5)):
        assert type(rank) is int


def test_text_names_the_axes_that_matter() -> None:
    assert str(Mesh(1, 4, 2)) == "DP1/MP4/PP2"
    assert str(Mesh(2, 4)) == "DP2/MP4"


def test_rank_outside_the_mesh_is_refused_with_the_layout() -> None:
    with pytest.raises(UserError, match=r"rank 4 .* DP2/MP2, which has 4 ranks"):
        Mesh(2, 2).coordinates(4)
    with pytest.raises(UserError, match="rank -1"):
        Mesh(2, 2).model_group(-1)
    with pytest.raises(IndexError):
        Mesh(2, 2).replica(2)
    assert not Mesh(2, 2).holds(4)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_axis_must_be_a_positive_whole_number(value: object) -> None:
    with pytest.raises(UserError, match="model_parallel"):
        Mesh(1, value)  # type: ignore[arg-type]


def test_the_array_cannot_be_changed() -> None:
    with pytest.raises(ValueError):
        Mesh(1, 2).array[0, 0, 0] = 7
