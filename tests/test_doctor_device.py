"""`mindgrpo doctor --device`: what it reads of tools and files, and its remedies, on a host of stand-ins.

Does not prove that a real driver's tools print what the stand-ins do: no such host was within reach. What runs on ranks
is in test_doctor_jobs.py.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from npu_stand_ins import (
    TABLE_910A,
    TABLE_A3,
    NpuHost,
    chip_910b,
    held,
    idle,
    table,
    table_910b,
)

from mindgrpo.backend import targets
from mindgrpo.cli.verbs import main
from mindgrpo.doctor import first_step
from mindgrpo.doctor.examine import RUNGS, telling_variables
from mindgrpo.doctor.jobs import CheckLine
from mindgrpo.doctor.probes import host
from mindgrpo.doctor.probes.host import read_smi

# -- what tools and files say -------------------------------------------------------------------------------------


def test_tables_of_three_generations_are_read() -> None:
    busy = read_smi(table_910b("25.5.2", (41697, 3400), held(0, 0, 19341, "VLLMWorker_TP", 38001)))
    assert busy.version == "25.5.2"
    assert [(chip.used_mib, chip.total_mib) for chip in busy.chips] == [
        (41697, 65536),
        (3400, 65536),
    ]
    assert busy.chips[0].holders[0] == "19341 (VLLMWorker_TP, 38001 MiB)"
    assert busy.chips[1].holders == ()
    two_on_one = read_smi(TABLE_A3)
    assert [chip.index for chip in two_on_one.chips] == [0, 1]
    assert [len(chip.holders) for chip in two_on_one.chips] == [0, 1]
    old = read_smi(TABLE_910A).chips[0]
    assert (old.used_mib, old.total_mib) == (2, 32768)


@pytest.mark.parametrize("text", ["", "DrvMngGetConsoleLogLevel failed", table("25.2.0", [], [])])
def test_a_table_that_cannot_be_read_is_no_empty_one(text: str) -> None:
    with pytest.raises(ValueError):
        read_smi(text)


@pytest.mark.parametrize(
    "text, version",
    [
        ("package_name=Ascend-cann-toolkit\nversion=8.3.RC2\ninnerversion=V100R001", "8.3.RC2"),
        ("Version=8.5.0.1.220\nversion_dir=8.5.0", "8.5.0.1.220"),
        ("Version=7.7.T20.0.B210:8.1.RC1\n", "8.1.RC1"),
        ("innerversion=V100R001C23\n", None),
    ],
)
def test_version_files_are_read(text: str, version: str | None) -> None:
    assert host.version_in(text) == version


def test_the_matrix_takes_what_is_published_together_and_refuses_what_is_older() -> None:
    def toolkit(version: str, mindspore: str | None) -> CheckLine:
        return host.toolkit_line("CANN", version, Path("version.info"), mindspore)

    for mindspore, newest, too_new in (
        ("2.9.0", "9.0.0", "9.1.0"),
        ("2.10.0", "9.1.0", "9.2.0"),
        ("2.7.2", "9.1.0", "9.2.0"),
        (None, "9.1.0", "9.2.0"),
    ):
        for version in (newest, "8.5.0"):
            assert toolkit(version, mindspore).status == "ok"
        for version in ("8.1.RC1", "8.0.0", too_new):
            wrong = toolkit(version, mindspore)
            assert wrong.status == "fails" and f"install CANN {newest}" in wrong.remedy
    for cann, driver in host.TOGETHER.items():
        assert host.driver_line("driver", driver, cann).status == "ok"
    older = host.driver_line("driver", "24.1.rc3", "8.5.0")
    assert older.status == "fails" and "install driver and firmware 25.5.0" in older.remedy
    assert "untried" in host.driver_line("driver", "26.0.rc1", "8.5.0").seen
    assert host.driver_line("driver", "26.0.rc1", "9.2.0").status == "skipped"


# -- a host of stand-ins ------------------------------------------------------------------------------------------


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NpuHost:
    made = NpuHost(tmp_path).make()
    for name, value in made.variables(os.environ["PATH"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(targets, "DEVICE_FILES", made.devices)
    monkeypatch.setattr(host, "FIRMWARE", tmp_path / "none")
    monkeypatch.setattr(host, "IMPORTS", "pass")
    return made


def examined(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    *words: str,
    rungs: str = "versions,devices",
) -> dict[str, Any]:
    """The report of the rungs that start nothing; its status and lines are those that were printed."""
    report = folder / "report.json"
    command = ["doctor", "--device", "--only", rungs, "--ranks", "2"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--output", str(report), *words])
    content: dict[str, Any] = json.loads(report.read_text())
    assert ended.value.code == (1 if content["results"]["fails"] else 0)
    printed = capsys.readouterr().out
    for line in content["lines"]:
        assert f"{line['check']}: {line['seen']}" in printed
        assert (line["status"] == "fails") == ("remedy" in line)
    return content


def failures(content: dict[str, Any]) -> dict[str, str]:
    """What fails, with what was seen and the remedy."""
    rows = [line for line in content["lines"] if line["status"] == "fails"]
    return {line["check"]: f"{line['seen']} -> {line['remedy']}" for line in rows}


def test_a_host_in_order_passes(npu: NpuHost, capsys: pytest.CaptureFixture[str]) -> None:
    content = examined(npu.folder, capsys)
    assert failures(content) == {}
    lines = {line["check"]: line["seen"] for line in content["lines"]}
    assert content["runs_on"] == "Ascend, device, 2 ranks"
    assert lines["driver"] == "26.0.rc1, firmware unknown, 2 x 910B3, all healthy"
    assert lines["CANN"].startswith("9.0.0 (") and lines["device files"].startswith("2,")
    assert lines["memory of device 1"] == "60.7 of 64.0 GiB free, no process"


def test_a_wrong_cann_and_an_old_driver_have_their_remedies(
    npu: NpuHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host, "IMPORTS", "import nothing_of_this_name")
        assert "No module named" in failures(examined(npu.folder, capsys))["imports"]
    monkeypatch.setattr(host, "installed_version", {"mindspore": "2.9.0"}.get)
    npu.give_cann("8.0.0")
    assert (
        "MindSpore 2.9 takes 8.2, 8.3, 8.5, 9.0 -> install CANN 9.0.0"
        in (failures(examined(npu.folder, capsys))["CANN"])
    )
    npu.give_cann("8.5.0")
    npu.give_smi(table_910b("24.1.rc3"))
    wrong = failures(examined(npu.folder, capsys))
    assert list(wrong) == ["driver's version"]
    assert "24.1.rc3, older than 25.5.0" in wrong["driver's version"]


def test_a_busy_device_is_told_with_the_processes_that_hold_it(
    npu: NpuHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chips = [chip_910b(0, 3400), chip_910b(1, 41697), chip_910b(2, 30000)]
    npu.give_smi(table("26.0.rc1", chips, [idle(0), held(1, 0, 4711, "python", 38000), idle(2)]))
    wrong = failures(examined(npu.folder, capsys))
    assert list(wrong) == ["memory of device 1"]
    assert "held by process 4711 (python, 38000 MiB)" in wrong["memory of device 1"]
    assert "leave device 1 out of ASCEND_RT_VISIBLE_DEVICES" in wrong["memory of device 1"]
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,2")
    wrong = failures(examined(npu.folder, capsys))
    assert list(wrong) == ["memory of device 2"] and "outside of this container" in str(wrong)
    few = failures(examined(npu.folder, capsys, "--ranks", "3"))
    assert "2 devices are here, but 3 ranks need one each" in few["device memory"]


def test_another_mindspore_is_told(
    npu: NpuHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.7.2" if name == "mindspore" else real(name)
    )
    wrong = failures(examined(npu.folder, capsys))
    assert list(wrong) == ["machine"] and "pip install 'mindspore>=2.9,<2.11'" in wrong["machine"]


def test_a_shell_without_set_env_a_sick_device_and_closed_files_are_told(
    npu: NpuHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ASCEND_OPP_PATH")
    npu.give_smi(table("26.0.rc1", [chip_910b(0, 3400), chip_910b(1, 3400, "Alarm")], []))
    (npu.devices / "devmm_svm").unlink()
    wrong = failures(examined(npu.folder, capsys))
    # The ladder does not go on to the devices.
    assert list(wrong) == ["set_env.sh"]
    assert f"ASCEND_OPP_PATH lack what it sets -> source {npu.home}/set_env.sh" in str(wrong)
    wrong = failures(examined(npu.folder, capsys, rungs="devices"))
    assert "device 1 is Alarm" in wrong["driver"]
    assert "devmm_svm" in wrong["device files"] and "HwHiAiUser" in wrong["device files"]
    for file in npu.devices.iterdir():
        file.unlink()
    wrong = failures(examined(npu.folder, capsys, rungs="devices"))
    assert "--device /dev/davinci0" in wrong["device files"]
    monkeypatch.delenv("ASCEND_HOME_PATH")
    assert "install CANN, then: source" in failures(examined(npu.folder, capsys))["CANN"]


def test_a_tool_that_fails_or_does_not_end_is_told(
    npu: NpuHost, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    npu.give_smi("dcmi module initialize failed. ret is -8005", status=1)
    assert "status 1: dcmi module initialize" in failures(examined(npu.folder, capsys))["driver"]
    npu.give_smi("nothing of use")
    assert "cannot be read" in failures(examined(npu.folder, capsys))["driver"]
    monkeypatch.setattr(host, "TOOL_SECONDS", 0.2)
    npu.give_smi(table_910b(), before="exec sleep 30")
    assert "did not end within" in failures(examined(npu.folder, capsys))["driver"]


# -- the command line and the file --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--ranks", "2"), "--ranks has no effect without --device"),
        (("--device", "--ranks", "0"), "--ranks 0 is not a positive whole number"),
        (("--device", "--only", "organs"), "--only names 'organs', but must be of versions, "),
        (("--device", "--output", "/nowhere/report.json"), "cannot be written"),
        (("--device", "--output", __file__), "must end with .json"),
        (("--device", "--output", str(first_step.COMMITTED)), "is not a report of the doctor"),
        (("extra",), "unrecognized arguments: extra"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    words: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_variables_of_a_report_are_those_that_matter_and_no_secrets() -> None:
    told = telling_variables(
        {"ASCEND_HOME_PATH": "/c", "HCCL_IF_IP": "1", "MS_TOKEN": "x", "HOME": "/h", "PATH": "/b"}
    )
    assert told == {"ASCEND_HOME_PATH": "/c", "HCCL_IF_IP": "1", "PATH": "/b"}


def test_the_page_has_the_matrix_and_the_tolerances() -> None:
    page = (first_step.ROOT / "docs" / "first_run_on_npus.md").read_text()
    for cann, driver in host.TOGETHER.items():
        assert cann in page and driver in page
    for published, taken in host.CANN_OF.values():
        assert published in host.TOGETHER and ", ".join(taken) in page
    assert host.PAGE in page
    assert all(f"`{rung}`" in page for rung in RUNGS)
