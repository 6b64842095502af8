"""What the benches print: the keys others read, alone on standard output, and token counts that are exact.

Does not prove a figure: nothing here is timed, and the peers (torch, TRL, vLLM) are not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_generators import WITH_C

from mindgrpo.parallel.mesh import Mesh

BENCH = Path(__file__).resolve().parent.parent / "scripts" / "bench"
MODEL = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WORK = {"model": MODEL, "prompts": 2, "generations": 3, "prompt_tokens": 5, "new_tokens": 4}


@pytest.fixture(autouse=True)
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def work_file(tmp_path: Path) -> Path:
    path = tmp_path / "work.json"
    path.write_text(json.dumps(WORK))
    return path


def bench(program: str, work: Path, *words: str) -> dict[str, Any]:
    return printed(work.parent, program, "--work", str(work), *words)


def printed(folder: Path, program: str, *words: str) -> dict[str, Any]:
    """The JSON line of a bench, which must be all that it prints on standard output."""
    command = [sys.executable, str(BENCH / program), *words]
    environment = os.environ | {"MINDGRPO_LOG_DIR": str(folder / "logs")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("\n") == 1
    return dict(json.loads(ended.stdout))


def test_the_step_bench_runs_whole_steps_of_exactly_the_tokens_asked_for(work_file: Path) -> None:
    figures = bench("step.py", work_file, "--steps", "2")
    contract = {"median_step_s", "min_step_s", "tokens_per_step", "compile_s", "phases"}
    assert figures["bench"] == "step"
    assert contract <= figures.keys()
    assert figures["tokens_per_step"] == 2 * 3 * (5 + 4)
    assert figures["new_tokens_per_step"] == 2 * 3 * 4
    assert {"reshard", "rollout", "score", "reference", "update"} <= figures["phases"].keys()
    assert len(figures["steps_s"]) == 2
    assert figures["min_step_s"] == min(figures["steps_s"])
    assert figures["late_compiles"] == 0
    assert figures["grad_norm"] > 0, "the advantages were all zero, so nothing was learnt"


def test_the_roofline_bench_compares_each_phase_with_a_measured_step(work_file: Path) -> None:
    figures = bench("roofline.py", work_file, "--steps", "1")
    assert {"reshard", "rollout", "reference", "update"} == figures["phases"].keys()
    for phase in (figures["step"], *figures["phases"].values()):
        assert phase["error"] == pytest.approx(phase["estimated"] / phase["measured"] - 1)
    assert min(figures["rates"].values()) > 0


def test_the_generation_bench_draws_exactly_the_tokens_asked_for(work_file: Path) -> None:
    figures = bench("generate.py", work_file, "--prompts", "3", "--new_tokens", "6")
    assert figures["bench"] == "generate"
    assert figures["tokens"] == 3 * 6
    assert (figures["temperature"], figures["top_k"], figures["top_p"]) == (1.0, 50, 0.95)
    assert figures["tokens_per_s"] == pytest.approx(18 / np.median(figures["seconds"]))


def test_ragged_completions_have_the_lengths_that_every_engine_gets(work_file: Path) -> None:
    figures = bench("generate.py", work_file, "--ragged", "--prompts", "3", "--slots", "2")
    assert figures["tokens"] == 11 + 40 + 9
    assert figures["longest"] == 40
    assert figures["usage"]["rows"] == figures["tokens"]


@WITH_C
def test_the_draw_bench_times_every_truncation_at_every_vocabulary(tmp_path: Path) -> None:
    words = ["--vocabularies", "50,61", "--rows", "2", "--tokens", "3", "--repeats", "1"]
    figures = printed(tmp_path, "draw.py", *words)["us"]
    assert figures.keys() == {"50", "61"}
    for by_logits in figures.values():
        assert by_logits.keys() == {"flat", "peaked"}
        for times in by_logits.values():
            assert len(times) == 5 and min(times.values()) > 0


def test_the_report_bench_writes_the_page_of_its_run(tmp_path: Path) -> None:
    words = [
        "--steps",
        "3",
        "--prompts",
        "2",
        "--generations",
        "2",
        "--tokens",
        "5",
        "--opens",
        "1",
    ]
    figures = printed(tmp_path, "report.py", *words, "--keep", str(tmp_path / "run"))
    assert figures["samples"] == 3 * 2 * 2
    assert figures["bytes"] == (tmp_path / "run" / "report.html").stat().st_size
    assert figures.keys() >= {"seconds_to_write", "seconds_to_open"}


def test_a_work_file_with_a_key_missing_or_too_many_is_refused(
    work_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from work import read_work

    for wrong in ({"model": MODEL}, WORK | {"promts": 1}, WORK | {"prompts": 0}):
        work_file.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit) as ended:
            read_work(work_file)
        assert ended.value.code == 2
        assert "work.json" in capsys.readouterr().err


def test_every_engine_gets_the_same_prompts_lengths_and_rewards(work_file: Path) -> None:
    from work import ragged_lengths, random_rewards, read_work

    work = read_work(work_file)
    first, again, next_step = (work.prompt_ids(step) for step in (1, 1, 2))
    assert first.shape == (2, 5)
    assert (first == again).all() and (first != next_step).any()
    assert first.min() >= 3 and first.max() < 61
    # Committed, as a figure of another list cannot be compared.
    assert ragged_lengths(8) == [11, 40, 9, 126, 67, 73, 57, 30]
    many = ragged_lengths(20_000)
    assert max(many) == 128
    assert np.mean(many) == pytest.approx(32 * (1 - (31 / 32) ** 128), rel=0.03)
    assert len(set(random_rewards(0, 6).tolist())) == 6


def test_rows_of_a_bench_leave_no_place_empty(work_file: Path) -> None:
    from assembly import Rows, row_tokens
    from work import Work

    work = Work(MODEL, prompts=8, generations=8, prompt_tokens=32, new_tokens=64)
    assert row_tokens(work, 8) == 32 + 8 * 63
    assert Rows.of(work, 1) == Rows(8, 4)
    assert Rows.of(work, 4) == Rows(8, 2)
    long = Work(MODEL, prompts=8, generations=8, prompt_tokens=32, new_tokens=1024)
    assert Rows.of(long, 1) == Rows(2, 1)
    assert row_tokens(Work(MODEL, 8, 1, 32, 64), 1) == 96


def test_ratios_are_of_medians_over_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    import compare

    order: list[str] = []

    def run(contestant: compare.Contestant, given: Namespace) -> dict[str, Any]:
        order.append(contestant.name)
        seconds = [1.0, 2.0, 3.0] if contestant.name == "mindgrpo" else [4.0, 8.0, 6.0]
        return {"steps_s": seconds, "seconds": seconds, "tokens": 12}

    monkeypatch.setattr(compare, "run", run)
    given = Namespace(rounds=2)
    step = compare.compare(compare.CONTESTS["step"], given)
    assert order == ["mindgrpo", "trl"] * 2
    assert step["ratios"] == {"trl": pytest.approx(2.0 / 6.0)}
    generate = compare.compare(compare.CONTESTS["generate"], given)
    assert generate["medians"]["mindgrpo"] == 6.0
    assert generate["ratios"] == {"transformers": pytest.approx(3.0), "vllm": pytest.approx(3.0)}


def test_a_weight_sync_of_7b_in_the_layout_of_its_users_makes_few_calls_and_copies() -> None:
    import sync_calls

    model = sync_calls.read_model_yaml(str(sync_calls.ROOT / sync_calls.QWEN2_5_7B))
    plan = sync_calls.plan_of(model, Mesh(1, 4, 2), Mesh(2, 4))
    for rank in range(plan.num_ranks):
        counts = sync_calls.counts_of(plan, rank, 256 << 20)
        assert counts["written"] > 3.5 * 2**30
        assert counts["calls"] <= 440 and counts["exchanges"] <= 8 and counts["extra_bytes"] == 0
        assert counts["checks"] <= 350
        # What is kept is read and written; what is sent is read, and what is received is written.
        kept = counts["written"] - counts["received"]
        assert counts["bytes"] == 2 * kept + counts["sent"] + counts["received"] < 8e9


def test_exponents_are_slopes_of_the_logarithms() -> None:
    from scaling import fit, point, table
    from work import Work

    points = [
        {"size": n, "seconds": {"step": 0.01 * n, "update": 0.02 * n**2, "score": 1e-5}}
        for n in (32, 64, 128)
    ]
    found = fit(points)
    assert found["exponents"] == {"step": pytest.approx(1.0), "update": pytest.approx(2.0)}
    assert found["last_exponents"]["update"] == pytest.approx(2.0)
    lines = table("length", {"points": points, **found}).splitlines()
    assert lines[0] == "| completion length | step | update |"
    assert lines[-1] == "| of the last two | 1.00 | 2.00 |"
    work = Work(MODEL, 2, 3, 5, 4)
    assert point(work, "length", 64)[0].new_tokens == 64
    assert point(work, "group", 16)[0].generations == 16
    assert point(work, "layers", 8)[0].model["num_hidden_layers"] == 8
    assert point(work, "ranks", 8) == (work, 8)
