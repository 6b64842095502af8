"""`mindgrpo doctor --device` on ranks: its jobs, kernels and first step, and one run of all that can run on processors.

Does not prove what an NPU computes: the fused kernels are doubles here, compared by the code that compares real ones.
Remedies for an NPU's host are in test_doctor_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from npu_stand_ins import PLANTS_KERNELS, PROGRAM_THAT_FAILS

from mindgrpo.doctor import first_step
from mindgrpo.doctor.examine import SECTIONS
from mindgrpo.doctor.jobs import CheckLine, Records, fails, merged, ok, read_records, run_job
from mindgrpo.doctor.probes.transfers import model_of
from mindgrpo.models.parameters import num_parameters

# -- jobs on ranks ------------------------------------------------------------------------------------------------


def recorded(
    folder: Path, rank: int, *rows: str | CheckLine, section: str = "communication"
) -> None:
    records = Records(folder, rank)
    records.section = section
    for row in rows:
        records.starts(row) if isinstance(row, str) else records.ends(row)


def test_a_line_says_which_rank_failed_or_did_not_come_to_its_end(tmp_path: Path) -> None:
    recorded(tmp_path, 0, ok("sum", "right"), fails("rows", "3 differ", "mend"), "send")
    recorded(tmp_path, 1, ok("sum", "right"), ok("rows", "right"), ok("send", "right"))
    with (tmp_path / "rank_1.jsonl").open("a") as file:
        file.write('{"section": "communication", "li')
    lines = merged(read_records(tmp_path, 2), ("communication", "weights"), "status 9")
    assert [(line.status, line.check) for line in lines["communication"]] == [
        ("ok", "sum"),
        ("fails", "rows"),
        ("fails", "send"),
    ]
    assert lines["communication"][1].seen == "rank 0: 3 differ"
    assert lines["communication"][2].seen == "rank 0 did not end: status 9"
    assert [line.status for line in lines["weights"]] == ["skipped"]
    nothing = merged(read_records(tmp_path / "none", 2), ("kernels",), "status 1")
    assert nothing["kernels"][0].status == "fails" and "status 1" in nothing["kernels"][0].seen


def test_an_end_that_is_bad_after_good_checks_is_a_line_too(tmp_path: Path) -> None:
    recorded(tmp_path, 0, ok("sum", "right"))
    lines = merged(read_records(tmp_path, 1), ("communication",), "status 139")
    assert [line.status for line in lines["communication"]] == ["ok", "fails"]


def test_a_check_in_which_a_rank_fails_is_told_with_the_tail_of_its_log(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(PROGRAM_THAT_FAILS)
    environment = os.environ | {"MINDGRPO_FORK": "0"}
    end = run_job(1, [str(program), str(tmp_path)], environment, 300.0, tmp_path / "job")
    assert end.status == 7 and "this rank is about to fail" in str(end.logs)
    (line,) = merged(read_records(tmp_path, 1), ("communication",), end.ending)["communication"]
    assert line.status == "fails" and line.check == "all-gather" and "status 7" in line.seen


def test_a_job_is_ended_at_its_deadline(tmp_path: Path) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text("import time\ntime.sleep(3600)\n")
    environment = os.environ | {"MINDGRPO_FORK": "0"}
    end = run_job(1, [str(program)], environment, 1.0, tmp_path / "job")
    assert end.status is None and end.ending == "not within 1 s, the deadline"
    left = [one for one in psutil.process_iter(["cmdline"]) if str(program) in str(one.info)]
    assert left == []


# -- kernels and the first step -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processors() -> Iterator[None]:
    from ascend_doubles import eager

    from mindgrpo.backend.cpu.backend import CpuBackend

    CpuBackend({})
    with eager():
        yield


def test_kernels_that_compute_what_their_doubles_do_pass_and_others_fail(processors: None) -> None:
    from ascend_doubles import DOUBLES
    from mindspore import ops

    from mindgrpo.backend.kernels.ascend import AscendKernels
    from mindgrpo.doctor.probes.kernel_cases import cases
    from mindgrpo.doctor.probes.kernels import Fused, compare

    good = Fused("fused", lambda: AscendKernels(DOUBLES, "float16"), "float16")
    assert {compare(case, good).status for case in cases()} == {"ok"}

    def swapped(x: Any, dim: int) -> Any:
        first, second = ops.split(x, x.shape[dim] // 2, dim)
        return second * ops.sigmoid(second) * first

    def not_finite(*args: Any, **kwargs: Any) -> Any:
        return DOUBLES.flash_attention_score(*args, **kwargs) / 0.0

    wrong = replace(DOUBLES, swiglu=swapped, flash_attention_score=not_finite)
    bad = Fused("fused", lambda: AscendKernels(wrong, "float16"), "float16")
    statuses = {case.name: compare(case, bad).status for case in cases()}
    failed = {name for name, status in statuses.items() if status == "fails"}
    assert failed == {
        "gate",
        "packed attention, biases",
        "packed attention, norms",
        "attention in rows of one sample",
        "attention of prompts",
    }


def test_integers_that_do_not_wrap_and_rows_that_take_anothers_angle_fail(
    processors: None,
) -> None:
    from ascend_doubles import DOUBLES
    from mindspore import Tensor, nn, ops

    from mindgrpo.backend.kernels.ascend import AscendKernels
    from mindgrpo.doctor.probes.kernel_cases import exact_cases
    from mindgrpo.doctor.probes.kernels import compare_exactly

    class Shifted(nn.Cell):
        def construct(self, x: Any) -> Any:
            # With the sign from above.
            return tuple(ops.bitwise_right_shift(x, shift) for shift in (11, 14, 15, 16, 17))

    class Products(nn.Cell):
        def construct(self, x: Any, y: Any) -> Any:
            # Ends at the largest number, where it should wrap.
            top = 2**31 - 1
            both = x.asnumpy().astype(float) * y.asnumpy().astype(float)
            return (Tensor(both.clip(-top, top).astype("int32")), *([x] * 4))

    def of_a_thousand_rows(x: Any, cos: Any, sin: Any, mode: int) -> Any:
        rows = Tensor([i % 1000 for i in range(x.shape[0])])
        return DOUBLES.rotary_position_embedding(x, cos[rows], sin[rows], mode)

    products, shifts, rotary = exact_cases()
    good = AscendKernels(DOUBLES, "bfloat16")
    for case in (products, shifts, rotary):
        assert compare_exactly(case, good, "float16").status == "ok"
    bad = AscendKernels(replace(DOUBLES, rotary_position_embedding=of_a_thousand_rows), "float16")
    planted = (
        replace(products, make=lambda _: Products()),
        replace(shifts, make=lambda _: Shifted()),
        rotary,
    )
    for case in planted:
        line = compare_exactly(case, bad, "float16")
        assert line.status == "fails" and "do not train on this device" in line.remedy


def test_a_kernel_that_breaks_or_ends_its_process_spoils_no_other_line(tmp_path: Path) -> None:
    """Planted in the place of a C kernel, in whatever process makes its check."""
    (tmp_path / "sitecustomize.py").write_text(PLANTS_KERNELS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MINDGRPO_FORK": "0"}
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mindgrpo", "doctor", "--device", "--only", "kernels"]
    ended = subprocess.run(
        [*command, "--output", str(report)],
        env=environment,
        cwd=first_step.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lines = {line["check"]: line for line in json.loads(report.read_text())["lines"]}
    failed = {check: line["seen"] for check, line in lines.items() if line["status"] == "fails"}
    assert set(failed) == {"C norm of a sum, float32", "C packed attention, biases, float32"}
    assert "this kernel breaks its process" in failed["C norm of a sum, float32"]
    assert "killed by signal 9" in failed["C packed attention, biases, float32"]
    following = ("C gate, float32", "C packed attention, norms, float32")
    assert [lines[check]["status"] for check in following] == ["ok", "ok"]
    assert any(
        "this kernel breaks" in str(job) for job in json.loads(report.read_text())["jobs"].values()
    )


def test_a_first_step_that_is_another_one_fails_within_what_its_dtype_allows() -> None:
    committed = json.loads(first_step.COMMITTED.read_text())
    assert {line.status for line in first_step.compared(committed, committed, "float32")} == {"ok"}
    tokens = ["0", *committed["first_tokens"][1:]]
    other = committed | {"grad_norm": committed["grad_norm"] * 1.1, "first_tokens": tokens}
    exact = {line.check: line.status for line in first_step.compared(other, committed, "float32")}
    assert exact["first step's grad_norm"] == exact["first step's first 4 tokens"] == "fails"
    assert exact["first step's reward/mean"] == "ok"
    narrow = first_step.compared(other, committed, "bfloat16")
    assert {line.status for line in narrow} == {"ok"}
    for value in (committed["grad_norm"] * 1.5, float("nan")):
        step = committed | {"grad_norm": value}
        statuses = [line.status for line in first_step.compared(step, committed, "bfloat16")]
        assert statuses.count("fails") == 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_the_model_whose_weights_are_moved_can_be_cut_and_has_the_size(num_ranks: int) -> None:
    for num_bytes in (24 << 20, 1 << 30):
        model = model_of(num_ranks, num_bytes, 2)
        assert model.num_attention_heads % num_ranks == 0 == model.vocab_size % num_ranks
        assert model.num_hidden_layers in range(1, 33)
        size = 2 * num_parameters(model)
        assert size <= 2 * num_bytes or model.num_hidden_layers == 1


# -- one run of everything that can run here ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("doctor") / "report.json"
    command = [sys.executable, "-m", "mindgrpo", "doctor", "--device", "--ranks", "2"]
    environment = os.environ | {"MS_SECRET_WORD": "xyzzy"}
    environment.pop("MINDGRPO_NATIVE", None)
    ended = subprocess.run(
        [*command, "--output", str(report)],
        env=environment,
        cwd=first_step.ROOT,
        capture_output=True,
        text=True,
        timeout=2400,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "xyzzy" not in report.read_text()
    made: dict[str, Any] = json.loads(report.read_text())
    return made


def checks(content: dict[str, Any], section: str) -> dict[str, str]:
    rows = [line for line in content["lines"] if line["section"] == section]
    return {line["check"]: line["status"] for line in rows}


def test_every_line_that_can_run_on_processors_passes(content: dict[str, Any]) -> None:
    assert {line["section"] for line in content["lines"]} == set(SECTIONS)
    assert content["results"]["fails"] == 0 and content["results"]["ok"] >= 20
    assert checks(content, "communication") == {
        "all-reduce": "ok",
        "all-gather": "ok",
        "send and receive": "ok",
        "objects": "ok",
        "large all-reduce": "ok",
    }
    assert set(checks(content, "weights").values()) == {"ok"}
    assert set(checks(content, "first_step").values()) == {"ok"}
    kernels = checks(content, "kernels")
    exact = ("int32 products", "right shifts", "rotary positions of 8192 rows")
    assert [kernels[check] for check in exact] == ["ok"] * 3
    skipped = {check for check, status in kernels.items() if status == "skipped"}
    assert {check for check in kernels if check.startswith("fused")} <= skipped
    assert all("no NPU here" in line["seen"] for line in content["lines"][:4])


def test_the_report_has_what_a_reader_elsewhere_asks_for(content: dict[str, Any]) -> None:
    assert content["versions"]["mindspore"].startswith("2.9")
    assert content["runs_on"] == "CPU, device, 2 ranks" and content["machine"]
    jobs = content["jobs"]
    assert set(jobs) == {"communication,weights", "kernels", "first_step"}
    assert all(job["status"] == 0 and job["seconds"] > 0 for job in jobs.values())
    (sync,) = [line for line in content["lines"] if line["check"] == "weight sync"]
    assert sync["figures"]["bytes"] > 10 << 20 and sync["figures"]["seconds"] > 0
