"""Checkpoints from any layout into any other, bit for bit, with ranks as threads and no device.

Does not prove that a trainer's state is all there (test_resume.py does), nor what damaged files lead to
(test_checkpoint_damage.py).
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_model import MODEL, ROLES, WITH_EXPERTS, filled, layout, save, value
from ranks_as_threads import run
from safetensors import safe_open

from mindgrpo.checkpoint.format import VERSION, read_manifest
from mindgrpo.checkpoint.load import check_tensors, load_role
from mindgrpo.checkpoint.save import Chunk, cut, plan_chunks, values_digest
from mindgrpo.parallel.sharding import Box
from mindgrpo.weights.model_files import by_rows, copy

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 4, 2), (2, 2, 2), (1, 2, 4), (4, 2, 1)]


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def load_and_compare(
    backend: Any, folder: Path, mesh: tuple[int, ...], model: dict[str, Any] = MODEL
) -> dict[str, str]:
    roles = filled(backend, layout(mesh, model), empty=True)
    manifest = read_manifest(folder)
    check_tensors(folder, manifest, roles)
    for role, weights in roles.items():
        load_role(folder, manifest, role, weights)
        for spec in weights.specs():
            if spec.name in weights.arrays.hf_views:
                whole = value(role, spec.name, spec.shape)
                expected = whole[weights.boxes[spec.name].slices]
                assert bits(weights.arrays.hf_views[spec.name]) == bits(expected), (role, spec.name)
    return {role: values_digest(weights, backend) for role, weights in roles.items()}


def test_a_checkpoint_of_any_layout_loads_into_others_bit_for_bit(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    """Into itself and two others each, so that each is loaded from three: which boxes overlap, plans prove of more."""
    for i, saved in enumerate(MESHES):
        folder = run(np.prod(saved), save, tmp_path / str(i), saved, saved[0] == 1)[0]
        told = read_manifest(folder).sums
        for mesh in (MESHES[(i + step) % len(MESHES)] for step in (0, 1, 3)):
            with subtests.test(saved=saved, loaded=mesh):
                digests = run(int(np.prod(mesh)), load_and_compare, folder, mesh)
                assert all(digest == told for digest in digests)


def test_experts_go_from_any_split_to_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Data, model, stages, rows, experts, inside of experts; an expert's matrix is cut in chunks.
    meshes = [(1, 1), (4, 1, 1, 1, 4), (2, 2, 1, 1, 2, 2), (2, 1, 2, 1, 2)]
    in_chunks = partial(plan_chunks, chunk_bytes=500)
    monkeypatch.setattr("mindgrpo.checkpoint.save.plan_chunks", in_chunks)
    for saved in meshes[:3]:
        run_directory = tmp_path / str(meshes.index(saved))
        ranks = int(np.prod(saved[:3]))
        folder = run(ranks, save, run_directory, saved, False, 3, WITH_EXPERTS)[0]
        told = read_manifest(folder).sums
        for mesh in meshes:
            digests = run(int(np.prod(mesh[:3])), load_and_compare, folder, mesh, WITH_EXPERTS)
            assert all(digest == told for digest in digests), mesh


def test_its_files_are_safetensors_that_others_read(tmp_path: Path) -> None:
    folder = run(4, save, tmp_path, (1, 2, 2), False)[0]
    found: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for key in file.keys():  # noqa: SIM118
                role, _, rest = key.partition("/")
                name = rest.partition("[")[0]
                found[role] += file.get_tensor(key).size
                assert name.startswith("model.")
    sizes = sum(int(np.prod(spec.shape)) for spec in layout((1, 1, 1)).specs)
    assert found == dict.fromkeys(ROLES, sizes)


def test_every_element_is_written_once_and_by_a_rank_that_holds_it() -> None:
    for mesh, chunk_bytes in product(MESHES, (1, 400, 1 << 20)):
        place = layout(mesh)
        plan = plan_chunks({"policy": place, "first": place}, place.mesh.size, chunk_bytes)
        seen = {
            (role, spec.name): np.zeros(spec.shape, int)
            for role in ("policy", "first")
            for spec in place.specs
        }
        for rank, chunks in enumerate(plan):
            held = place.held_by(rank)
            for chunk in chunks:
                assert chunk.box.intersect(held[chunk.name]) == chunk.box
                seen[chunk.role, chunk.name][chunk.box.slices] += 1
        assert all((count == 1).all() for count in seen.values())


def test_replicas_share_the_writing_out_evenly() -> None:
    place = layout((4, 1, 2))
    loads = [
        sum(c.num_bytes for c in chunks) for chunks in plan_chunks({"p": place}, 8, chunk_bytes=512)
    ]
    # Of two stages that differ in size, each stage's four replicas write alike.
    for stage in (loads[:4], loads[4:]):
        assert max(stage) - min(stage) <= 512


def test_a_rank_outside_the_layout_writes_nothing() -> None:
    assert plan_chunks({"p": layout((1, 2, 1))}, 4)[2:] == [[], []]


def test_chunks_are_cut_where_a_file_would_have_to_be_read_whole() -> None:
    box = Box((2, 1), (9, 5))
    parts = list(cut(box, 2 * 16))
    assert [part.start[0] for part in parts] == [2, 4, 6, 8]
    assert parts[-1].stop == (9, 5)
    assert list(cut(Box((), ()), 1)) == [Box((), ())]
    experts = list(cut(Box((2, 1, 0), (4, 5, 3)), 2 * 12))
    assert [part.start for part in experts] == [(2, 1, 0), (2, 3, 0), (3, 1, 0), (3, 3, 0)]
    assert {part.shape for part in experts} == {(1, 2, 3)}
    assert len(list(cut(Box((2, 1, 0), (4, 5, 3)), 2 * 48))) == 1
    assert Chunk("a", "b", box).key == "a/b[2:9,1:5]"


def test_nothing_is_left_beside_the_checkpoint(tmp_path: Path) -> None:
    folder = run(2, save, tmp_path, (1, 2, 1), True)[0]
    assert folder == tmp_path / "checkpoints" / "step_000003"
    assert [path.name for path in folder.parent.iterdir()] == ["step_000003"]
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["manifest.json", "rank_00000.safetensors", "rank_00001.safetensors"]
    assert json.loads((folder / "manifest.json").read_text())["version"] == VERSION


def test_another_models_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    folder = run(1, save, tmp_path, (1, 1, 1), False)[0]
    manifest = read_manifest(folder)

    def other(backend: Any, change: dict[str, Any]) -> None:
        from mindgrpo.weights.local_weights import Weights

        place = layout((1, 1, 1), MODEL | change)
        check_tensors(folder, manifest, {r: Weights(place, 0, backend) for r in ROLES})

    with pytest.raises(
        Exception, match=r"has the shape \[21, 16\] in .*manifest.json, but \[22, 16\]"
    ):
        run(1, other, {"intermediate_size": 22})
    with pytest.raises(Exception, match="has a tensor model.layers.3"):
        run(1, other, {"num_hidden_layers": 3})
    with pytest.raises(Exception, match="has no tensor lm_head.weight of policy"):
        run(1, other, {"tie_word_embeddings": False})


def test_matrices_are_turned_tile_by_tile_into_any_order() -> None:
    for shape in ((1, 1), (64, 256), (65, 257), (300, 3), (3, 700)):
        whole = value("a", "b", shape)
        for source in (whole, np.asfortranarray(whole), whole[::1, :: max(1, shape[1] // 2)]):
            for order in "CF":
                target = np.zeros(source.shape, np.float32, order=order)
                copy(target, source)
                assert bits(target) == bits(source)
    assert bits(by_rows(value("a", "b", (5,)))) == bits(value("a", "b", (5,)))
