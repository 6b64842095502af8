"""A job of four ranks with two environments that is gone on with from a checkpoint, on these ranks and on one.

Through the launcher. Does not prove what a damaged checkpoint leads to (test_resume.py does), nor
anything about a rank that is killed: scripts/faults/kill_matrix.py resumes after each of its kills.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from openenv_server import served
from small_runs import TOKEN_ARRAYS, completions, make_inputs, model_bits, rows, token_rows

from mindgrpo.checkpoint.folders import folder_of, steps_in
from mindgrpo.checkpoint.format import read_manifest
from mindgrpo.config import load_config
from mindgrpo.memory.residency import by_phase
from mindgrpo.models.decoder_config import read_config
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.plan.run_plan import plan_run
from mindgrpo.weights.model_files import SafetensorsDirectory

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "main.py"
RANKS, LAUNCH_SECONDS, SAVED_STEP, STEPS = 4, 300, 2, 4
# Each prompt meets it, or a session of an OpenEnv server.
GAME = """
class Short:
    def reset(self, row):
        return "No " + row["question"][:4]

    def step(self, completion):
        return None, sum(map(ord, completion)) % 3 / 3, True
"""
REWARD = """
def spread(completions, answers):
    return [float(sum(map(ord, text)) % 7 < 2) for text in completions]
