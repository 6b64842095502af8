"""The best checkpoint is one that is on disk: writing it fails once, in a run and in the run that goes on from it.

On one rank, with a write that fails as on a full disk. Does not prove what else a full disk does to a run
(test_full_disk.py does), nor which scores are compared (test_resume.py does).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import EVAL_SAMPLES, ONE_GRAPH, Reward, make_inputs, run, spread

from mindgrpo.checkpoint import save as saving
from mindgrpo.checkpoint.folders import folder_of, steps_in
from mindgrpo.checkpoint.format import read_manifest
from mindgrpo.cli.verbs import main

KEPT = (
    *ONE_GRAPH,
    "--rl_config.save_ckpt_interval=1",
    "--rl_config.save_max_ckpt_num=1",
    "--rl_config.save_ckpt_best=spread",
    "--rl_config.eval_steps=1",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("best")
    make_inputs(folder)
    return folder


def scoring(*scores: float) -> Reward:
    """The same reward; its evaluations, the one before the first step among them, have these scores."""
    left = list(scores)

    def scored(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        if len(completions) == EVAL_SAMPLES:
            return [left.pop(0)] * EVAL_SAMPLES
        return spread(completions, answers)

    scored.__name__ = "spread"
    return scored


@pytest.fixture
def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Called with a step, the disk is full for its checkpoint."""
    real, full = os.fsync, set()

    def fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if any(f"/.step_{step:06d}.partial/" in path for step in full):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        real(descriptor)

    monkeypatch.setattr(saving.os, "fsync", fsync)
    return full.add


def best_of(folder: Path) -> dict[str, Any]:
    best: dict[str, Any] = json.loads((folder / "summary.json").read_text())["best_checkpoint"]
    return best


def test_a_best_checkpoint_that_was_not_written_leaves_the_best_that_is_on_disk(
    inputs: Path, tmp_path: Path, fail_to_write: Callable[[int], None]
) -> None:
    """First in the background, then in the foreground."""
    fail_to_write(2)
    folder = run(
        inputs,
        tmp_path / "run",
        *KEPT,
        "--rl_config.save_ckpt_async=true",
        "--rl_config.max_steps=4",
        reward=scoring(0, 0.5, 0.9, 0.1, 0.2),
    )
    assert steps_in(folder) == [1, 4], "the best of those that were written, and the newest"
    expected = {"reward": "spread", "score": 0.5, "step": 1, "path": str(folder_of(folder, 1))}
    assert best_of(folder) == expected
    stored = read_manifest(folder_of(folder, 4)).state.best
    assert stored is not None and (stored.step, stored.score) == (1, 0.5)

    # Going on: 0.75 is less than what was lost and more than what is on disk.
    fail_to_write(5)
    again = ("--resume_training=true", "--rl_config.max_steps=7")
    run(inputs, folder, *KEPT, *again, reward=scoring(0.95, 0.75, 0.3))
    assert steps_in(folder) == [6, 7]
    assert best_of(folder) == {
        "reward": "spread",
        "score": 0.75,
        "step": 6,
        "path": str(folder_of(folder, 6)),
    }
    words = ["export", "--from", str(folder), "--best", "--output", str(tmp_path / "hf")]
    assert main(words) == 0


def test_the_score_of_other_rows_is_not_compared_with_the_best_so_far(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*KEPT, "--rl_config.max_steps=2")
    folder = run(inputs, tmp_path / "run", *words, reward=scoring(0, 0.9, 0.5))
    assert best_of(folder)["step"] == 1
    rows = (inputs / "train.jsonl").read_text().splitlines()
    (tmp_path / "others.jsonl").write_text("\n".join(reversed(rows)) + "\n")
    again = ("--resume_training=true", "--rl_config.max_steps=3")
    again += (f"--rl_config.eval_dataset_file={tmp_path / 'others.jsonl'}",)
    run(inputs, folder, *KEPT, *again, reward=scoring(0.3))
    assert best_of(folder) == {
        "reward": "spread",
        "score": 0.3,
        "step": 3,
        "path": str(folder_of(folder, 3)),
    }
    said = capsys.readouterr().out
    assert (
        "the best checkpoint so far, of step 1, is not compared with later ones: held_out" in said
    )
    stored = read_manifest(folder_of(folder, 3)).state.best
    assert stored is not None and stored.reward == "spread"


def test_a_run_whose_only_best_checkpoint_was_not_written_names_none(
    inputs: Path, tmp_path: Path, fail_to_write: Callable[[int], None]
) -> None:
    fail_to_write(1)
    only_best = (*KEPT, "--rl_config.save_ckpt_interval=0", "--rl_config.max_steps=2")
    folder = run(inputs, tmp_path / "run", *only_best, reward=scoring(0, 0.9, 0.5))
    # The second is the best that is on disk.
    assert steps_in(folder) == [2] and best_of(folder)["step"] == 2
    fail_to_write(2)
    folder = run(inputs, tmp_path / "none", *only_best, reward=scoring(0, 0.9, 0.5))
    assert steps_in(folder) == []
    assert "best_checkpoint" not in json.loads((folder / "summary.json").read_text())
