"""`mindgrpo doctor --device` on ranks: its ladder, jobs and first step, with faults that are planted on their rungs.

Does not prove what an NPU computes: the fused kernels are doubles here, compared by the code that compares real ones.
Remedies for an NPU's host are in test_doctor_device.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from npu_stand_ins import PLANTS_KERNELS, PROGRAM_THAT_FAILS
from ranks_as_threads import ThreadBackend, World

from mindgrpo.backend.speeds import Speeds
from mindgrpo.backend.targets import Target
from mindgrpo.config import load_config
from mindgrpo.doctor import examine, first_step
from mindgrpo.doctor.examine import RUNGS, DoctorReport, Examination
from mindgrpo.doctor.jobs import (
    CheckLine,
    JobEnd,
    Records,
    fails,
    merged,
    ok,
    read_records,
    run_job,
)
from mindgrpo.models.decoder_config import read_config
from mindgrpo.models.parameters import num_parameters
from mindgrpo.plan.run_plan import plan_run

DEVICE = Target("CPU", "device")

# -- jobs on ranks ------------------------------------------------------------------------------------------------


def recorded(folder: Path, rank: int, *rows: str | CheckLine) -> None:
    records = Records(folder, rank)
    for row in rows:
        records.starts(row) if isinstance(row, str) else records.ends(row)


def test_a_line_says_which_rank_failed_or_did_not_come_to_its_end(tmp_path: Path) -> None:
    recorded(tmp_path, 0, ok("sum", "right"), fails("rows", "3 differ", "mend"), "send")
    recorded(tmp_path, 1, ok("sum", "right"), ok("rows", "right"), ok("send", "right"))
    with (tmp_path / "rank_1.jsonl").open("a") as file:
        file.write('{"starts": "se')
    lines = merged(read_records(tmp_path, 2), "status 9")
    assert [(line.status, line.check, line.seen) for line in lines] == [
        ("ok", "sum", "right"),
        ("fails", "rows", "rank 0: 3 differ"),
        ("fails", "send", "ranks [0] did not end: status 9"),
    ]
    (nothing,) = merged(read_records(tmp_path / "none", 2), "status 1")
    assert nothing.status == "fails" and nothing.check == "start of the ranks"


def test_an_end_that_is_bad_after_good_checks_is_a_line_too(tmp_path: Path) -> None:
    recorded(tmp_path, 0, ok("sum", "right"))
    lines = merged(read_records(tmp_path, 1), "status 139")
    assert [line.status for line in lines] == ["ok", "fails"]


def test_a_check_in_which_a_rank_fails_is_told_with_what_cann_logged(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(PROGRAM_THAT_FAILS)
    environment = os.environ | {"MINDGRPO_FORK": "0"}
    end = run_job(1, [str(program), str(tmp_path)], environment, 300.0, tmp_path)
    (line,) = merged(read_records(tmp_path, 1), end.ending)
    assert line.status == "fails" and line.check == "all-gather" and "status 7" in line.seen
    assert end.device_errors == ["[ERROR] HCCL(1,python): the link is down"]


def test_a_job_is_ended_at_its_deadline_after_its_ranks_have_said_where_they_are(
    tmp_path: Path,
) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text(
        "import faulthandler, sys, time\n"
        "from pathlib import Path\n"
        "from mindgrpo.doctor.jobs import STACKS, Records\n"
        "faulthandler.register(STACKS)\n"
        "def waits_here():\n    time.sleep(3600)\n"
        "Records(Path(sys.argv[1]), 0).starts('waiting')\n"
        "waits_here()\n"
    )
    environment = os.environ | {"MINDGRPO_FORK": "0"}
    end = run_job(1, [str(program), str(tmp_path)], environment, 5.0, tmp_path)
    assert end.status is None and end.ending == "not within 5 s, the deadline"
    left = [one for one in psutil.process_iter(["cmdline"]) if str(program) in str(one.info)]
    assert left == []
    assert any("waits_here" in path.read_text() for path in tmp_path.glob("logs/*/*.log"))


# -- the ladder in this process, with planted faults ------------------------------------------------------------


@pytest.fixture(scope="module")
def processors() -> Iterator[None]:
    from ascend_doubles import eager

    from mindgrpo.backend.cpu.backend import CpuBackend

    CpuBackend({})
    with eager(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("mindgrpo.doctor.probes.kernels.CALLS", 1)
        yield


def climbed(
    folder: Path, patch: pytest.MonkeyPatch, rung: str, num_ranks: int = 1
) -> tuple[list[CheckLine], list[CheckLine]]:
    """Lines of `rung` and of one above it that would pass, made by threads in the place of a job's ranks."""
    from mindgrpo.doctor.on_ranks import lines_of

    def ranks_here(count: int, command: list[str], *others: Any) -> JobEnd:
        _, names, records_folder, _, first, *keys = command

        def rank(number: int) -> int:
            HERE.rank, records = number, Records(Path(records_folder), number)
            try:
                for line in lines_of(names.split(","), DEVICE, int(first), keys, records.starts):
                    records.ends(line)
            except SystemExit:
                return 1
            return 0

        with ThreadPoolExecutor(count) as pool:
            return JobEnd(max(pool.map(rank, range(count))), 1.0, 1.0, "")

    patch.setattr(examine, "run_job", ranks_here)
    patch.setitem(examine.RUNGS, "above", RUNGS["versions"])
    patch.setitem(examine.HOST_CHECKS, "above", lambda *_: [ok("above", "reached")])
    examination = Examination(DEVICE, num_ranks, {}, folder)
    lines = {name: own for name, own, _ in examination.climb([rung, "above"])}
    return lines[rung], lines.get("above", [])


