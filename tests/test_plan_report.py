"""What `python -m mindgrpo plan` and scripts/bench/plan.py say of a reshard, against figures worked out by hand.

Does not prove that a network keeps to such a figure, nor how long planning takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mindgrpo.backend.kernels.native.library import may_build
from mindgrpo.cli.verbs import main
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout, ParameterSpec, Split
from mindgrpo.weight_sync.plan import Links, Plan, busiest_link, plan_reshard

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"


def spec_of(layer: int) -> ParameterSpec:
    splits = (Split("tp", 0),)
    return ParameterSpec(f"layer{layer}", (8, 10), splits, position=layer, decay=True)


def small_plan() -> Plan:
    """Two layers of 8 x 10 float32 = 320 bytes each, on 4 ranks: DP1/MP2/PP2 to DP4/MP1.

    Ranks 0 and 1 hold the halves of layer 0, ranks 2 and 3 those of layer 1 (160 bytes each), and every rank wants
    both layers: each half goes to the three ranks without it. So every rank sends 3 x 160 = 480 bytes and receives
    640 - 160 = 480. With ranks 0 and 1 on one host: between hosts each half goes to 2 ranks, so a host sends
    2 halves x 2 x 160 = 640 and receives the same; inside a host each rank sends its half once, 160.
    """
    specs = (spec_of(0), spec_of(1))
    source = Layout.of(Mesh(1, 2, 2), specs)
    return plan_reshard(source, Layout.of(Mesh(4, 1), specs), itemsize=4)


def test_a_link_a_rank_carries_what_the_rank_sends_or_receives() -> None:
    busiest = busiest_link(small_plan(), Links(bytes_per_s=240.0))
    assert (busiest.num_bytes, busiest.seconds) == (480, 2.0)
    assert busiest.who.startswith("rank ")


def test_what_stays_in_a_host_does_not_use_its_link() -> None:
    busiest = busiest_link(small_plan(), Links(bytes_per_s=160.0, ranks_per_host=2))
    assert (busiest.num_bytes, busiest.seconds) == (640, 4.0)
    assert busiest.who in ("host 0", "host 1")


def test_a_slow_way_inside_a_host_can_be_what_all_wait_for() -> None:
    links = Links(bytes_per_s=160.0, ranks_per_host=2, local_bytes_per_s=16.0)
    busiest = busiest_link(small_plan(), links)
    assert (busiest.num_bytes, busiest.seconds) == (160, 10.0)
    assert busiest.who.startswith("rank ")
    fast = Links(bytes_per_s=160.0, ranks_per_host=2, local_bytes_per_s=1600.0)
    assert busiest_link(small_plan(), fast).num_bytes == 640


def test_both_directions_count() -> None:
    """One rank that holds all gives to three: it sends 3 x 320, and nobody receives more than 320."""
    specs = (spec_of(0),)
    source = Layout.of(Mesh(1, 1), specs)
    gives = plan_reshard(source, Layout.of(Mesh(4, 1), specs), itemsize=4)
    busiest = busiest_link(gives, Links(bytes_per_s=1.0))
    assert (busiest.who, busiest.direction, busiest.num_bytes) == ("rank 0", "sends", 960)
    takes = plan_reshard(Layout.of(Mesh(1, 4), specs), source, itemsize=4)
    busiest = busiest_link(takes, Links(bytes_per_s=1.0))
    assert (busiest.who, busiest.direction, busiest.num_bytes) == ("rank 0", "receives", 240)


def test_one_host_has_nothing_to_wait_for() -> None:
    busiest = busiest_link(small_plan(), Links(bytes_per_s=1.0, ranks_per_host=4))
    assert busiest.seconds == 0


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["plan", "--config", str(CONFIG), *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_plan_prints_the_seconds_and_who_is_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status, out, _ = told(capsys, "--link_GB_per_s", "0.001")
    assert status == 0
    (line,) = (line for line in out.splitlines() if " s at least" in line)
    seconds, size = float(line.split()[0]), float(line.split()[-2])
    assert seconds == pytest.approx(size / 0.001, rel=0.01) and seconds > 0
    assert "a link a rank" in line
    status, out, _ = told(capsys, "--link_GB_per_s=2", "--ranks_per_host=8")
    assert "0 s at least, at 2 GB/s each way (8 ranks a host, inside a host free)" in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ranks_per_host", "8"], "--link_GB_per_s"),
        (["--link_GB_per_s", "0"], "--link_GB_per_s: '0'"),
        (["--link_GB_per_s", "fast"], "'fast'"),
        (["--link_GB_per_s", "nan"], "'nan'"),
        (["--link_GB_per_s", "1", "--ranks_per_host", "0"], "--ranks_per_host: '0'"),
        (["--link_GB_per_s", "1", "--local_GB_per_s", "-1"], "--local_GB_per_s: '-1'"),
    ],
)
def test_links_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    status, out, err = told(capsys, *words)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err


def test_plan_says_what_vllm_takes_and_what_is_not_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    generator = {}
    for dtype in ("float32", "bfloat16"):
        words = ("--generate_config.use_vllm", "1", "--generate_config.vllm.dtype", dtype)
        status, out, _ = told(capsys, *words)
        assert status == 0
        assert f"vLLM's weights and cache {dtype}" in out and "vLLM's own programs" in out
        (line,) = (
            line
            for line in out.splitlines()
            if line.split()[:1] == ["rollout"] and "generator" in line
        )
        generator[dtype] = float(line.split("MiB")[0].split()[-1])
    assert generator["bfloat16"] == pytest.approx(generator["float32"] / 2, abs=0.1)
    assert "vLLM" not in told(capsys)[1]


@pytest.mark.skipif(not may_build(), reason="no C compiler on this machine")
@pytest.mark.parametrize("device, is_packed", [("CPU", True), ("Ascend", False)])
def test_plan_counts_packed_weights_where_there_are_any(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    is_packed: bool,
) -> None:
    monkeypatch.chdir(ROOT)
    rollouts = []
    for precision in ("highest", "high"):
        words = ("--context.device_target", device)
        _, out, err = told(capsys, *words, "--context.float32_matmul_precision", precision)
        assert not err
        (line,) = (
            line
            for line in out.splitlines()
            if line.split()[:1] == ["rollout"] and "generator" in line
        )
        rollouts.append(float(line.split("MiB")[0].split()[-1]))
    assert (rollouts[1] > rollouts[0]) is is_packed


def test_the_bench_plans_a_72b_model_on_1024_ranks_with_nothing_moved_twice() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "plan.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert (said["bench"], said["ranks"]) == ("plan", 1024)
    assert said["train"] == "DP8/MP8/PP16" and said["infer"] == "DP128/MP8"
    assert said["bytes_moved"] == said["bytes_lower_bound"] > 0
    # Each of the 1,024 ranks holds all layers' eighth afterwards and at most a sixteenth of that before.
    share = 2 * said["parameters"] / 8
    assert 1024 * share * 14 / 16 < said["bytes_moved"] < 1024 * share * 16 / 16
