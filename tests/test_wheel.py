"""The wheel alone, in an environment of its own: `mindgrpo launch` starts ranks, and trains, from any folder.

MindSpore and the other requirements are seen through the environment that runs the tests, so that nothing is
downloaded. Does not prove that pip finds versions of them that fit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import small_runs
import yaml
from report_runs import make_run

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import os, sys
import mindgrpo
from mindgrpo.health.rank_health import RankHealth
print("rank", os.environ["RANK_ID"], os.path.dirname(mindgrpo.__file__), "mindspore" in sys.modules, sys.argv[1:])
"""


# As README has it.
MY_MAIN = """
import sys
from mindgrpo import GRPOTrainer, load_config
GRPOTrainer(load_config("my.yaml", sys.argv[1:])).train()
"""
SHORT = (*small_runs.ONE_GRAPH, "--rl_config.max_steps", "1", "--output_dir", "out")


def outside() -> dict[str, str]:
    """The environment of a shell in which no virtual environment is active, but for MindSpore's programs.

    msrun is MindSpore's: a `pip install` with its requirements puts it beside `mindgrpo`.
    """
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    return kept | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def run(*command: str | Path, **more: str | Path) -> str:
    ended = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, **more
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "mindgrpo", source / "mindgrpo", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    alone = ("--no-deps", "--no-index")
    run(*pip, "wheel", "--no-build-isolation", *alone, "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    run(*pip, "--python", venv / "bin" / "python", "install", *alone, wheel)
    (packages,) = venv.glob("lib/python*/site-packages")
    # What is seen through this line comes after what is installed here.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_ranks_start_from_an_installed_wheel_in_any_folder(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "my_main.py"
    program.write_text(PROGRAM)
    words = ("--ranks", "2", "--", "my_main.py", "--a", "b")
    shown = run(installed / "bin" / "mindgrpo", "launch", *words, cwd=tmp_path, env=outside())
    (package,) = installed.glob("lib/python*/site-packages/mindgrpo")
    expected = [f"rank {rank} {package} True ['--a', 'b']\n" for rank in range(2)]
    assert shown == expected[0]
    # Logs are where the command was given, not where the package is.
    (logs,) = (tmp_path / "output" / "logs").iterdir()
    assert (logs / "worker_1.log").read_text() == expected[1]
    assert {path.name for path in tmp_path.iterdir()} == {"my_main.py", "output"}


@pytest.mark.parametrize(
    "words",
    [
        ("--ranks", "2", "--", "my_main.py", "--config", "my.yaml"),
        ("--ranks", "1", "--config", "my.yaml"),
        ("--ranks", "1", "--", "train", "--config=my.yaml"),
    ],
    ids=["my_main.py", "no program", "train"],
)
def test_a_run_is_launched_from_an_installed_wheel(
    installed: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    small_runs.make_inputs(tmp_path)
    document = yaml.safe_load((tmp_path / "small.yaml").read_text())
    document["actor_config"]["load"] = "model"
    document["rl_config"] |= {"dataset_file": "train.jsonl", "eval_steps": 0}
    for section in ("actor_config", "ref_config", "generate_config"):
        document[section]["parallel_config"] = {"data_parallel": int(words[1])}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "my_main.py").write_text(MY_MAIN)
    # Not what is meant.
    (tmp_path / "train").write_text("raise AssertionError")
    command = ("launch", *words, *SHORT, *small_runs.reward_words(tmp_path))
    run(installed / "bin" / "mindgrpo", *command, cwd=tmp_path, env=outside())
    (row,) = small_runs.rows(tmp_path / "out")
    assert row["grad_norm"] > 0


def test_a_page_is_written_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    shown = run(installed / "bin" / "mindgrpo", "report", folder, cwd=tmp_path)
    assert shown.startswith(f"{folder / 'report.html'} (")
    (package,) = installed.glob("lib/python*/site-packages/mindgrpo/report")
    names = {
        path.name for path in (ROOT / "mindgrpo" / "report").rglob("*.*") if path.suffix != ".pyc"
    }
    assert names <= {path.name for path in package.rglob("*.*")}


def test_vllm_can_be_installed_from_an_installed_wheel(installed: Path, tmp_path: Path) -> None:
    (target := tmp_path / ".venv-vllm").mkdir()
    (target / "foreign").touch()
    command = (installed / "bin" / "mindgrpo", "engine", "install")
    ended = subprocess.run(
        [str(word) for word in command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    # Found its lock file, and the folder's default, before it refused.
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"mindgrpo: {target} holds something else"), ended.stderr
    (package,) = installed.glob("lib/python*/site-packages/mindgrpo/rollout/vllm")
    own, files = ROOT / "mindgrpo" / "rollout" / "vllm", ("**/*.py", "*.txt", "*.json")
    names = [
        {str(path.relative_to(one)) for kind in files for path in one.glob(kind)}
        for one in (own, package)
    ]
    assert names[0] == names[1] >= {"requirements-cpu.txt", "child/mindgrpo_engine/__main__.py"}