HERE = threading.local()


def failed(lines: list[CheckLine]) -> list[str]:
    return [line.check for line in lines if line.status == "fails"]


class Adds(ThreadBackend):
    """Sums over four ranks as threads: each starts with its own numbers, or with rank 0's."""

    name, is_ordered = "threads", True

    def __init__(self, world: World) -> None:
        super().__init__(world, HERE.rank)
        self.world.sum_cell = lambda: None  # type: ignore[attr-defined]

    def graph(self, cell: Any, name: str) -> Any:
        from mindspore import Tensor

        def total(x: Any) -> Any:
            arrays = self.world.gather_objects(x.asnumpy())
            first = 0 if self.is_ordered else self.rank
            return Tensor(sum(arrays[first + 1 :] + arrays[:first], arrays[first]))

        return total

    def link(self, peer: int, shape: Any) -> Any:
        numbers = self.world.gather_objects

        class Link:
            def exchange(self, outgoing: Any, receives: Any) -> Any:
                arrived = numbers(outgoing)
                return lambda: None if receives is None else arrived[peer]

        return Link()

    def synchronize(self) -> None:
        """Nothing is started that is not done."""


@pytest.mark.parametrize("is_ordered", [True, False])
def test_sums_that_differ_between_ranks_end_the_ladder_at_two_ranks(
    is_ordered: bool, processors: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(4)
    monkeypatch.setattr(Adds, "is_ordered", is_ordered)
    monkeypatch.setattr("mindgrpo.doctor.on_ranks.connect", lambda *_: Adds(world))
    monkeypatch.setattr(Adds, "close", lambda self: None, raising=False)
    monkeypatch.setattr(examine, "STEP", "none")
    monkeypatch.setitem(RUNGS, "all_ranks", examine.Rung(("communication",), 0))
    monkeypatch.setitem(examine.DEADLINES, "communication", 1.0)
    lines, above = climbed(tmp_path, monkeypatch, "all_ranks", num_ranks=4)
    assert failed(lines) == ([] if is_ordered else ["same bits of sums"])
    assert bool(above) == is_ordered
    assert is_ordered or "not on ranks [1, 2, 3]" in "".join(line.seen for line in lines)


def test_memory_that_is_not_given_back_ends_the_ladder_at_one_rank(
    processors: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mindgrpo.backend.device.host_cpu import HostCpuBackend

    kept: list[Any] = []
    monkeypatch.setattr(HostCpuBackend, "give_up", lambda self, own: kept.append(own.data))
    lines, above = climbed(tmp_path, monkeypatch, "one_rank")
    assert failed(lines) == ["memory of weights that are released"] and not above
    assert {"rates", "offload to the host and back"} <= {line.check for line in lines}
    report = DoctorReport("CPU, one rank", "", [], {})
    report.add("one_rank", lines)
    rates = report.settings()["roofline"]
    assert rates.keys() <= {field.name for field in fields(Speeds)}
    assert all(value > 0 for value in rates.values()) and "host_copy_GB_per_s" in rates


def test_integers_that_do_not_wrap_end_the_ladder_at_the_first_kernels(
    processors: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one product is wrong; everything else is NumPy's."""
    from mindgrpo.doctor.probes import kernels

    def one_bit(case: Any) -> Any:
        if case.name != "int32 products":
            return case

        def products(a: Any, b: Any) -> Any:
            made = [own.asnumpy() for own in case.make(None)(a, b)]
            made[2][77] ^= 1
            return tuple(map(kernels.Tensor, made))

        return replace(case, make=lambda _: products)

    real, alike = kernels.cases, ("packed attention, norms", "attention in rows of one sample")
    monkeypatch.setattr(
        kernels,
        "cases",
        lambda *own: [one_bit(case) for case in real(*own) if case.name not in alike],
    )
    lines, above = climbed(tmp_path, monkeypatch, "float32")
    assert failed(lines) == ["plain int32 products, float32"] and not above
    assert len(lines) > 40 and {line.status for line in lines} == {"ok", "fails"}
    (wrong,) = [line for line in lines if line.status == "fails"]
    assert "do not train on this device" in wrong.remedy
    assert all(line.figures["microseconds"] > 0 for line in lines)


def test_every_method_of_the_contract_is_compared() -> None:
    from mindgrpo.backend.kernels.contract import Kernels
    from mindgrpo.doctor.probes.kernel_cases import SMALL, cases

    methods = {name for name, own in vars(Kernels).items() if callable(own) and name[0] != "_"}
    compared = {case.method for case in cases(SMALL, "float32")}
    # Not of devices; and what others take.
    others = {"leave", "adamw", "square_sum", "slots", "float32_matmul", "float32_product"}
    taken = {"rope_and_mask", "cached_angles", "adamw_inputs", "context_inputs"}
    assert methods - compared == others | taken


def test_kernels_that_compute_what_their_doubles_do_pass_and_others_fail(processors: None) -> None:
    from ascend_doubles import DOUBLES
    from mindspore import Tensor, ops

    from mindgrpo.backend.kernels.ascend import AscendKernels
    from mindgrpo.doctor.probes.kernel_cases import SMALL, cases
    from mindgrpo.doctor.probes.kernels import Fused, compare

    # TopK is no operation of the table's, and has no kernel here; rows that are one sample take the same path.
    names = ("largest", "packed attention, norms", "attention in rows of one sample")
    chosen = [case for case in cases(SMALL, "float16") if case.method and case.name not in names]

    def statuses(table: Any) -> dict[str, str]:
        own = Fused("fused", lambda: AscendKernels(table, "float16"), "float16")
        return {case.name: compare(case, own).status for case in chosen}

    found = statuses(DOUBLES)
    assert {*found.values()} == {"ok", "skipped"} and found["matmul"] == "skipped"

    def swapped(x: Any, dim: int) -> Any:
        first, second = ops.split(x, x.shape[dim] // 2, dim)
        return second * ops.sigmoid(second) * first

    def not_finite(*args: Any, **kwargs: Any) -> Any:
        return DOUBLES.flash_attention_score(*args, **kwargs) / 0.0

    def of_ten_rows(x: Any, cos: Any, sin: Any, mode: int) -> Any:
        rows = Tensor([i % 10 for i in range(x.shape[0])])
        return DOUBLES.rotary_position_embedding(x, cos[rows], sin[rows], mode)

    wrong = replace(DOUBLES, swiglu=swapped, flash_attention_score=not_finite)
    few = ("glu", "add rms norm", "attention of prompts")
    chosen = [case for case in chosen if case.name in few]
    bad = {name for name, status in statuses(wrong).items() if status == "fails"}
    assert bad == {"glu", "attention of prompts"}
    short = statuses(replace(DOUBLES, rotary_position_embedding=of_ten_rows))
    assert [name for name, status in short.items() if status == "fails"] == [few[-1]]


def test_a_kernel_that_breaks_or_ends_its_process_ends_the_ladder_at_the_fused_ones(
    tmp_path: Path,
) -> None:
    """Planted in the place of a C kernel, in whatever process makes its check; a run can do without what failed."""
    (tmp_path / "sitecustomize.py").write_text(PLANTS_KERNELS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MINDGRPO_FORK": "0"}
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mindgrpo", "doctor", "--device", "--only", "fused,pp2"]
    ended = subprocess.run(
        [*command, "--output", str(report)],
        env=environment,
        cwd=first_step.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    breaks, killed = "C add rms norm, float32", "C packed attention, biases, float32"
    assert f"stopped at fused, where {breaks}, {killed} fail" in ended.stdout
    lines = {line["check"]: line for line in json.loads(report.read_text())["lines"]}
    seen = {check: line["seen"] for check, line in lines.items() if line["status"] == "fails"}
    assert "this kernel breaks its process" in seen[breaks] and "signal 9" in seen[killed]
    following = ("C glu, float32", "C packed attention, norms, float32")
    assert [lines[check]["status"] for check in following] == ["ok", "ok"]
    with tarfile.open(tmp_path / "report.tar.gz") as archive:
        logs = [archive.extractfile(name) for name in archive.getnames() if "worker" in name]
        assert any("this kernel breaks" in str(log and log.read()) for log in logs)
        assert {"report.json", "report.yaml"} <= {*archive.getnames()}
    keys = ("--context", (tmp_path / "report.yaml").read_text(), "--context.backend", "device")
    context = load_config(first_step.EXAMPLE, keys).config.context
    assert context.plain_kernels == ["add_rms_norm", "attention"]


def test_a_first_step_that_is_another_one_fails_within_what_its_dtype_allows() -> None:
    committed = json.loads(first_step.COMMITTED.read_text())
    assert {line.status for line in first_step.compared(committed, committed, "float32")} == {"ok"}
    tokens = ["0", *committed["first_tokens"][1:]]
    other = committed | {"grad_norm": committed["grad_norm"] * 1.1, "first_tokens": tokens}
    exact = {line.check: line.status for line in first_step.compared(other, committed, "float32")}
    assert exact["first step's grad_norm"] == exact["first step's share of other starts"] == "fails"
    assert exact["first step's reward/mean"] == "ok"
    narrow = first_step.compared(other, committed, "bfloat16")
    assert {line.status for line in narrow} == {"ok"}
    for value in (committed["grad_norm"] * 1.5, float("nan")):
        step = committed | {"grad_norm": value}
        statuses = [line.status for line in first_step.compared(step, committed, "bfloat16")]
        assert statuses.count("fails") == 1


@pytest.mark.parametrize(
    ("rung", "num_ranks"),
    [("one_rank", 1), ("mp2", 2), ("pp2", 2), ("all_ranks", 4), ("all_ranks", 8)],
)
def test_the_step_of_each_rung_can_be_planned(
    rung: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(first_step.ROOT)
    words = first_step.words(rung, num_ranks, "CPU", tmp_path)
    config = load_config(first_step.EXAMPLE, words).config
    plan = plan_run(config, read_config(config.actor_config.load), num_ranks)
    assert plan.world_size == num_ranks
    assert len(plan.train.stage_layers) == (2 if rung == "pp2" or num_ranks > 2 else 1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 16])
def test_the_model_whose_weights_are_moved_can_be_cut_and_has_the_size(num_ranks: int) -> None:
    from mindgrpo.doctor.probes.transfers import model_of

    for num_bytes in (24 << 20, 1 << 30):
        model = model_of(num_ranks, num_bytes, 2)
        assert model.num_attention_heads % num_ranks == 0 == model.vocab_size % num_ranks
        assert model.num_hidden_layers in range(1, 33)
        size = 2 * num_parameters(model)
        assert size <= 2 * num_bytes or model.num_hidden_layers == 1


# -- a run of what two ranks do -----------------------------------------------------------------------------------


def test_two_ranks_share_layers_and_what_they_find_goes_into_a_run(
    tmp_path: Path,
) -> None:
    """From the ladder's foot to all ranks, without the rungs of one rank, which tests above make."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "mindgrpo", "doctor", "--device", "--ranks", "2"]
    ended = subprocess.run(
        [*command, "--only", "versions,devices,mp2,all_ranks", "--output", str(report)],
        env=os.environ | {"MS_SECRET_WORD": "xyzzy"},
        cwd=first_step.ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "xyzzy" not in report.read_text()
    content: dict[str, Any] = json.loads(report.read_text())
    checks = {(line["rung"], line["check"]): line for line in content["lines"]}
    from mindgrpo.doctor.probes.transfers import TRANSFERS

    for check in (*TRANSFERS, "weight sync", "first step of the example", "first step's loss"):
        assert checks["mp2", check]["status"] == "ok"
    assert checks["all_ranks", "all_ranks"]["status"] == "skipped"
    assert all(
        "no NPU here" in checks["devices", own]["seen"] for own in ("driver", "device files")
    )
    assert content["runs_on"] == "CPU, device, 2 ranks"
    assert f"mindspore {metadata.version('mindspore')}" in str(content["machine"])
    assert {name: job["status"] for name, job in content["jobs"].items()} == {"mp2": 0}
    settings = tmp_path / "report.yaml"
    assert f'--config FILE --context "$(cat {settings})"' in ended.stdout
    loaded = load_config(first_step.EXAMPLE, ["--context", settings.read_text()]).config
    assert (
        loaded.context.roofline.link_GB_per_s
        == yaml.safe_load(settings.read_text())["roofline"]["link_GB_per_s"]
    )
