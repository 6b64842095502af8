"""Every form of a checkpoint that the package has ever written is read, exported and resumed.

tests/data/checkpoints has one of each, written by the code of its time (README.md there says how). Does not prove that
a resumed run computes what the older version would have.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tables import each_row

from mindgrpo.checkpoint.format import VERSION, read_manifest, write_manifest
from mindgrpo.checkpoint.remote_files import check_files, read_files
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config
from mindgrpo.monitor.metrics import read_metrics

DATA = Path(__file__).resolve().parent / "data" / "checkpoints"
FORMS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))
# What each form brought, as a part of its manifest's state.
NEW = {
    "1_082fffa3": "best",
    "1_75288145": "unfinished",
    "1_f0a6942f": "turns",
    "1_ba287dd4": "arrays",
    "1_e01a2377": "shapes",
    "1_94839154": "routes",
    "1_cbebad8b": "baselines",
    "2": "reward",
    "2_lora": "reward",
}
PARTIAL = (
    "--rl_config.partial_rollout=true",
    "--rl_config.importance_sampling_correction=token_truncate",
    "--rl_config.partial_rollout_chunk=2",
    "--rl_config.over_sampling_batch_size=3",
)
STEP = Path("run", "checkpoints", "step_000001")


def unpacked(form: str, folder: Path) -> Path:
    """The run's folder of inputs, with the run in it."""
    target = folder / form
    with tarfile.open(DATA / f"{form}.tar.xz") as archive:
        # Without `filter`, which Python 3.10.12 and 3.11.4 brought: the archives are our own.
        archive.extractall(target)
    return target


def spread(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    return [float(sum(map(ord, text)) % 7 < 3) for text in completions]


def test_there_is_a_checkpoint_of_each_form() -> None:
    assert sorted(NEW) == FORMS
    assert {int(form.partition("_")[0]) for form in FORMS} == set(range(1, VERSION + 1))
    assert sum(path.stat().st_size for path in DATA.iterdir()) < 150_000


@each_row("form", FORMS)
def test_a_checkpoint_of_any_form_is_read_and_exported(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = unpacked(form, tmp_path)
    monkeypatch.chdir(folder)
    manifest = read_manifest(STEP)
    check_files(STEP, manifest)
    text = (STEP / "manifest.json").read_text()
    assert f'"{NEW[form]}":' in text
    assert manifest.version == int(form[0])
    ended = [s for g in manifest.state.unfinished for s in g.samples if s.routes is not None]
    found = read_files(STEP, manifest)
    assert len(found) == (len(ended) if form[0] == "2" else 0)
    assert bool(ended) == (form in ("1_94839154", "2", "2_lora"))
    assert main(["export", "--from", str(STEP), "--output", "exported"]) == 0
    exported = load_file("exported/model.safetensors")
    assert exported.keys() == load_file("model/model.safetensors").keys()
    for name, tensor in manifest.tensors.get("policy", {}).items():
        if name in exported:
            (chunk,) = tensor.chunks
            stored = load_file(STEP / chunk.file)
            (own,) = (v for k, v in stored.items() if k.startswith(f"policy/{name}["))
            np.testing.assert_array_equal(exported[name], own)


def test_a_manifest_of_this_version_is_written_as_it_was_read(tmp_path: Path) -> None:
    """An entry more, or less, is another form: raise VERSION, and add a checkpoint of it to tests/data/checkpoints."""
    for form in (form for form in FORMS if form.startswith(str(VERSION))):
        folder = unpacked(form, tmp_path) / STEP
        assert write_manifest(read_manifest(folder)) == (folder / "manifest.json").read_bytes()


@each_row("form", FORMS)
def test_a_run_of_any_form_is_resumed(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mindgrpo.trainer import GRPOTrainer

    monkeypatch.chdir(unpacked(form, tmp_path))
    state = read_manifest(STEP).state
    words = [*(PARTIAL if state.unfinished else ()), "--rl_config.resume_training"]
    words += ["--actor_config.lora.rank=1"] if form == "2_lora" else []
    GRPOTrainer(load_config("run.yaml", words), [spread], name="small").train()
    assert f"resumed from {STEP}: 1 of 2 steps are done" in capsys.readouterr().out
    assert [row["step"] for row in read_metrics(Path("run", "metrics.jsonl"))] == [1, 2]
    newest = read_manifest(STEP.with_name("step_000002"))
    assert newest.version == VERSION and newest.state.updates > state.updates
    shutil.rmtree("run")
