"""Runs that end early, are saved and go on: the same rows and the same model, bit for bit, as one that never ended.

On one rank. Does not prove it of several ranks or of another layout (test_resume_on_ranks.py does), nor that a killed
process leaves its files as the system had them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Sequence
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
from small_mixtures import MIXTURES
from small_runs import (
    EVAL_SAMPLES,
    MODEL,
    ONE_GRAPH,
    STEPS,
    Reward,
    completions,
    make_inputs,
    model_bits,
    rows,
    run,
    spread,
)
from transformers.utils import chat_template_utils

from mindgrpo.checkpoint.folders import Candidate, folder_of, steps_in
from mindgrpo.checkpoint.format import read_manifest
from mindgrpo.cli.verbs import main
from mindgrpo.config import load_config, values_by_key
from mindgrpo.data import chat_template
from mindgrpo.errors import UserError
from mindgrpo.run import start
from mindgrpo.run.start import compare, make_output_paths

SAVED = ("--rl_config.save_ckpt_interval", "1", "--rl_config.save_max_ckpt_num", "3")
GO_ON = "--resume_training"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path) -> Path:
    """The run that never ended, with a checkpoint of every step in the background, of which three stay."""
    best = ("--rl_config.save_ckpt_async", "true", "--rl_config.save_ckpt_best", "spread")
    return run(inputs, inputs / "whole", *SAVED, *best)


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if "second" not in key}


def assert_same(found: Path, whole: Path) -> None:
    assert rows(found) == rows(whole)
    assert [row["step"] for row in rows(found)] == list(range(1, STEPS + 1))
    assert completions(found) == completions(whole)
    by_token = [(path / "per_token.jsonl").read_bytes() for path in (found, whole)]
    assert by_token[0] == by_token[1] != b""
    assert model_bits(found) == model_bits(whole)
    for name in ("evaluations.jsonl", "eval_completions.jsonl"):
        of = [json.loads(line) for path in (found, whole) for line in (path / name).open()]
        half = len(of) // 2
        assert [_timeless(row) for row in of[:half]] == [_timeless(row) for row in of[half:]]
    ours, theirs = (json.loads((path / "summary.json").read_text()) for path in (found, whole))
    for key in ("steps", "eval_before", "eval_after"):
        assert ours[key] == theirs[key]
    assert "ended" not in ours


def test_the_run_uses_what_it_is_to_carry(whole: Path) -> None:
    told = rows(whole)
    assert any(row["dynamic_sampling/replaced_groups"] for row in told)
    assert told[-1]["prompts_used"] > 2 * 7, "an epoch ends inside a step"
    assert len({row["lr"] for row in told}) == STEPS
    assert told[-1]["kl"] != 0 and told[-1]["updates_per_rollout"] == 4
    assert all("checkpoint/errors" in json.loads(row) for row in (whole / "metrics.jsonl").open())


def test_a_checkpoint_is_exported_as_the_model_of_its_step(whole: Path, tmp_path: Path) -> None:
    source = folder_of(whole, STEPS)
    assert main(["export", "--from", str(source), "--output", str(tmp_path / "hf")]) == 0
    assert model_bits(tmp_path) == model_bits(whole)
    names = {path.name for path in (whole / "hf").iterdir()}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == names


def test_the_newest_and_the_best_checkpoints_stay(whole: Path) -> None:
    best = read_manifest(folder_of(whole, STEPS)).state.best
    assert best is not None
    scores = {
        row["step"]: row["eval/spread/mean"] for row in rows(whole) if "eval/spread/mean" in row
    }
    assert scores[best.step] == best.score == max(scores.values())
    assert steps_in(whole) == sorted({best.step, STEPS - 2, STEPS - 1, STEPS})
    assert sorted(path.name[0] for path in (whole / "checkpoints").iterdir()) == ["s"] * len(
        steps_in(whole)
    )
    told = json.loads((whole / "summary.json").read_text())["best_checkpoint"]
    assert told == {
        "reward": "spread",
        "score": best.score,
        "step": best.step,
        "path": str(folder_of(whole, best.step)),
    }


def test_the_best_checkpoint_is_exported_by_the_runs_name(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = read_manifest(folder_of(whole, STEPS)).state.best
    assert best is not None
    of_run = ["export", "--from", str(whole), "--best", "--output", str(tmp_path / "a" / "hf")]
    named = ["--from", str(folder_of(whole, best.step)), "--output", str(tmp_path / "b" / "hf")]
    assert main(of_run) == 0 and main(["export", *named]) == 0
    assert model_bits(tmp_path / "a") == model_bits(tmp_path / "b")
    wrong = ["export", "--from", str(tmp_path), "--best", "--output", str(tmp_path / "c")]
    assert main(wrong) == 2
    assert f"--best is given, but --from {tmp_path} holds no checkpoint" in capsys.readouterr().err


def test_damaged_checkpoints_are_passed_over_and_the_run_ends_as_if_nothing_had_happened(
    inputs: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = inputs / "again"
    shutil.copytree(whole, again)
    cut = folder_of(again, STEPS) / "rank_00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:1000])
    flipped = folder_of(again, STEPS - 1) / "rank_00000.safetensors"
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    run(inputs, again, GO_ON, *SAVED)
    said = capsys.readouterr().out
    assert_same(again, whole)
    for damaged in (cut, flipped):
        assert len([line for line in said.splitlines() if str(damaged) in line]) == 1
    assert f"resumed from {folder_of(again, STEPS - 2)}: {STEPS - 2} of {STEPS} steps" in said
    assert len((again / f"metrics.jsonl.after_step_{STEPS - 2}").read_text().splitlines()) == 2
    assert (again / f"hf.until_step_{STEPS - 2}" / "config.json").exists()
    # What was saved after the step that the run went on from is kept under another name.
    aside = sorted(path.name for path in (again / "checkpoints").glob("*.set_aside"))
    assert aside == [f"step_00000{step}.set_aside" for step in (STEPS - 1, STEPS)]


def test_a_checkpoint_that_was_named_is_not_passed_over(inputs: Path, whole: Path) -> None:
    named = inputs / "named"
    shutil.copytree(whole, named)
    path = folder_of(named, STEPS) / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path} is damaged"):
        run(inputs, None, GO_ON, str(folder_of(named, STEPS)))
    assert rows(named) == rows(whole)


def interrupting(in_evaluation: bool, calls: int) -> Reward:
    """The same reward; sends the signal when it is called for the `calls`-th time, in evaluations or outside."""
    left = calls

    def scored(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
        nonlocal left
        if in_evaluation == (len(completions) == EVAL_SAMPLES):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return spread(completions, answers)

    scored.__name__ = "spread"
    return scored


def interrupted(inputs: Path, output: Path, reward: Reward, *words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run(inputs, output, *words, reward=reward)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return int(str(ended.value.code))


def test_a_run_that_signals_end_twice_goes_on_as_if_nothing_had_happened(
    inputs: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = inputs / "interrupted"
    sparse = ("--rl_config.save_ckpt_interval", "100", GO_ON, "--monitor_config.report=true")
    # What a run leaves that died before its first checkpoint.
    left = output / "checkpoints" / ".step_000002.partial"
    left.mkdir(parents=True)
    (output / "metrics.jsonl").write_text('{"step": 1}\n')
    # The second evaluation is that after step 2, whose row is open then.
    assert interrupted(inputs, output, interrupting(True, 2), *sparse) == 143
    said = capsys.readouterr().out
    assert f"{output} has no checkpoint: the run starts from the beginning" in said
    assert (output / "earlier_1" / "metrics.jsonl").read_text() == '{"step": 1}\n'
    assert not left.exists()
    assert "SIGTERM was received: the run ends with 2 of 5 steps done" in said
    assert f"  saved: {folder_of(output, 2)}\n  resume with: python " in said
    assert f" --resume_training true --output_dir {output}\n" in said
    assert steps_in(output) == [2]
    assert [row["step"] for row in rows(output)] == [1]
    assert json.loads((output / "summary.json").read_text())["ended"] == "SIGTERM was received"
    assert "SIGTERM was received" in (output / "report.html").read_text(encoding="utf-8")
    # After the dry run of the rewards and some rollouts comes the one that is given up.
    assert interrupted(inputs, output, interrupting(False, 4), *sparse) == 143
    done = steps_in(output)[-1]
    assert done in (3, 4)
    assert [row["step"] for row in rows(output)] == list(range(1, done + 1))
    run(inputs, output, *sparse)
    assert_same(output, whole)
    # Long over: nothing is done twice.
    model = (output / "hf" / "model.safetensors").stat().st_mtime_ns
    run(inputs, output, *sparse)
    assert (output / "hf" / "model.safetensors").stat().st_mtime_ns == model
    assert_same(output, whole)


def test_dangerous_changes_are_refused_unless_named_and_others_told(
    inputs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("--rl_config.beta", "0.1", "--rl_config.max_steps", str(STEPS + 1))
    with pytest.raises(UserError, match="rl_config.beta was 0.05 and is 0.1; give it its own"):
        run(inputs, tmp_path / "a", GO_ON, str(whole), *changes)
    assert not (tmp_path / "a").exists()
    best = ("--rl_config.save_ckpt_best", "accuracy_reward")
    with pytest.raises(
        UserError, match="save_ckpt_best is 'accuracy_reward', but the rewards are spread"
    ):
        run(inputs, tmp_path / "d", *best)
    allowed = ("--rl_config.resume_changed", "rl_config.beta")
    branch = run(inputs, tmp_path / "b", GO_ON, str(whole), *changes, *allowed)
    said = capsys.readouterr().out
    assert "rl_config.max_steps was 5 and is 6" in said
    # A new run in a folder of its own, with the rows that it grew from; the old one stays as it was.
    assert rows(branch)[:STEPS] == rows(whole) and len(rows(branch)) == STEPS + 1
    for name in ("metrics", "evaluations", "eval_completions", "completions", "per_token"):
        theirs = (whole / f"{name}.jsonl").read_bytes()
        grown = (branch / f"{name}.jsonl").read_bytes()
        assert grown.startswith(theirs) and len(grown) > len(theirs) > 0, name
    assert steps_in(whole)[-1] == STEPS


DATED = "{{ strftime_now('%d.%m.') }}{% for m in messages %}{{ m.content }}{% endfor %}="


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=1)


def test_a_run_whose_template_tells_the_date_goes_on_the_next_day_and_is_exported_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    words = [*ONE_GRAPH, *SAVED, "--rl_config.max_steps=2", "--rl_config.dynamic_sampling=false"]
    words += ["--rl_config.eval_steps=0", "--rl_config.eval_on_start=false"]
    words += [f"--rl_config.chat_template={template}", "--generate_config.max_prompt_length=56"]
    whole, again = run(tmp_path, tmp_path / "whole", *words), tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(folder_of(again, 2))
    for module in (start, chat_template, chat_template_utils):
        monkeypatch.setattr(module, "datetime", Tomorrow)
    run(tmp_path, again, GO_ON, *words)
    assert completions(again) == completions(whole)
    assert model_bits(again) == model_bits(whole)
    template.unlink()
    exported = tmp_path / "hf"
    assert main(["export", "--from", str(folder_of(whole, 1)), "--output", str(exported)]) == 0
    for path in (whole / "hf").iterdir():
        if path.suffix != ".safetensors":
            assert (exported / path.name).read_bytes() == path.read_bytes(), path.name
    assert (exported / "chat_template.jinja").read_text() == DATED


def test_supervised_training_is_not_resumed_as_another_kind(inputs: Path, whole: Path) -> None:
    words = ["--rl_config.eval_steps", "0"]
    loaded = load_config(inputs / "small.yaml", words, is_supervised=True)
    candidate = Candidate(folder_of(whole, STEPS), read_manifest(folder_of(whole, STEPS)))
    saved = candidate.manifest.identity
    now = saved.model_copy(update={"config": values_by_key(loaded.config)})
    with pytest.raises(UserError, match="is of a run of GRPO and cannot be resumed by supervised"):
        compare(candidate, loaded.config, now)


def test_a_folder_of_a_run_that_made_no_step_is_taken_again(inputs: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"

    def refused(completions: Sequence[str]) -> list[float]:
        raise ValueError("a mistake")

    with pytest.raises(UserError, match="a mistake"):
        run(inputs, output, reward=refused)
    assert (output / "metrics.jsonl").read_text() == ""
    words = ["--output_dir", str(output), "--rl_config.eval_steps", "0"]
    paths = make_output_paths(load_config(inputs / "small.yaml", words).config, "small", None)
    assert paths.elsewhere == [
        f"what an earlier run left before its first step: {output}/earlier_1"
    ]
    assert (output / "earlier_1" / "config_resolved.yaml").exists()
    assert not (output / "metrics.jsonl").exists()


def test_adapters_go_on_over_the_same_base_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of attention and of experts."""
    for key, value in {"model_type": "qwen3_moe", **MIXTURES["qwen3_moe"]}.items():
        monkeypatch.setitem(MODEL, key, value)
    inputs = tmp_path / "inputs"
    make_inputs(inputs)
    lora = ["--actor_config.lora.rank", "2", "--ref_config.sync_ref_model", "false"]
    for word in ("beta=0", "dynamic_sampling=false", "updates_per_rollout=1", "max_steps=2"):
        lora.append(f"--rl_config.{word}")
    whole = run(inputs, tmp_path / "whole", *SAVED, *lora)
    again = tmp_path / "again"
    shutil.copytree(whole, again)
    shutil.rmtree(folder_of(again, 2))
    run(inputs, again, *SAVED, *lora, GO_ON)
    assert rows(again) == rows(whole)
    assert model_bits(again) == model_bits(whole)
    source = folder_of(again, 2)
    assert main(["export", "--from", str(source), "--output", str(tmp_path / "hf")]) == 0
    assert model_bits(tmp_path) == model_bits(whole)
    other = tmp_path / "other"
    make_inputs(other)
    weights = other / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        UserError, match=r"cannot be resumed with these changes: weights\.base was '"
    ):
        run(other, tmp_path / "c", *lora, GO_ON, str(again))
