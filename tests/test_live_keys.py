"""Keys that say how a run computes and is watched: two short runs, one with them and one without, learn the same.

One process each. Does not prove anything about several ranks, speed or an accelerator's own tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import TOKEN_ARRAYS, input_keys, make_inputs, reward_words, token_rows

from mindgrpo.monitor.host_memory import host_memory

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic"
RUN_SECONDS = 300
SMALL = {
    "actor_config.parallel_config.model_parallel": "1",
    "actor_config.parallel_config.pipeline_stage": "1",
    "generate_config.parallel_config.data_parallel": "1",
    "generate_config.parallel_config.model_parallel": "1",
    "generate_config.sampling_config.max_tokens": "12",
    "rl_config.eval_dataset_file": "null",
    "rl_config.prompts_per_step": "4",
    "rl_config.num_generations": "4",
    "rl_config.max_steps": "2",
    "rl_config.batch_size": "4",
    "actor_config.lr_schedule.lr": "0.01",
}
FIGURES = ("loss", "kl", "entropy", "grad_norm", "reward/mean", "tokens", "lr")


class Run:
    def __init__(self, folder: Path, status: int = 0, **keys: str) -> None:
        self.folder = folder
        make_inputs(folder)
        given = input_keys(folder) | SMALL | {"output_dir": str(folder / "output")} | keys
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        words += reward_words(folder)
        config = str(EXAMPLE / "grpo_config.yaml")
        ended = subprocess.run(
            [sys.executable, "-m", "mindgrpo", "train", "--config", config, *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
        )
        assert ended.returncode == status, ended.stdout[-3000:]
        self.said = ended.stdout
        self.steps = self.lines("output/metrics.jsonl")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).open()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("keyed")
    # What an earlier run may have left in folders that runs share.
    for name in ("saved", "completions", "board"):
        (folder / name).mkdir()
    (folder / "saved/precious").touch()
    (folder / "completions/completions.jsonl").write_text("{}\n")
    return Run(
        folder,
        **{
            "verbose": "true",
            "actor_config.save": str(folder / "saved"),
            "actor_config.optimizer.opt_offload": "true",
            "actor_config.recompute_config.select_recompute": "[mlp]",
            "rl_config.micro_batch_interleaved": "2",
            "rl_config.performance_stats": "true",
            "rl_config.save_prompt_completions_dir": str(folder / "completions"),
            "rl_config.tensorboard_dir": str(folder / "board"),
            "monitor_config.host_monitor_interval": "0.2",
            "monitor_config.host_memory_protection": "true",
            "monitor_config.per_token": "1",
            "profiler_config.profile": "true",
            "profiler_config.profile_step_start": "1",
            "profiler_config.profile_step_end": "-1",
            "profiler_config.profile_save_path": str(folder / "profile"),
            "msprobe_config.msprobe": "true",
            "msprobe_config.dump_path": str(folder / "dump"),
            "context.jit_config.jit_level": "o1",
            "context.memory_optimize_level": "O1",
            "context.max_call_depth": "5000",
            "context.save_graphs": "1",
            "context.save_graphs_path": str(folder / "graphs"),
            "context.max_device_memory": "1GB",
            "context.ascend_config.precision_mode": "must_keep_origin_dtype",
            "context.ascend_config.kernel_launch_capture": "true",
        },
    )


def test_what_is_learnt_is_the_same(plain: Run, keyed: Run) -> None:
    assert len(plain.steps) == len(keyed.steps) == 2
    for expected, found in zip(plain.steps, keyed.steps, strict=True):
        for name in FIGURES:
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


def test_an_offloaded_optimizer_takes_no_room_on_the_device(plain: Run, keyed: Run) -> None:
    with_moments = plain.steps[-1]["memory/device_peak/update"]
    without = keyed.steps[-1]["memory/device_peak/update"]
    # Weights, gradients and two moments, all of one size.
    assert without == with_moments / 2
    assert "on the host (opt_offload)" in keyed.said


def test_the_trace_has_the_phases_of_the_steps_asked_for(keyed: Run) -> None:
    document = json.loads((keyed.folder / "profile/trace.json").read_text())
    bars = [event for event in document["traceEvents"] if event["ph"] == "X"]
    names = [bar["name"] for bar in bars if bar["cat"] == "phase"]
    assert names == ["reshard", "rollout", "score", "reference", "score", "update"]
    (step,) = (bar for bar in bars if bar["cat"] == "step")
    assert step["name"] == "step 2"
    told = keyed.steps[1]["time/update"]
    (update,) = (bar for bar in bars if bar["name"] == "update")
    assert update["dur"] / 1e6 == pytest.approx(told, abs=0.1)


def test_the_hosts_memory_is_written_down(keyed: Run) -> None:
    rows = keyed.lines("output/host_memory.jsonl")
    assert rows and all(0 < row["share"] < 1 and row["rss"]["0"] > 0 for row in rows)


def test_the_figures_of_tokens_have_the_means_of_the_metrics(plain: Run, keyed: Run) -> None:
    assert not (plain.folder / "output/per_token.jsonl").exists()
    (file,) = (keyed.folder / "completions").glob("*/completions.jsonl")
    samples = [json.loads(line) for line in file.open()]
    rows = token_rows(keyed.folder / "output")
    assert [(row["step"], row["length"]) for row in rows] == [
        (sample["step"], sample["length"]) for sample in samples
    ]
    assert [row["sample"] for row in rows] == [*range(16)] * 2
    for step in keyed.steps:
        own = [row for row in rows if row["step"] == step["step"]]
        of = {
            name: np.concatenate([row[name] for row in own], dtype=float) for name in TOKEN_ARRAYS
        }
        # What float16 holds: 11 bits, and multiples of 6e-8 near zero.
        close = {"rel": 1e-3, "abs": 1e-7}
        assert np.abs(of["gap"]).mean() == pytest.approx(step["logprob_gap/mean"], **close)
        assert np.abs(of["gap"]).max() == pytest.approx(step["logprob_gap/max"], **close)
        assert of["entropy"].mean() == pytest.approx(step["entropy"], **close)
        assert of["kl"].mean() == pytest.approx(step["kl"], **close)
        assert not of["log_ratio"].any() and step["clip_fraction"] == 0
        assert (of["logprob"] <= 0).all() and of["logprob"].min() < -0.1
    assert keyed.steps[1]["kl"] > 1e-4


def test_folders_that_runs_share_keep_what_was_there(keyed: Run) -> None:
    saved, completions = keyed.folder / "saved", keyed.folder / "completions"
    (fresh,) = (path for path in saved.iterdir() if path.name != "precious")
    assert (fresh / "config.json").is_file() and (saved / "precious").is_file()
    assert (completions / "completions.jsonl").read_text() == "{}\n"
    (other,) = (path for path in completions.iterdir() if path.is_dir())
    assert len((other / "completions.jsonl").read_text().splitlines()) == 2 * 16
    assert str(other) in keyed.said and str(fresh) in keyed.said
    assert list((keyed.folder / "board").glob("*tfevents*"))


def test_the_compilers_graphs_are_where_they_were_asked_for(keyed: Run) -> None:
    assert list((keyed.folder / "graphs").glob("*validate*.ir"))


def test_phases_are_timed_on_the_console_where_asked(plain: Run, keyed: Run) -> None:
    assert keyed.said.count("  seconds: reshard ") == 2
    assert "  seconds: reshard " not in plain.said


def test_what_is_asked_for_and_not_there_is_told_in_one_line(plain: Run, keyed: Run) -> None:
    for key in ("profile_with_npu", "kernel_launch_capture"):
        assert keyed.said.count(f"{key} has no effect on this device") == 1
    dumped = (keyed.folder / "dump/configurations.json").is_file()
    assert dumped != (keyed.said.count("msprobe_config.msprobe asks for msprobe") == 1)
    assert "precision_mode" not in keyed.said, "the host's processors keep to it anyway"
    assert "notes" not in plain.said


def test_a_run_on_a_full_host_ends_after_its_step_with_its_model_written(tmp_path: Path) -> None:
    # Full is what the host is now, as far as this run is told, and stays when another test's processes end.
    threshold = 0.3 * host_memory().share
    run = Run(
        tmp_path,
        status=1,
        **{
            "monitor_config.host_memory_protection": "true",
            "monitor_config.host_monitor_interval": "0.05",
            "monitor_config.host_max_memory_threshold": f"{threshold:.6f}",
            "rl_config.save_ckpt_interval": "100",
        },
    )
    assert [step["step"] for step in run.steps] == [1]
    assert (tmp_path / "output/checkpoints/step_000001/manifest.json").is_file()
    assert "HostMemoryExhausted: the run ends after step 1: the host's memory is used" in run.said
    assert run.said.count("  warning: the host's memory is used") == 1
    assert (tmp_path / "output/hf/model.safetensors").is_file()


def test_without_compiled_graphs_a_step_is_the_same(plain: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, **{"context.mode": "1", "rl_config.max_steps": "1"})
    for name in set(FIGURES) - {"lr"}:
        assert run.steps[0][name] == pytest.approx(plain.steps[0][name], rel=1e-4, abs=1e-6), name
    assert run.steps[0]["grad_norm"] > 0
    assert run.said.count("context.mode 1 compiles nothing") == 1
    assert "\n  compiled " not in run.said and "\n  compiled " in plain.said
    assert json.loads((tmp_path / "output/summary.json").read_text())["compiles"] == 0
