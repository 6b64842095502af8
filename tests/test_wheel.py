"""The wheel alone, in an environment of its own: `mindgrpo launch` starts ranks, and trains, from any folder.

The source distribution builds the same wheel, and the wheel has the examples. MindSpore and the other requirements are
seen through the environment that runs the tests, so that nothing is downloaded. Does not prove that pip finds versions
of them that fit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import small_runs
import yaml
from report_runs import make_run

from mindgrpo import __version__
from mindgrpo.cli.example import MAKERS

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import os, sys
import mindgrpo
from mindgrpo.health.rank_health import RankHealth
print("rank", os.environ["RANK_ID"], os.path.dirname(mindgrpo.__file__), "mindspore" in sys.modules, sys.argv[1:])
"""


# As docs/starting_runs.md has it, for a configuration of one's own.
MY_MAIN = """
import sys
from mindgrpo import GRPOTrainer, load_config
GRPOTrainer(load_config("my.yaml", sys.argv[1:])).train()
"""
SOURCES = (
    *("mindgrpo", "examples", "model_configs", "setup.py", "pyproject.toml", "MANIFEST.in"),
    *("README.md", "README_CN.md", "CHANGELOG.md", "LICENSE", "NOTICE"),
)
# Files whose text names extras.
NAMING_EXTRAS = (
    "*.md",
    "docs/**/*.md",
    "examples/**/*.md",
    "examples/**/*.yaml",
    "mindgrpo/**/*.py",
)
# Examples that need an extra of the package.
EXTRAS = ("guess_number", "smollm2_chain_sum")
# Copies all examples, and checks what they print where the model is bundled.
RUN_EXAMPLES = (
    f"EXTRAS = {EXTRAS}"
    """
import contextlib, io, shlex
from mindgrpo.cli.verbs import main

def shown(*words):
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main(words) == 0
    return text.getvalue()

for name in [line.split()[0] for line in shown("example").splitlines()[1:]]:
    command = shown("example", name).splitlines()[-1]
    print(name, command, sep="\\t")
    words = shlex.split(command)
    needs_more = {"MODEL", "YOUR.yaml"} & {*words} or name in EXTRAS
    if words[:2] == ["mindgrpo", "launch"] and not needs_more:
        print(shown("check", *words[2:]))
"""
)
SHORT = (*small_runs.ONE_GRAPH, "--rl_config.max_steps", "1", "--output_dir", "out")


def outside() -> dict[str, str]:
    """The environment of a shell in which no virtual environment is active, but for MindSpore's programs.

    msrun is MindSpore's: a `pip install` with its requirements puts it beside `mindgrpo`.
    """
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
    return kept | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}


def run(*command: str | Path, **more: str | Path) -> str:
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, **more)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Returns the wheel of a clone, and that of its source distribution."""
    folder = tmp_path_factory.mktemp("wheel")
    source, unpacked = folder / "source", folder / "unpacked"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for path in (ROOT / name for name in SOURCES):
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, source / path.name, **({"ignore": ignored} if path.is_dir() else {}))
    # What a run of the example leaves behind.
    made = source / "examples" / "grpo" / "smollm2_sums" / "model"
    made.mkdir(exist_ok=True)
    (made / "model.safetensors").touch()
    build = "import sys; from setuptools import build_meta; build_meta.build_%s(sys.argv[1])"
    run(sys.executable, "-c", build % "sdist", folder, cwd=source)
    (archive,) = folder.glob("mindgrpo-*.tar.gz")
    shutil.unpack_archive(archive, unpacked, filter="data")
    built = []
    for name, tree in (("clone", source), ("sdist", *unpacked.iterdir())):
        (folder / name).mkdir()
        run(sys.executable, "-c", build % "wheel", folder / name, cwd=tree)
        built += (folder / name).iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's folder."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheels[1])
    (packages,) = venv.glob("lib/python*/site-packages")
    # What is seen through this line comes after what is installed here.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv


def test_the_source_distribution_builds_the_clone_s_wheel(wheels: list[Path]) -> None:
    of_clone, of_sdist = (
        {name: archive.read(name) for name in archive.namelist()}
        for archive in map(zipfile.ZipFile, wheels)
    )
    assert of_clone.keys() == of_sdist.keys()
    assert of_clone == of_sdist
    assert "mindgrpo/py.typed" in of_clone
    # pip is held to what the package itself needs.
    (metadata,) = (text.decode() for name, text in of_clone.items() if name.endswith("/METADATA"))
    needs = re.findall(r"^Requires-Dist: ([\w-]+?) ?\(?([<>=][^;\n]*?)\)?$", metadata, re.MULTILINE)
    bounded = {name + bound for name, bounds in needs for bound in bounds.split(",")}
    lines = of_clone["mindgrpo/constraints.txt"].decode().splitlines()[1:]
    assert set(lines) == {each for each in bounded if "<" in each or "==" in each}
    assert wheels[0].name == f"mindgrpo-{__version__}-py3-none-any.whl"
    assert not [name for name in of_clone if "smollm2_sums/model" in name or name.endswith(".sh")]
    # An older pip installs nothing for an extra that is written otherwise than in the metadata.
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    files = [path for name in NAMING_EXTRAS for path in sorted(ROOT.glob(name))]
    named = re.findall(r"mindgrpo\[([\w.,-]+)\]", "".join(path.read_text() for path in files))
    assert {each for names in named for each in names.split(",")} <= extras
    assert len(named) > 20


def test_each_example_of_an_installed_wheel_passes_the_check_of_the_command_that_it_prints(
    installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.py").write_text(RUN_EXAMPLES)
    shown = run(installed / "bin" / "python", "run.py", cwd=tmp_path, env=outside())
    commands = dict(line.split("\t") for line in shown.splitlines() if "\t" in line)
    names = {path.parent.name for path in ROOT.glob("examples/*/*/grpo_config.yaml")}
    assert commands.keys() == names | {"recipes"}
    checked = {line.split()[0] for line in shown.splitlines() if line.endswith(" can run:")}
    bundled = ("tiny_arithmetic", "tiny_moe", "calculator")
    assert checked == {f"examples/grpo/{name}/grpo_config.yaml" for name in bundled}
    others = {name: text for name, text in commands.items() if name not in bundled}
    for name, text in others.items():
        making = "make_model.py" in text and (tmp_path / text.split()[5]).is_file()
        making |= any(name in text for name in MAKERS) and (tmp_path / text.split()[1]).is_file()
        needs_more = "--actor_config.load MODEL" in text or name in ("recipes", *EXTRAS)
        assert making or needs_more, text
    # The layouts of the files.
    assert "--ranks 8" in commands["tiny_moe"] and "--ranks 1 " in commands["calculator"]
    # Nothing is overwritten.
    config = tmp_path / "examples/grpo/calculator/grpo_config.yaml"
    config.write_text("mine")
    again = (installed / "bin" / "mindgrpo", "example", "calculator")
    ended = subprocess.run(list(map(str, again)), cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 2 and "differs from the example's" in ended.stderr
    assert config.read_text() == "mine"


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
        ("--ranks", "1", "--", "train", "--config=my.yaml"),
    ],
    ids=["my_main.py", "train"],
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
        [str(word) for word in command], cwd=tmp_path, capture_output=True, text=True
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
