"""That a folder which some rank does not see is refused at the start; ranks are threads with views of their own.

Does not prove anything about a network's file system.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mindgrpo.checkpoint import folders
from mindgrpo.checkpoint.folders import check_seen
from mindgrpo.errors import UserError


class Ranks:
    """Two, that gather."""

    def __init__(self) -> None:
        self.met, self.values = threading.Barrier(2), {}  # type: ignore[var-annotated]

    def backend(self, rank: int) -> Any:
        class World:
            @staticmethod
            def gather_objects(value: Any) -> list[Any]:
                self.values[rank] = value
                self.met.wait(10)
                found = [self.values[0], self.values[1]]
                self.met.wait(10)
                return found

        class Backend:
            world = World

        backend = Backend()
        backend.rank = rank  # type: ignore[attr-defined]
        return backend

    def check(self, run: Path) -> list[str]:
        told = ["", ""]

        def one(rank: int) -> None:
            try:
                check_seen(run, self.backend(rank))
            except UserError as error:
                told[rank] = str(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return told


def test_a_folder_that_all_ranks_see_is_left_as_it_was(tmp_path: Path) -> None:
    assert Ranks().check(tmp_path) == ["", ""]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_rank_does_not_see_is_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = folders._appears
    monkeypatch.setattr(folders, "PATIENCE_SECONDS", 0.2)
    turns = iter([False, True])
    monkeypatch.setattr(
        folders, "_appears", lambda path: real(path if next(turns) else path / "elsewhere")
    )
    told = Ranks().check(tmp_path)
    assert told[0] == told[1] and "give --output_dir a folder that all hosts share" in told[0]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_the_checkpoints_to_tell(tmp_path: Path) -> None:
    assert Ranks().check(tmp_path / "missing") == ["", ""]