"""
SETTINGS = {
    "rl_config.max_steps": STEPS,
    "rl_config.save_ckpt_interval": SAVED_STEP,
    "rl_config.save_ckpt_async": "true",
    "rl_config.eval_steps": SAVED_STEP,
    # What rewards of earlier steps leave behind.
    "rl_config.advantage_estimator": "rae",
    "rl_config.no_positive_resampling": 0.5,
    "rl_config.seq_length": 96,
    "generate_config.max_prompt_length": 72,
    "generate_config.sampling_config.eos_token_id": json.dumps(list(range(0, 384, 3))),
}
# What is in the order of additions alone; the rest has to be the same in every bit.
ROUNDED = ("loss", "kl", "entropy", "grad_norm", "logprob_gap/", "padding_share", "rollout/")


def layout(train: tuple[int, int, int], infer: tuple[int, int]) -> dict[str, int]:
    names = ("data_parallel", "model_parallel", "pipeline_stage")
    found = {f"actor_config.parallel_config.{n}": v for n, v in zip(names, train, strict=True)}
    pairs = zip(names[:2], infer, strict=True)
    return found | {f"generate_config.parallel_config.{n}": v for n, v in pairs}


# The second of two layers has experts.
EXPERTS: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 2},
    "mlp_only_layers": [],
}
# Two replicas, which share out the optimizer's state and the experts.
ON_FOUR: dict[str, object] = {
    **layout((2, 1, 2), (2, 2)),
    "actor_config.enable_parallel_optimizer": "true",
    "actor_config.parallel_config.expert_parallel": 2,
    "generate_config.parallel_config.expert_parallel": 2,
}


def words(folder: Path, layout: Mapping[str, object]) -> list[str]:
    reward = {"reward_config.verifier_function": f"{folder}/reward.py:spread"}
    environments = (folder / "environments").read_text()
    settings = SETTINGS | reward | {"rl_config.environment": environments} | layout
    return [str(word) for key, value in settings.items() for word in (f"--{key}", value)]


def launch(folder: Path, run: Path, layout: Mapping[str, object], *more: str) -> str:
    paths = ["--output_dir", str(run), "--actor_config.load", str(folder / "model")]
    for key in ("dataset_file", "eval_dataset_file"):
        paths += [f"--rl_config.{key}", str(folder / "train.jsonl")]
    arguments = [*paths, *words(folder, layout), *more]
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", str(RANKS), "--"]
    command += [str(PROGRAM), "--config", str(folder / "small.yaml"), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "MINDGRPO_LOG_DIR": str(folder / "logs")},
        capture_output=True,
        text=True,
        timeout=LAUNCH_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in EXPERTS.items():
            patch.setitem(small_runs.MODEL, key, value)
        make_inputs(folder, layers=2)
    (folder / "reward.py").write_text(REWARD)
    (folder / "game.py").write_text(GAME)
    with served() as address:
        (folder / "environments").write_text(f"2 * {folder}/game.py:Short, openenv:{address}")
        yield folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    launch(inputs, inputs / "whole", ON_FOUR)
    return inputs / "whole"


def test_a_run_takes_the_memory_that_is_planned_for_a_sharded_optimizer(whole: Path) -> None:
    config = load_config(whole / "config_resolved.yaml", []).config
    plan = plan_run(config, read_config(config.actor_config.load), RANKS)
    row = read_metrics(whole / "metrics.jsonl")[-1]
    # The metrics are rank 0's, which is of the first stage.
    own = plan.bytes_by_role(0, {} if plan.reference is None else {"reference": 0})
    peaks = {phase.phase: phase.total for phase in by_phase(own)}
    for phase in ("reshard", "rollout", "update"):
        assert row[f"memory/device_peak/{phase}"] == peaks[phase], phase
    # Experts' state is shared out by dealing out experts already: the first stage has none.
    assert plan.optimizer_bytes(0) < 0.52 * plan.trained_bytes(0)
    assert json.loads((whole / "summary.json").read_text())["optimizer_shards"] == 2


def as_of_the_saved_step(inputs: Path, whole: Path, name: str) -> Path:
    """A copy of the run whose last checkpoint was never written."""
    shutil.copytree(whole, inputs / name)
    shutil.rmtree(folder_of(inputs / name, STEPS))
    return inputs / name


def test_in_the_same_layout_rows_and_model_are_the_same_bit_for_bit(
    inputs: Path, whole: Path
) -> None:
    run = as_of_the_saved_step(inputs, whole, "same")
    carried = read_manifest(folder_of(run, SAVED_STEP)).state
    assert carried.baselines and carried.solved
    said = launch(inputs, run, ON_FOUR, "--resume_training")
    assert f"resumed from {folder_of(run, SAVED_STEP)}" in said
    assert steps_in(run) == [SAVED_STEP, STEPS]
    assert rows(run) == rows(whole)
    named = {key for row in rows(run) for key in row if re.fullmatch("environment/.*/reward", key)}
    (short,) = (key for key in named if "game.py:Short" in key)
    assert len(named) == 2 and max(row.get(short, 0.0) for row in rows(run)) > 0
    asked = [json.loads(line)["prompt"] for line in completions(run)]
    assert 0 < sum("A game, number" in prompt for prompt in asked) < len(asked)
    assert model_bits(run) == model_bits(whole)
    by_token = [(each / "per_token.jsonl").read_bytes() for each in (run, whole)]
    assert by_token[0] == by_token[1]


def test_on_one_rank_what_four_have_saved_goes_on_the_same_to_rounding(
    inputs: Path, whole: Path
) -> None:
    run = as_of_the_saved_step(inputs, whole, "other")
    alone = words(inputs, layout((1, 1, 1), (1, 1)))
    small_runs.run(inputs, run, *alone, "--resume_training")
    for ours, theirs in zip(rows(run), rows(whole), strict=True):
        for key, value in theirs.items():
            if not key.startswith(ROUNDED):
                assert ours[key] == value, key
            elif key in ("kl", "entropy", "grad_norm"):
                assert ours[key] == pytest.approx(value, rel=1e-3, abs=1e-6), key
    ours, theirs = token_rows(run), token_rows(whole)
    assert len(ours) == len(completions(run)) == len(completions(whole))
    for row, other in zip(ours, theirs, strict=True):
        # The gap is of the samples of a step's first update.
        assert row.keys() == other.keys() and row.keys() | {"gap"} >= {*TOKEN_ARRAYS}
        for name in row.keys() & {*TOKEN_ARRAYS}:
            # Half precision rounds by 5e-4; the weights differ by less than 1e-3.
            np.testing.assert_allclose(
                row[name].astype(float), other[name], 1e-3, 1e-3, err_msg=name
            )
    found, expected = SafetensorsDirectory(run / "hf"), SafetensorsDirectory(whole / "hf")
    for name in expected.names:
        error = np.abs(found.read(name) - expected.read(name)).max()
        # A rounding error grows with each of the eight updates, of at most the rate each.
        assert error < 1e-3, name
