"""The experts of tokens beside a checkpoint's manifest: written by the first rank for all, read back, verified.

With ranks as threads and no device. Does not prove that a run trains with them (test_router_replay.py does).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_model import filled, layout, manifest_of
from ranks_as_threads import run
from safetensors import safe_open

from mindgrpo.algorithm.sample import PartialGroup, Sample
from mindgrpo.checkpoint import remote_files
from mindgrpo.checkpoint import save as saving
from mindgrpo.checkpoint.format import DamagedCheckpoint, Manifest, read_manifest, stored_groups
from mindgrpo.checkpoint.remote_files import check_files, file_of, files_of, read_files
from mindgrpo.checkpoint.save import NotWritten, Saver

PROMPT, FILE = np.array([1, 2], np.int32), file_of("routes")


def sample(number: int, dtype: type[np.generic] = np.uint8, ended: bool = True) -> Sample:
    count = 2 + number
    values = np.random.default_rng(number).integers(0, 9, (count + 1, 3, 2)).astype(dtype)
    tokens = np.arange(count, dtype=np.int32)
    parts = (values[:2], values[2:])
    reason = "stop" if ended else None
    drawn = Sample.drawn(number, PROMPT, tokens, "stop", 0, logps=np.zeros(count), routes=parts)
    return Sample(**{**vars(drawn), "finish_reason": reason})


GROUPS = (
    PartialGroup(4, 1, (sample(0), sample(1, ended=False), sample(2))),
    PartialGroup(5, 1, (sample(3, np.uint16),)),
)
KEPT = {(0, 0): GROUPS[0].samples[0], (0, 2): GROUPS[0].samples[2], (1, 0): GROUPS[1].samples[0]}


def attempt(backend: Any, path: Path, step: int = 3) -> str | None:
    """Saves a checkpoint with the routes of GROUPS; returns why it was not written."""
    stored, saver = stored_groups(GROUPS), Saver(path, backend)
    passed: list[int] = []

    def arrays() -> Iterator[np.ndarray]:
        for number, own in enumerate(KEPT.values()):
            passed.append(number)
            whole = np.asarray(own.arrays["routes"])
            yield whole if backend.rank == 0 else np.zeros(0, np.uint8)

    def complete(files: dict[str, Any]) -> Manifest:
        manifest = manifest_of(files, step)
        state = manifest.state.model_copy(update={"unfinished": stored})
        return manifest.model_copy(update={"state": state})

    try:
        roles, files = filled(backend, layout((1, 2, 1))), files_of(stored)
        saver.begin(step, roles, complete, False, files=files, arrays={"routes": arrays()})
        saver.commit()
    except NotWritten as error:
        return str(error)
    finally:
        assert passed == [0, 1, 2], "a rank that does not go on leaves the others waiting"
    return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert run(2, attempt, tmp_path) == [None, None]
    return tmp_path / "checkpoints" / "step_000003"


def test_what_the_first_rank_writes_every_rank_reads(folder: Path) -> None:
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    found = read_files(folder, manifest)
    assert found.keys() == KEPT.keys()
    with safe_open(folder / FILE, "np") as file:
        for key, own in KEPT.items():
            expected = np.asarray(own.arrays["routes"])
            assert found[key]["routes"].dtype == expected.dtype
            np.testing.assert_array_equal(found[key]["routes"], expected)
            np.testing.assert_array_equal(file.get_tensor(f"{key[0]}/{key[1]}"), expected)


def test_every_single_flipped_bit_of_the_file_is_found(folder: Path) -> None:
    path, manifest = folder / FILE, read_manifest(folder)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(DamagedCheckpoint, match=f"{path} is damaged"):
            check_files(folder, manifest)


def test_a_file_that_is_missing_or_of_other_samples_is_named(folder: Path) -> None:
    manifest = read_manifest(folder)
    fewer = manifest.state.model_copy(update={"unfinished": manifest.state.unfinished[:1]})
    with pytest.raises(DamagedCheckpoint, match=f"{FILE} does not have the experts"):
        check_files(folder, manifest.model_copy(update={"state": fewer}))
    (folder / FILE).unlink()
    with pytest.raises(DamagedCheckpoint, match=f"{FILE} is missing"):
        read_manifest(folder)


def test_a_disk_that_fills_up_meanwhile_leaves_the_earlier_checkpoint_and_no_rest(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(remote_files.os, "fsync", full)
    assert run(2, attempt, tmp_path, 4) == [f"{FILE}: No space left on device"] * 2
    monkeypatch.undo()
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    check_files(folder, read_manifest(folder))


def test_the_file_counts_among_what_a_checkpoint_takes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = saving.shutil.disk_usage(tmp_path)._replace(free=1 << 30)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(saving, "SPARE_BYTES", 0)
    monkeypatch.setattr(remote_files, "num_bytes", lambda tensors: 2 << 30)

    def told(backend: Any) -> str:
        saver = Saver(tmp_path, backend)
        files = files_of(stored_groups(GROUPS))
        with pytest.raises(NotWritten) as refused:
            saver.begin(7, filled(backend, layout((1, 1, 1))), manifest_of, False, files=files)
        return str(refused.value)

    assert run(1, told)[0].startswith("it takes 2048.")
