"""A disk that is full, before a run and in the midst of it: one sentence, the checkpoint that is safe, and going on.

/dev/full stands for the disk, file by file, so that it works for every user. Does not prove what happens where the
logs of a launched job cannot be written either, nor that a checkpoint that cannot be written leaves the earlier one
(test_checkpoint_damage.py does).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import small_runs
from small_runs import (
    EVAL_SAMPLES,
    ONE_GRAPH,
    Reward,
    completions,
    make_inputs,
    model_bits,
    rows,
    spread,
)

from mindgrpo.checkpoint.folders import folder_of, steps_in
from mindgrpo.cli.verbs import main
from mindgrpo.config.observation import MonitorConfig
from mindgrpo.errors import UserError
from mindgrpo.monitor.console import Console
from mindgrpo.monitor.host_memory import HostMemoryMonitor

ROOT = Path(__file__).resolve().parent.parent
STEPS = 4
FULL = "cannot be written (No space left on device); free space"
WORDS = (*ONE_GRAPH, f"--rl_config.max_steps={STEPS}", "--rl_config.dynamic_sampling=false")
SAVED = (*WORDS, "--rl_config.save_ckpt_interval=1")
GO_ON = "--resume_training=true"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    return small_runs.run(inputs, inputs / "whole", *SAVED)


def filling(step: int, fill: Callable[[], None]) -> Reward:
    """The same reward; the disk is full from its call in `step` on."""
    steps_left = step

    def scored(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        nonlocal steps_left
        if len(completions) > EVAL_SAMPLES:
            steps_left -= 1
            if steps_left == 0:
                fill()
        return spread(completions, answers)

    scored.__name__ = "spread"
    return scored


def fill_path(path: Path) -> Callable[[], None]:
    def fill() -> None:
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/full")

    return fill


def fill_open(path: Path) -> Callable[[], None]:
    """For a file that the run holds open."""

    def fill() -> None:
        full = os.open("/dev/full", os.O_WRONLY)
        for name in os.listdir("/proc/self/fd"):
            try:
                is_it = os.readlink(f"/proc/self/fd/{name}") == str(path)
            except OSError:
                continue
            if is_it:
                os.dup2(full, int(name))
        os.close(full)

    return fill


def part_of_model() -> str:
    return "hf/.model.safetensors.part"


@pytest.mark.parametrize(
    ("name", "newest"),
    [
        ("metrics.jsonl", 2),
        ("completions.jsonl", 2),
        pytest.param(part_of_model(), STEPS, id="model"),
    ],
)
def test_a_run_whose_disk_fills_up_names_the_file_and_the_checkpoint_and_goes_on_from_it(
    inputs: Path, whole: Path, tmp_path: Path, name: str, newest: int
) -> None:
    output = tmp_path / "run"
    fill = fill_open if name == "metrics.jsonl" else fill_path
    with pytest.raises(UserError) as told:
        small_runs.run(inputs, output, *SAVED, reward=filling(3, fill(output / name)))
    sentence = str(told.value)
    assert sentence.startswith(str(output / name.rpartition("/")[0])) and FULL in sentence
    assert f"the checkpoint of step {newest} is safe: {folder_of(output, newest)}" in sentence
    assert f"--resume_training true --output_dir {output}" in sentence
    assert steps_in(output)[-1] == newest
    assert not list((output / "checkpoints").glob(".*")), "nothing half written takes space"

    for path in output.rglob("*"):
        if path.is_symlink():
            path.unlink()
    small_runs.run(inputs, output, *SAVED, GO_ON)
    assert [row["step"] for row in rows(output)] == list(range(1, STEPS + 1))
    assert rows(output) == rows(whole) and model_bits(output) == model_bits(whole)
    if newest == STEPS:
        assert completions(output) == completions(whole)


def test_a_run_without_checkpoints_keeps_its_model_when_its_metrics_cannot_be_written(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    reward = filling(3, fill_open(output / "metrics.jsonl"))
    with pytest.raises(UserError) as told:
        small_runs.run(inputs, output, *WORDS, reward=reward)
    assert f"{output / 'metrics.jsonl'} {FULL}" in str(told.value)
    assert f"the model after step 3 is in {output / 'hf'}" in str(told.value)
    exported = tmp_path / "exported" / "hf"
    assert main(["export", "--from", str(folder_of(whole, 3)), "--output", str(exported)]) == 0
    assert model_bits(output) == model_bits(exported.parent)


def test_a_summary_that_cannot_be_written_costs_no_model(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    reward = filling(1, fill_path(output / "summary.json"))
    with pytest.raises(UserError) as told:
        small_runs.run(inputs, output, *WORDS, reward=reward)
    assert f"{output / 'summary.json'} {FULL}" in str(told.value)
    assert f"the model after step {STEPS} is in {output / 'hf'}" in str(told.value)
    assert model_bits(output) == model_bits(whole)


def test_a_disk_that_is_full_for_tensorboard_costs_a_warning(
    inputs: Path,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now, host, output = int(time.time()), socket.gethostname(), tmp_path / "run"
    output.mkdir()
    for second in range(now, now + 300):
        fill_path(output / "tensorboard" / f"events.out.tfevents.{second}.{host}")()
    queue = "--rl_config.tensorboard_queue_size=100000"
    small_runs.run(inputs, output, *WORDS, queue)
    assert model_bits(output) == model_bits(whole) and rows(output) != []
    said = [line for line in capsys.readouterr().out.splitlines() if "tensorboard" in line]
    assert len(said) == 1 and said[0].startswith("  warning: ")
    assert "No space left on device" in said[0] and "the run continues without it" in said[0]


def test_too_little_space_is_told_before_the_weights_are_read(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError) as told:
        small_runs.run(inputs, tmp_path / "run", *SAVED)
    assert "gets the model and 6 checkpoints" in str(told.value)
    assert f"{tmp_path} has 97.7 KiB free" in str(told.value)
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_needs_no_space_for_the_checkpoints_that_it_has(
    inputs: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    # Room for the model and the checkpoint that is written before an older one goes.
    size = sum(path.stat().st_size for path in folder_of(again, 1).iterdir()) * 4 // 3
    real = shutil.disk_usage(tmp_path)
    free = size + 64_000
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real._replace(free=free))
    more = ("--rl_config.save_max_ckpt_num=4", f"--rl_config.max_steps={STEPS + 1}")
    monkeypatch.setattr("mindgrpo.checkpoint.save.SPARE_BYTES", 0)
    small_runs.run(inputs, again, *SAVED, GO_ON, *more)
    assert steps_in(again)[-1] == STEPS + 1


def job_words(inputs: Path, output: Path) -> list[str]:
    """Of a run whose completions cannot be written from the beginning, in a folder that is made here."""
    output.mkdir()
    fill_path(output / "completions.jsonl")()
    (inputs / "rewards.py").write_text(
        "def spread(completions, answers):\n"
        "    return [float(sum(map(ord, text)) % 7 < 2) for text in completions]\n"
    )
    words = ["--config", str(inputs / "small.yaml"), "--output_dir", str(output), *WORDS]
    words += [f"--{key}={value}" for key, value in small_runs.input_keys(inputs).items()]
    return [*words, f"--reward_config.verifier_function={inputs / 'rewards.py'}:spread"]


def sentence_of_job(output: Path) -> str:
    return (
        f"mindgrpo: {output / 'completions.jsonl'} cannot be written (No space left on device); "
        f"free space on its disk; no checkpoint was asked for (rl_config.save_ckpt_interval is 0); "
        f"the model after step 1 is in {output / 'hf'}."
    )


def test_the_last_line_of_a_launched_job_tells_of_its_full_disk(
    inputs: Path, tmp_path: Path
) -> None:
    program = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "main.py"
    launch = [sys.executable, "-m", "mindgrpo", "launch", "--ranks", "2", "--", str(program)]
    words = [*launch, *job_words(inputs, tmp_path / "run")]
    for role in ("actor", "generate", "ref"):
        words.append(f"--{role}_config.parallel_config.data_parallel=2")
    environment = os.environ | {"MINDGRPO_LOG_DIR": str(tmp_path / "logs"), "PYTHONPATH": str(ROOT)}
    one = subprocess.STDOUT
    ended = subprocess.run(
        words, env=environment, stdout=subprocess.PIPE, stderr=one, text=True, timeout=300
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stdout, ended.stdout
    assert ended.stdout.splitlines()[-1] == sentence_of_job(tmp_path / "run")


def test_a_log_that_is_full_ends_no_run() -> None:
    with open("/dev/full", "w", buffering=1) as full:
        Console(True, full).line("a step")
        with suppress(OSError):
            full.close()


def test_the_hosts_memory_is_watched_on_when_its_file_cannot_be_written() -> None:
    lines: list[str] = []
    settings = MonitorConfig(host_max_memory_threshold=0.0001)
    monitor = HostMemoryMonitor(settings, Path("/dev/full"), {0: os.getpid()}, lines.append)
    monitor.look()
    monitor.look()
    assert [line for line in lines if "/dev/full" in line] == [
        "  warning: /dev/full is not written any more: No space left on device"
    ]
    assert "the host's memory is used to" in lines[-1]
