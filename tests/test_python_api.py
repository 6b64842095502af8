"""Rewards given in code stand in for the configuration's. Does not prove a run: the distributed tests do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_runs

from mindgrpo.config import load_config
from mindgrpo.errors import UserError
from mindgrpo.run.preflight import prepare

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"


def my_reward(completions: list[str], answers: list[str]) -> list[float]:
    return [1.0 if a in c else 0.0 for c, a in zip(completions, answers, strict=True)]


def test_a_callable_replaces_the_functions_of_the_file_and_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    scorer = prepare(load_config(EXAMPLE).config, None, [my_reward]).scorer
    assert scorer is not None
    assert (scorer.names, scorer.weights) == (["my_reward"], [1.0])
    scorer.close()


def test_weights_given_in_code_must_match_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="2 weights were given for 1 reward functions"):
        prepare(load_config(EXAMPLE).config, None, [my_reward], [1.0, 2.0])


COMPUTES_BEFORE = """
import sys
from pathlib import Path

import small_runs
from mindspore import Tensor, ops

assert ops.add(Tensor([1.0]), 1.0).asnumpy() == 2.0
small_runs.run(Path(sys.argv[1]), Path(sys.argv[2]), "--rl_config.max_steps=1")
"""


def test_a_program_that_has_computed_with_mindspore_before_can_train(tmp_path: Path) -> None:
    small_runs.make_inputs(tmp_path / "inputs")
    words = [str(tmp_path / name) for name in ("inputs", "run")]
    subprocess.run(
        [sys.executable, "-c", COMPUTES_BEFORE, *words],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        check=True,
        timeout=200,
    )
    assert len(small_runs.rows(tmp_path / "run")) == 1
