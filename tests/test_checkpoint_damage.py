"""Checkpoints that are truncated, changed, foreign or hostile, and disks that are full or read-only: each by name.

Does not prove that the trainer goes back to an earlier checkpoint; test_resume.py does.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_model
import numpy as np
import pytest
from checkpoint_model import IDENTITY, ROLES, filled, layout, manifest_of, save
from ranks_as_threads import run

from mindgrpo.checkpoint import format as stored_form
from mindgrpo.checkpoint import save as saving
from mindgrpo.checkpoint.format import DamagedCheckpoint, _digest, read_manifest
from mindgrpo.checkpoint.load import load_role
from mindgrpo.checkpoint.save import NotWritten, Saver
from mindgrpo.errors import UserError

GRID = (1, 2, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run(2, save, tmp_path, GRID, False)[0]


def load(folder: Path) -> None:
    def on_rank(backend: Any) -> None:
        manifest = read_manifest(folder)
        for role, weights in filled(backend, layout((1, 1, 1)), empty=True).items():
            load_role(folder, manifest, role, weights)

    run(1, on_rank)


def changed(folder: Path, change: Callable[[dict[str, Any]], None], sign: bool = True) -> None:
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    change(body)
    digest = body.pop("digest", "")
    path.write_text(json.dumps({**body, "digest": _digest(body) if sign else digest}))


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match=rf"{path} is damaged.* it has \d+ bytes, but was"):
        read_manifest(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "rank_00000.safetensors").unlink()
    with pytest.raises(DamagedCheckpoint, match="rank_00000.safetensors is missing"):
        read_manifest(folder)


def test_a_file_that_is_a_link_to_elsewhere_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "rank_00000.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        read_manifest(folder)


def test_every_single_flipped_bit_of_a_file_is_found(folder: Path) -> None:
    path = folder / "rank_00001.safetensors"
    whole = path.read_bytes()
    draw = random.Random(5)
    places = [0, 7, 8, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(12))]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            load(folder)
    path.write_bytes(whole)
    load(folder)


def test_every_single_flipped_bit_of_a_manifest_is_found(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    draw = random.Random(6)
    for place in [0, *(draw.randrange(len(whole)) for _ in range(60))]:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << draw.randrange(8)
        # Space between the words means nothing.
        if chr(whole[place]).isspace() and chr(flipped[place]).isspace():
            continue
        path.write_bytes(flipped)
        with pytest.raises(DamagedCheckpoint, match=str(path)):
            read_manifest(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "x"}',
        b"PK\x03\x04",
        b'"\\ud800"',
    ],
)
def test_a_foreign_file_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(
        DamagedCheckpoint, match="manifest.json(' is not JSON| is damaged or not|' holds a)"
    ):
        read_manifest(folder)


def test_a_folder_without_a_manifest_is_no_checkpoint(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="has no manifest.json, so it is no checkpoint"):
        read_manifest(folder)


def test_a_later_version_is_told_apart_from_damage(folder: Path) -> None:
    changed(folder, lambda body: body.update(version=3))
    with pytest.raises(DamagedCheckpoint, match="has version 3 .* this mindgrpo reads versions 1 "):
        read_manifest(folder)


def rename_file(body: dict[str, Any], name: str) -> None:
    body["files"][name] = body["files"].pop("rank_00000.safetensors")
    for tensors in body["tensors"].values():
        for tensor in tensors.values():
            for piece in tensor["pieces"]:
                if piece["file"] == "rank_00000.safetensors":
                    piece["file"] = name


@pytest.mark.parametrize(
    "name",
    [
        "../rank_00000.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        ".hidden.safetensors",
        "x.pkl",
    ],
)
def test_a_path_out_of_the_folder_is_refused_even_if_it_exists(folder: Path, name: str) -> None:
    (folder.parent / "rank_00000.safetensors").write_bytes(
        (folder / "rank_00000.safetensors").read_bytes()
    )
    changed(folder, lambda body: rename_file(body, name))
    with pytest.raises(DamagedCheckpoint, match="which is no name here"):
        read_manifest(folder)


def first_tensor(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tensors"]["policy"]["model.embed_tokens.weight"]
    return found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t["pieces"].append(t["pieces"][0]), "elements together"),
        (lambda t: t["pieces"].pop(), "elements together"),
        (lambda t: t["pieces"][0].update(stop=[10**9, 16]), "do not lie within its shape"),
        (lambda t: t["pieces"][0].update(start=[0]), "another number of dims"),
        (lambda t: t["pieces"][0].update(file="rank_00009.safetensors"), "not among the files"),
        (lambda t: t["pieces"][0].update(offset=10**9), "reach beyond the end"),
        (lambda t: t["pieces"][0].update(offset=-4), "greater than or equal to 0"),
        (lambda t: t.update(shape=[67.5, 16]), "valid integer"),
        (lambda t: t.update(dtype="F64"), "Input should be 'F32'"),
        (lambda t: t["pieces"][0].update(digest="0"), "should match pattern"),
        (lambda t: t.update(code="import os"), "Extra inputs are not permitted"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[dict[str, Any]], None], reason: str
) -> None:
    changed(folder, lambda body: change(first_tensor(body)))
    with pytest.raises(DamagedCheckpoint, match=f"manifest.json is damaged.*{reason}"):
        read_manifest(folder)


def test_overlapping_chunks_that_add_up_are_refused(folder: Path) -> None:
    def overlap(body: dict[str, Any]) -> None:
        first, second = first_tensor(body)["pieces"]
        assert (first["start"], first["stop"], second["stop"]) == ([0, 0], [34, 16], [67, 16])
        second.update(start=[1, 0], stop=[34, 16])

    changed(folder, overlap)
    with pytest.raises(DamagedCheckpoint, match="overlap"):
        read_manifest(folder)


def test_two_chunks_at_the_same_bytes_of_a_file_are_refused(folder: Path) -> None:
    def same_bytes(body: dict[str, Any]) -> None:
        tensors = body["tensors"]["policy"]
        a, b = (tensors[f"model.layers.{i}.mlp.up_proj.weight"]["pieces"][0] for i in (0, 1))
        b["offset"] = a["offset"]

    changed(folder, same_bytes)
    with pytest.raises(DamagedCheckpoint, match="two chunks have the same bytes"):
        read_manifest(folder)


def test_a_manifest_changed_by_hand_is_refused(folder: Path) -> None:
    changed(folder, lambda body: body["state"].update(prompts=0), sign=False)
    with pytest.raises(DamagedCheckpoint, match="changed after it was written"):
        read_manifest(folder)


def test_mutations_end_in_one_sentence_each(folder: Path) -> None:
    path = folder / "manifest.json"
    whole = path.read_bytes()
    draw = random.Random(7)
    for _ in range(60):
        start, length = draw.randrange(len(whole)), draw.randrange(1, 40)
        junk = draw.randbytes(draw.randrange(40))
        mutated = whole[:start] + junk + whole[start + length :]
        if mutated.split() == whole.split():
            continue
        path.write_bytes(mutated)
        with pytest.raises(UserError) as told:
            read_manifest(folder)
        assert "\n" not in str(told.value)


# -- writing ----------------------------------------------------------------------------------------------------------


def attempt(backend: Any, path: Path, background: bool, step: int = 5) -> str | None:
    saver = Saver(path, backend)
    try:
        saver.begin(step, filled(backend, layout(GRID)), lambda s: manifest_of(s, step), background)
        saver.commit()
    except NotWritten as error:
        return str(error)
    return None


def test_a_manifest_that_could_not_be_read_again_leaves_the_earlier_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because it is too large, or because of a path that is no text."""
    size = (folder / "manifest.json").stat().st_size
    monkeypatch.setattr(stored_form, "MAX_BYTES", size - 100)
    told = run(2, attempt, tmp_path, False)
    assert told[0] is not None and f"and more than {size - 100} are none" in told[0]
    assert told[0].startswith("it could not be read again: ") and "earlier" not in told[0]
    monkeypatch.undo()
    config = {**IDENTITY.config, "output_dir": os.fsdecode(b"caf\xe9")}
    no_text = IDENTITY.model_copy(update={"config": config})
    monkeypatch.setattr(checkpoint_model, "IDENTITY", no_text)
    told = run(2, attempt, tmp_path, True)
    assert told[0] is not None and "it holds half a character" in told[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    load(folder)


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_leaves_the_earlier_checkpoint_and_no_rest(
    folder: Path, tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if "rank_00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(saving.os, "fsync", full)
    told = run(2, attempt, tmp_path, background)
    assert told == ["rank 1: rank_00001.safetensors: No space left on device"] * 2
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    load(folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 KiB, which holds one checkpoint of the test's model and not two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_on_a_small_disk_the_earlier_checkpoint_stays_and_loads(
    small_disk: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = run(2, attempt, small_disk, background, 1)
    assert told[0] is not None and f"but {small_disk}/checkpoints has 0.3 MiB free" in told[0]
    monkeypatch.setattr(saving, "SPARE_BYTES", -(1 << 30))
    assert run(2, attempt, small_disk, background, 1) == [None, None]
    told = run(2, attempt, small_disk, background, 2)
    assert told[0] is not None and told[0].endswith(".safetensors: No space left on device")
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_000001"]
    load(small_disk / "checkpoints" / "step_000001")
    shutil.rmtree(small_disk / "checkpoints" / "step_000001")
    assert run(2, attempt, small_disk, background, 3) == [None, None]


def test_too_little_space_is_told_before_anything_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = saving.shutil.disk_usage(tmp_path)._replace(free=17 << 20)
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda path: usage)
    assert run(2, attempt, tmp_path, False) == [None, None]
    monkeypatch.setattr(saving, "SPARE_BYTES", (17 << 20) - 1)
    told = run(2, attempt, tmp_path, False, 6)
    assert told[0] is not None and "17.0 MiB free" in told[0]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["step_000003", "step_000005"]


def test_a_read_only_folder_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.parent.chmod(0o500)
    if os.geteuid() == 0:  # who may write everywhere
        real = Path.mkdir

        def refuse(path: Path, *arguments: Any, **more: Any) -> None:
            if path.name.endswith(".partial"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            real(path, *arguments, **more)

        monkeypatch.setattr(Path, "mkdir", refuse)
    told = run(2, attempt, tmp_path, True)
    folder.parent.chmod(0o700)
    assert told == [f"{folder.parent}/.step_000005.partial: Permission denied"] * 2
    load(folder)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    told = run(2, attempt, tmp_path, False)
    assert told == [f"{tmp_path}/checkpoints: File exists"] * 2


def test_a_rank_whose_folder_is_another_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = saving.write_shard

    def elsewhere(path: Path, *arguments: Any) -> Any:
        done = written(path, *arguments)
        if "rank_00001" in path.name:
            path.rename(tmp_path / "another_host")
        return done

    monkeypatch.setattr(saving, "write_shard", elsewhere)
    told = run(2, attempt, tmp_path, False)
    assert told[0] is not None and "is not seen by rank 0" in told[0]


def test_values_are_those_of_the_moment_and_threads_end(tmp_path: Path) -> None:
    import threading

    before = threading.active_count()
    folder = run(2, save, tmp_path, GRID, True)[0]
    load(folder)
    assert threading.active_count() == before
    assert set(read_manifest(folder).tensors) == set(ROLES)
    assert np.isfinite(read_manifest(folder).num_bytes)
