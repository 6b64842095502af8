"""Indices and groups of ranks. Does not prove that a backend forms the same groups."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from tables import each_row

from mindgrpo.errors import UserError
from mindgrpo.parallel.mesh import DENSE, EXPERT, Mesh

MESHES = [
    *(Mesh(*axes) for axes in product((1, 2, 3), (1, 2, 4), (1, 2, 5))),
    *(Mesh(*axes) for axes in product((1, 2), (1, 2), (1, 3), (2, 4))),
]


@each_row("mesh", MESHES)
def test_rank_is_stage_then_data_then_context_then_model(mesh: Mesh) -> None:
    array = mesh.ranks()
    for rank in range(mesh.size):
        index = tuple(mesh.index(rank, axis) for axis in ("pp", "dp", "cp", "tp"))
        stage, data, context, model = index
        assert rank == ((stage * mesh.dp + data) * mesh.cp + context) * mesh.tp + model
        assert array[index] == rank


@each_row(
    "mesh",
    [*MESHES, Mesh(4, 2, 2, ep=4), Mesh(2, 4, 1, ep=2, etp=2), Mesh(2, 2, 1, 2, ep=4)],
)
def test_a_group_shares_every_index_but_its_own(mesh: Mesh) -> None:
    for view in (DENSE, EXPERT):
        array = mesh.ranks(view)
        for axes in (axes for n in range(4) for axes in combinations(view, n)):
            for rank in range(mesh.size):
                own = tuple(
                    slice(None) if axis in axes else mesh.index(rank, axis) for axis in view
                )
                group = mesh.group(rank, axes)
                assert group == tuple(array[own].ravel().tolist())
                assert len(group) == mesh.size_of(axes) and rank in group
            assert sorted(sum(mesh.groups(axes), ())) == list(range(mesh.size))


def test_experts_fold_the_ranks_of_a_stage_anew() -> None:
    mesh = Mesh(4, 2, 2, ep=4)
    assert mesh.edp == 2 and mesh.ranks(EXPERT).shape == (2, 2, 4, 1)
    assert mesh.group(1, ("ep",)) == (0, 1, 2, 3) and mesh.group(1, ("edp",)) == (1, 5)
    assert mesh.group(1, ("tp",)) == (0, 1) and mesh.group(1, ("dp",)) == (1, 3, 5, 7)
    with pytest.raises(
        UserError, match="expert_parallel 3 x expert_tensor_parallel 1 does not divide"
    ):
        Mesh(4, 2, ep=3)
    with pytest.raises(ValueError, match="no view"):
        mesh.group(0, ("dp", "ep"))


def test_a_spaced_mesh_has_groups_of_its_own_ranks() -> None:
    mesh = Mesh(2, 4).first_ranks
    assert mesh.group(4, ("dp",)) == (0, 4) and mesh.group(4, ("tp",)) == (4,)
    assert mesh.holds(4) and not mesh.holds(2) and mesh.end == 8


def test_groups_hold_plain_integers() -> None:
    mesh = Mesh(2, 2, 2)
    for rank in (*mesh.group(3, ("tp",)), *mesh.groups(("pp", "tp"))[1], mesh.index(5, "dp")):
        assert type(rank) is int


def test_text_names_the_axes_that_matter() -> None:
    assert str(Mesh(1, 4, 2)) == "DP1/MP4/PP2"
    assert str(Mesh(2, 4)) == "DP2/MP4" and str(Mesh(2, 4, cp=2)) == "DP2/MP4/CP2"


def test_rank_outside_the_mesh_is_refused_with_the_layout() -> None:
    with pytest.raises(UserError, match=r"rank 4 .* DP2/MP2, which has 4 ranks"):
        Mesh(2, 2).index(4, "dp")
    with pytest.raises(UserError, match="rank -1"):
        Mesh(2, 2).group(-1, ("tp",))
    assert not Mesh(2, 2).holds(4)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_axis_must_be_a_positive_whole_number(value: object) -> None:
    with pytest.raises(UserError, match="model_parallel"):
        Mesh(1, value)  # type: ignore[arg-type]
