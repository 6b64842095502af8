"""Ranks as threads read a model once and give each other what they lack.

Does not prove that it takes less time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks_as_threads
from checkpoint_model import layout, value

from mindgrpo.parallel.sharding import Box, Layout
from mindgrpo.weight_sync.plan import plan_reshard
from mindgrpo.weight_sync.transfer import FirstHolders, load_once
from mindgrpo.weights.local_weights import Weights
from mindgrpo.weights.model_files import ModelFiles, SafetensorsWriter

MESHES = [(1, 1, 1), (4, 1, 1), (1, 2, 2), (2, 2, 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shapes = {spec.name: spec.shape for spec in layout((1, 1, 1)).specs}
    with SafetensorsWriter(folder, shapes) as writer:
        for name, shape in shapes.items():
            writer.add(name, value("model", name, shape))
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts the elements that are read of each parameter."""
    read, counted, lock = ModelFiles.read_into, Counter[str](), threading.Lock()

    def counting(files: ModelFiles, out: np.ndarray, name: str, box: Box | None = None) -> None:
        with lock:
            counted[name] += out.size
        read(files, out, name, box)

    monkeypatch.setattr(ModelFiles, "read_into", counting)
    return counted


def load(backend: Any, place: Layout, folder: Path) -> dict[str, bytes]:
    weights = Weights(place, backend.rank, backend, shared=True)
    load_once(weights, folder, backend)
    return {name: view.tobytes() for name, view in weights.arrays.hf_views.items()}


def test_each_element_is_read_once_and_arrives_wherever_it_is_held(
    model: Path, reads: Counter[str], subtests: pytest.Subtests
) -> None:
    for place in map(layout, MESHES):
        with subtests.test(mesh=str(place.mesh)):
            reads.clear()
            by_rank = ranks_as_threads.run(place.mesh.size, load, place, model)
            assert reads == {spec.name: int(np.prod(spec.shape)) for spec in place.specs}
            for rank, found in enumerate(by_rank):
                expected = {
                    name: value("model", name, place.by_name[name].shape)[box.slices].tobytes()
                    for name, box in place.held_by(rank).items()
                }
                assert found == expected


def test_ranks_of_other_replicas_read_nothing() -> None:
    place = layout((4, 2, 1))
    readers = FirstHolders(place.mesh, place.specs, place.stage_layers)
    assert [bool(readers.held_by(rank)) for rank in range(8)] == [True, True] + 6 * [False]
    plan = plan_reshard(readers, place)
    sizes = [sum(box.size for box in place.held_by(rank).values()) for rank in range(8)]
    # The second rank lacks what both have whole.
    assert [plan.received_bytes(rank) // 4 for rank in range(2, 8)] == sizes[2:]
    assert 0 == plan.received_bytes(0) < plan.received_bytes(1) < 4 * sizes[1] / 10
