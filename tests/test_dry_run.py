"""examples/ascend/dry_run.sh up to the missing CANN, and the program that it starts, on processors with a small model.

Does not prove anything of MindSpore's simulation, which needs CANN's libraries: the script was never run with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import input_keys, make_inputs

from mindgrpo.backend.targets import CANN_FOLDERS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "ascend"
SEVEN_B = ROOT / "examples/grpo/qwen_grpo_tutorial/grpo_config.yaml"


def dry_run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if name not in CANN_FOLDERS}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {"DRY_RUN_DIR": str(folder / "logs"), "PATH": path}
    return subprocess.run(
        ["bash", str(FOLDER / "dry_run.sh"), *words],
        env=known | ours | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def compile_graphs(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "compile_graphs.py"), *words],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_without_cann_the_script_says_so_and_compiles_nothing(tmp_path: Path) -> None:
    ended = dry_run(tmp_path)
    assert ended.returncode == 3 and ended.stdout == ""
    assert "CANN is not installed here" in ended.stderr and "set_env.sh" in ended.stderr
    assert ended.stderr.count("\n") == 1 and not (tmp_path / "logs").exists()


def test_a_cann_that_is_none_ends_the_first_rank_with_its_reason(tmp_path: Path) -> None:
    ended = dry_run(tmp_path, ASCEND_HOME_PATH=str(tmp_path))
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout.startswith(f"rank 0 of 8, log: {tmp_path}/logs/rank_0.log\n")
    assert "MindSpore cannot use such a device here" in ended.stdout
    assert "rank 0 ended with status 2" in ended.stderr


def test_the_stages_of_the_users_configuration_are_known_without_its_weights() -> None:
    ended = compile_graphs("--ranks", "--config", str(SEVEN_B), "--context.device_target", "Ascend")
    assert (ended.returncode, ended.stdout) == (0, "8 0 4\n"), ended.stderr


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("small")
    make_inputs(folder)
    keys = [word for key, value in input_keys(folder).items() for word in (f"--{key}", value)]
    return ["--config", str(folder / "small.yaml"), "--context.backend", "device", *keys]


def test_all_training_graphs_of_a_rank_are_compiled_from_shapes(words: list[str]) -> None:
    ended = compile_graphs(*words)
    assert ended.returncode == 0, ended.stderr
    compiled = [
        line.partition(":")[0] for line in ended.stdout.splitlines() if line.startswith("compiled")
    ]
    assert sorted(compiled) == [
        "compiled gradient norm",
        "compiled optimizer",
        "compiled policy backward",
        "compiled policy forward",
    ]
    assert "rank 0 of 1 (stage 0, CPU, device): 4 graphs compiled" in ended.stdout


def test_another_number_of_ranks_than_the_layouts_is_refused(words: list[str]) -> None:
    ended = compile_graphs(*words, RANK_SIZE="4")
    assert ended.returncode == 2 and "RANK_SIZE is 4, but the trainer's layout DP1/MP1" in (
        ended.stderr
    )
