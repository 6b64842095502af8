"""Supervised training: its loss and gradient against those of transformers, its runs against others of the same rows.

Does not prove what a row becomes (test_supervised_rows.py does).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_models import BOUNDS, read_golden
from small_runs import EVAL_SAMPLES, input_keys, make_inputs, model_bits, rows

from mindgrpo import GRPOTrainer, SFTTrainer
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import TrainBatch
from mindgrpo.algorithm.surrogates import LossConfig
from mindgrpo.backend.connect import connect
from mindgrpo.backend.kernels.shapes import AdamWSettings
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.checkpoint.folders import folder_of, steps_in
from mindgrpo.cli.verbs import main
from mindgrpo.config import Config, Loaded, config_with, load_config
from mindgrpo.config.command_line import parse_evaluation
from mindgrpo.data.supervised import LEARNED
from mindgrpo.errors import UserError
from mindgrpo.grpo import supervised as supervised_step
from mindgrpo.grpo.supervised import in_pieces, rows_as_rollout
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.monitor.curve import draw_curve
from mindgrpo.report.facts import facts
from mindgrpo.report.run_folder import read_run
from mindgrpo.run.stop_signals import Stop
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import accumulate_gradients, update
from mindgrpo.weights.pretrained import load_weights

ROOT = Path(__file__).resolve().parent.parent
RANKS, STEPS, LAUNCH_SECONDS = 4, 4, 240
SETTINGS = {
    "rl_config.max_steps": STEPS,
    "rl_config.prompts_per_step": 5,
    "rl_config.eval_steps": 2,
    "rl_config.save_ckpt_interval": 1,
    "rl_config.save_ckpt_best": "loss",
}


class Row:
    """A row of supervised training by its ids alone."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_loss_and_gradient_of_packed_rows_are_those_of_transformers(family: str) -> None:
    golden, backend = read_golden(family), connect(SHARED_MEMORY, {})
    ids = golden.values["input_ids"].astype(np.int32)
    # Everything but the first token is learnt.
    examples: Any = [Row(np.concatenate([row[:1], LEARNED + row[1:]])) for row in ids]
    supervised = config_with(None, {}, is_supervised=True).config.rl_config
    adamw, length = AdamWSettings(0.9, 0.95, 1e-8, 0.0), int(ids.size)
    shape = MicroShape(1, length)
    settings = UpdateSettings(shape, length, 1.0, KEEP_ALL, supervised, 1.0, adamw)
    policy = Policy(golden.config, golden.layout, backend, settings)
    load_weights(policy.weights, golden.directory)
    rollout = rows_as_rollout(examples)
    packed, count = PackedRollout(rollout), golden.values["logps"].size
    assert len(packed.rows(shape, range(len(ids)))) == 1
    batch = TrainBatch(rollout, np.ones(len(ids), np.float32))
    weights = np.full(len(ids), 1.0 / count, np.float32)
    accumulate_gradients(policy, batch, packed, range(len(ids)), weights)
    with policy.gradients.on_host() as host:
        for name, theirs in golden.gradients.items():
            largest = np.abs(theirs).max() / count
            assert np.abs(host.hf_views[name] + theirs / count).max() < BOUNDS.gradients * largest
    policy.clear_gradients()
    report = update(policy, batch, PackedRollout(rollout), range(len(ids)), 0.0)
    assert report.loss == pytest.approx(-golden.values["logps"].mean(dtype=np.float64), abs=1e-5)
    norm = np.sqrt(sum(np.sum(np.square(g / count)) for g in golden.gradients.values()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    backend.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    make_inputs(folder, layers=2)
    return folder


def loaded(inputs: Path, output: Path, **more: object) -> Loaded:
    keys = SETTINGS | dict(input_keys(inputs)) | {"output_dir": str(output)} | more
    return load_config(
        inputs / "small.yaml", [f"--{k}={v}" for k, v in keys.items()], is_supervised=True
    )


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    return SFTTrainer(loaded(inputs, inputs / "whole")).train()


def losses(run: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in rows(run)]


def test_a_run_learns_and_says_so(inputs: Path, whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["eval_after"]["loss"] < 0.8 * summary["eval_before"]["loss"]
    assert summary["best_checkpoint"]["score"] == summary["eval_after"]["loss"]
    draw_curve(whole / "metrics.jsonl", whole / "loss_curve.png", summary["eval_before"])
    assert (whole / "loss_curve.png").stat().st_size > 10_000
    assert [row.get("eval/loss") is not None for row in rows(whole)] == [False, True, False, True]
    assert rows(whole)[-1]["eval/loss"] == summary["eval_after"]["loss"]


def test_its_report_has_rows_and_a_supervised_loss_and_nothing_of_a_generator(whole: Path) -> None:
    run = read_run(whole)
    shown = dict(facts(run))
    assert shown["loss"] == "supervised"
    assert shown["rows"] == str(run.values["rl_config.prompts_per_step"])
    assert not shown.keys() & {"batch", "layout_generate", "layout_ref"}


def test_its_help_has_the_keys_that_it_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--help"]) == main(["sft", "--help-keys"]) == 0
    keys = {line.split()[0] for line in capsys.readouterr().out.splitlines() if "  --" in line}
    assert {"--rl_config.seq_length", "--actor_config.lora.rank", "--dataset_file"} <= keys
    assert not keys & {"--rl_config.epsilon_low", "--verifier_function"}
    assert not any(key.startswith(("--generate_config.", "--reward_config.")) for key in keys)


def test_a_run_that_ended_early_goes_on_bit_for_bit(inputs: Path, whole: Path) -> None:
    again = inputs / "again"
    shutil.copytree(whole, again)
    for step in range(3, STEPS + 1):
        shutil.rmtree(folder_of(again, step))
    SFTTrainer(loaded(inputs, again, **{"rl_config.resume_training": "true"})).train()
    assert rows(again) == rows(whole)
    assert model_bits(again) == model_bits(whole)
    assert steps_in(again) == steps_in(whole)


def test_a_loss_of_held_out_rows_is_that_of_all_however_few_are_packed_at_a_time(
    inputs: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row an update: then one held-out row at a time, as each has more than half of the tokens of a longest one."""
    counts: list[int] = []
    compute = supervised_step.compute_log_probs

    def counted(pipeline: Any, mesh: Any, backend: Any, packed: PackedRollout) -> Any:
        counts.append(len(packed.rollout))
        return compute(pipeline, mesh, backend, packed)

    monkeypatch.setattr(supervised_step, "compute_log_probs", counted)
    keys = {"rl_config.prompts_per_step": 1, "rl_config.max_steps": 1, "rl_config.eval_steps": 0}
    run = SFTTrainer(loaded(inputs, inputs / "pieces", **keys)).train()
    assert counts == [1] * 2 * EVAL_SAMPLES
    before = [json.loads((own / "summary.json").read_text())["eval_before"] for own in (run, whole)]
    assert before[0]["loss"] == pytest.approx(before[1]["loss"], rel=1e-6)


def test_rows_are_held_out_in_pieces_of_so_many_tokens() -> None:
    rows: Any = [Row(np.zeros(count, np.int32)) for count in (3, 4, 9, 1, 2, 4, 1)]
    pieces = [[len(row.ids) for row in piece] for piece in in_pieces(rows, 7)]
    assert pieces == [[3, 4], [9], [1, 2, 4], [1]]
    assert not [*in_pieces([], 7)]


def test_training_that_is_called_again_after_a_stop_is_still_supervised(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it draws is a curve of losses."""
    trainer = SFTTrainer(loaded(inputs, inputs / "stopped"))
    record, stopping = trainer.record, trainer.stopping

    def stop() -> None:
        if len(rows(record.directory)) == 2:
            raise Stop("asked to stop", 0)

    monkeypatch.setattr(stopping, "check_time", stop)
    trainer.train()
    trainer.train()
    assert trainer.record is not record
    assert trainer.record._picture.name == record._picture.name == "loss_curve.png"
    assert len(rows(trainer.record.directory)) == STEPS


def test_an_evaluation_of_its_model_says_that_its_configuration_generates_nothing(
    whole: Path, inputs: Path
) -> None:
    words = ["--model", str(whole), "--reward_config.verifier_function", "accuracy_reward"]
    for model in (whole, whole / "hf"):
        with pytest.raises(UserError, match="does not say how to generate; add --config FILE"):
            parse_evaluation(["--model", str(model), *words[2:]])
    line = parse_evaluation(["--config", str(inputs / "small.yaml"), *words])
    assert line.files == [inputs / "small.yaml"]


def test_ranks_of_another_layout_compute_the_same(inputs: Path, whole: Path) -> None:
    keys = {
        **SETTINGS,
        **input_keys(inputs),
        "output_dir": str(inputs / "ranks"),
        "actor_config.parallel_config.model_parallel": 2,
        "actor_config.parallel_config.pipeline_stage": 2,
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = ["bash", str(ROOT / "scripts" / "launch.sh"), "--ranks", str(RANKS), "--", "sft"]
    ended = subprocess.run(
        [*command, "--config", str(inputs / "small.yaml"), *words],
        cwd=inputs,
        env={**os.environ, "MINDGRPO_LOG_DIR": str(inputs / "logs")},
        capture_output=True,
        text=True,
        timeout=LAUNCH_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found, alone = losses(inputs / "ranks"), losses(whole)
    np.testing.assert_allclose(found, alone, rtol=2e-5)


def test_a_model_is_what_a_run_of_grpo_reads(
    inputs: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for k, v in input_keys(inputs).items() for word in (f"--{k}", v)]
    words += ["--actor_config.load", str(whole / "hf")]
    rewards = ["--verifier_function", "accuracy_reward"]
    assert main(["check", "--config", str(inputs / "small.yaml"), *words, *rewards]) == 0
    assert "can run" in capsys.readouterr().out


def test_keys_without_effect_are_named_and_others_refused(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_grpo = loaded(inputs, inputs / "x")
    (notice,) = [notice for notice in of_grpo.notices if "no effect in supervised" in notice]
    assert "rl_config.beta" in notice and "generate_config.max_prompt_length" in notice
    assert "actor_config" not in notice and "rl_config.seed" not in notice
    with pytest.raises(UserError, match="'rl_config.sead' is unknown|rl_config.sead"):
        loaded(inputs, inputs / "x", **{"rl_config.sead": 1})
    paths = [word for k, v in input_keys(inputs).items() for word in (f"--{k}", v)]
    arguments = ["--config", str(inputs / "small.yaml"), *paths]
    arguments += ["--rl_config.prompts_per_step", "null"]
    assert main(["check", "sft", *arguments]) == 2
    said = capsys.readouterr().err
    assert "rl_config.prompts_per_step (the rows of an update) is not set" in said
    assert "reward" not in said


def test_a_configuration_of_supervised_training_is_refused_by_grpo(inputs: Path) -> None:
    with pytest.raises(UserError, match="loaded for supervised training .* give it to SFTTrainer"):
        GRPOTrainer(loaded(inputs, inputs / "x"), ["accuracy_reward"])


def as_loss(config: Config) -> LossConfig:
    """What the loss reads of it."""
    names = LossConfig.model_fields
    return LossConfig(**{name: getattr(config.rl_config, name) for name in names})


def test_the_loss_is_the_mean_negative_log_likelihood_whatever_the_file_says(inputs: Path) -> None:
    asked = {"rl_config.loss_type": "dapo", "rl_config.entropy_coef": 0.1, "rl_config.seed": 0}
    own = as_loss(loaded(inputs, inputs / "x", **asked).config)
    assert own == as_loss(config_with(None, {}, is_supervised=True).config)
    assert own == LossConfig(loss_type="gpg", beta=0.0)


@pytest.mark.parametrize(("asked", "found"), [(None, False), ("auto", False), (True, True)])
def test_numbers_are_batch_invariant_only_if_asked(inputs: Path, asked: Any, found: bool) -> None:
    keys = {"context.batch_invariant": asked} if asked else {}
    assert loaded(inputs, inputs / "x", **keys).config.context.batch_invariant is found
