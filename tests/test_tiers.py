"""Tiers and shards of the tests, and what run_tests.sh asks pytest for.

Does not prove that the quick tier catches faults: scripts/faults/planted.py does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiers
from import_graph import ROOT, distance_to

STARTS_NOTHING = "from mindgrpo.parallel.mesh import Mesh\n"


@pytest.mark.parametrize(
    ("source", "shard", "is_quick"),
    [
        (STARTS_NOTHING, "in-process", True),
        ("def test_one():\n    from mindgrpo.parallel.mesh import Mesh\n", "in-process", True),
        ("from mindgrpo.training.policy import Policy\n", "in-process", False),
        ("def test_one():\n    import mindspore\n", "in-process", False),
        ("from small_runs import run\n", "in-process", False),
        ("import subprocess\n", "processes", False),
        ("from ranks_as_processes import run\n", "processes", False),
        ('import subprocess\nCOMMAND = ["launch", "--ranks", "2"]\n', "ranks", False),
        ('import subprocess\nCOMMAND = "bash scripts/launch.sh"\n', "ranks", False),
    ],
)
def test_a_new_file_has_the_tier_and_shard_of_what_it_starts(
    tmp_path: Path, source: str, shard: str, is_quick: bool
) -> None:
    file = tmp_path / "test_new.py"
    file.write_text(source)
    assert (tiers.shard_of(file), tiers.is_quick(file)) == (shard, is_quick)


def test_the_tables_name_test_files_and_every_shard_has_some() -> None:
    files = {path.stem: path for path in tiers.test_files()}
    named = {*tiers.QUICK, *tiers.FULL, *tiers.SHARD_OF}
    assert named - files.keys() == set()
    assert {tiers.shard_of(path) for path in files.values()} == {*tiers.SHARDS}


def test_words_choose_tests_of_a_file_and_words_without_a_test_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "QUICK", {"test_a": ("first", "[qwen2]"), "test_b": ()})
    monkeypatch.setattr(tiers, "FULL", {"test_c": ("slow",)})
    a, b, c = (Path(f"test_{name}.py") for name in "abc")
    chosen = [tiers.is_quick_test(a, name) for name in ("test_first", "test_x[qwen2]", "test_x[1]")]
    assert chosen == [True, True, False]
    assert tiers.is_quick_test(b, "test_any")
    assert tiers.is_quick_test(c, "test_fast") and not tiers.is_quick_test(c, "test_slow[1]")
    assert tiers.unused_words(a, ["test_first", "test_x[1]"]) == ["[qwen2]"]
    assert tiers.unused_words(c, ["test_slow[1]"]) == []


def test_every_word_of_the_tables_is_in_the_id_of_a_test(request: pytest.FixtureRequest) -> None:
    option, words = request.config.option, request.config.args
    if option.tier != "all" or option.keyword or any("::" in word for word in words):
        pytest.skip("only the whole suite has all tests of each file")
    names: dict[Path, list[str]] = {}
    for item in request.session.items:
        names.setdefault(item.path, []).append(item.nodeid.partition("::")[2])
    unused = {path.name: tiers.unused_words(path, own) for path, own in names.items()}
    assert not any(unused.values()), unused


def test_every_planted_fault_can_still_be_planted() -> None:
    words = [sys.executable, "scripts/faults/planted.py", "--check"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_change_reaches_the_files_that_import_it_over_any_number_of_modules() -> None:
    reached = {
        name: {path.stem for path in tiers.reaching([ROOT / name])}
        for name in (
            "mindgrpo/algorithm/advantages.py",
            "mindgrpo/parallel/mesh.py",
            "mindgrpo/backend/kernels/native/gemm.c",
            "tests/small_runs.py",
            "tests/test_mesh.py",
            "CHANGELOG.md",
        )
    }
    advantages, mesh, kernel, runs, test, prose = reached.values()
    assert "test_advantages" in advantages and "test_mesh" not in advantages
    assert {"test_mesh", "test_reshard_plan", "test_update"} <= mesh
    assert "test_kernels" in kernel and "test_mesh" not in kernel
    assert "test_resume" in runs and "test_advantages" not in runs
    assert test == {"test_mesh"}
    assert len(prose) < 10


def test_files_that_import_a_module_themselves_are_nearest_to_it() -> None:
    changed = [ROOT / "mindgrpo/parallel/mesh.py"]
    near, far, never = (
        distance_to(ROOT / "tests" / f"test_{name}.py", changed)
        for name in ("mesh", "trl_form", "ordering")
    )
    assert near == 1 < far < never == float("inf")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "-m pytest -q tests -n 4 --tier quick"),
        (("-k", "reshard"), "-m pytest -q tests -n 4 --tier quick -k reshard"),
        (("--changed",), "-m pytest -q tests -n 4 --tier quick --changed HEAD"),
        (("--changed", "HEAD~0", "-x"), "-m pytest -q tests -n 4 --tier quick --changed HEAD~0 -x"),
        (("--shard", "ranks", "-x"), "-m pytest -q tests -n 4 --shard ranks --file-order N"),
        (("tests/test_mesh.py", "-x"), "-m pytest -q tests/test_mesh.py -n 4 -x"),
        (("tests/a.py::b", "tests/c.py"), "-m pytest -q tests/a.py::b tests/c.py -n 4"),
        (("--all", "-x"), "-m pytest -q tests -n 4 --tier all --file-order N --durations 10 -x"),
    ],
)
def test_the_command_asks_pytest_for_a_tier_and_passes_further_arguments_on(
    tmp_path: Path, words: tuple[str, ...], expected: str
) -> None:
    ended = run_tests(tmp_path, *words)
    lines = ended.stdout.splitlines()
    found = [word if not word.isdigit() or word in "4 10" else "N" for word in lines[-1].split()]
    assert " ".join(found).startswith(expected), ended
    assert found[-1] == (words[-1] if words[-1:] == ("-x",) else found[-1])
    checks = [line for line in lines if line.startswith("== echo -m")]
    is_part = "--shard" in words or any(word.startswith("tests/") for word in words)
    assert len(checks) == (1 if is_part else 4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--shard",), "--shard (nothing) is none of"),
        (("--shard", "slow"), "--shard slow is none of in-process, processes, ranks"),
        (("--changed", "no-such-branch"), "git knows no such revision"),
    ],
)
def test_an_unknown_shard_or_revision_is_refused_in_a_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    ended = run_tests(tmp_path, *words)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("mindgrpo: ") and sentence in ended.stderr


def run_tests(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """run_tests.sh with an environment whose Python only prints its arguments, in a repository of its own."""
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "run_tests.sh").write_text((ROOT / "scripts" / "run_tests.sh").read_text())
    (scripts / "setup_env.sh").write_text("MINDGRPO_PYTHON=echo\n")
    (folder / "tests" / "__pycache__").mkdir(parents=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), (*identity, "commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return subprocess.run(
        ["bash", str(scripts / "run_tests.sh"), *words],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
