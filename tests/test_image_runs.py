"""Whole runs of a model that sees images, on one rank: log-prob gap, resumption, exports, evaluations, refusals.

Rows with and without pictures are mixed, and pictures have several sizes. Layouts are in test_distributed.py. Does not
prove that anything is learnt: examples/grpo/tiny_shapes shows that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import picture_runs
import pytest
import small_runs
from test_partial_runs import PARTIAL

from mindgrpo.cli import eval as eval_verb
from mindgrpo.cli.export import convert
from mindgrpo.errors import UserError
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.report.run_folder import read_run
from mindgrpo.report.samples import choose_samples
from mindgrpo.weights.model_files import SafetensorsDirectory
from mindgrpo.weights.pretrained import PATCH_EMBEDDING, open_weights

ROOMY = (
    "--generate_config.max_prompt_length=64",
    "--rl_config.seq_length=96",
    "--rl_config.dynamic_sampling=false",
)
SAVES = "--rl_config.save_ckpt_interval=2"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    picture_runs.make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    return small_runs.run(inputs, output, *ROOMY, SAVES)


def test_generator_and_trainer_differ_in_no_token(whole: Path) -> None:
    rows = read_metrics(whole / "metrics.jsonl")
    assert len(rows) == small_runs.STEPS
    for row in rows:
        assert row["logprob_gap/max"] == 0.0 and row["logprob_gap/differing"] == 0


def test_the_export_has_the_sources_names_and_its_encoder_in_every_bit(
    inputs: Path, whole: Path
) -> None:
    source, made = (SafetensorsDirectory(folder) for folder in (inputs / "model", whole / "hf"))
    assert set(made.names) == set(source.names)
    for name in source.names:
        is_same = np.array_equal(source.read(name), made.read(name))
        assert is_same == name.startswith("visual."), name
    # A convolution in files, also those of a source.
    assert made.shape(PATCH_EMBEDDING) == source.shape(PATCH_EMBEDDING) == (32, 3, 2, 14, 14)
    for name in ("preprocessor_config.json", "tokenizer.json"):
        assert (whole / "hf" / name).read_bytes() == (inputs / "model" / name).read_bytes()


def test_rows_name_their_images_and_the_report_shows_them_beside_the_prompts(whole: Path) -> None:
    rows = list(map(json.loads, small_runs.completions(whole)))
    assert {"<|image_pad|>" in row["prompt"] for row in rows} == {True, False}
    for row in rows:
        assert len(row.get("images", [])) == row["prompt"].count("<|image_pad|>")
    files = {path.stem: path.read_bytes() for path in (whole / "images").iterdir()}
    assert files.keys() == {digest for row in rows for digest in row.get("images", [])}
    assert all(data.startswith(b"\x89PNG") for data in files.values())
    shown = choose_samples(read_run(whole), 1 << 24)
    for step in map(json.loads, shown.by_step.values()):
        for group in step["groups"]:
            has_image = "<|image_pad|>" in group["prompt"]
            assert [image[:22] for image in group["images"]] == [
                "data:image/png;base64,"
            ] * has_image


@pytest.mark.parametrize("which", ["hf", "checkpoint"])
def test_the_export_verb_writes_the_encoder_too(
    inputs: Path, whole: Path, tmp_path: Path, which: str
) -> None:
    source = whole / "hf" if which == "hf" else whole
    model = None if which == "hf" else inputs / "model"
    convert(source, tmp_path / "made", "float32", 1 << 30, model=model)
    made, expected = open_weights(tmp_path / "made"), open_weights(whole / "hf")
    assert set(made.names) == set(expected.names)
    for name in expected.names:
        np.testing.assert_array_equal(made.read(name), expected.read(name))
    assert (tmp_path / "made" / "preprocessor_config.json").exists()


@pytest.mark.parametrize("how", ["whole", "partial"])
def test_a_run_that_goes_on_from_a_checkpoint_has_the_bits_of_one_that_was_not_stopped(
    inputs: Path, whole: Path, tmp_path: Path, how: str
) -> None:
    words = [*ROOMY, SAVES]
    if how == "partial":
        words += [*PARTIAL, "--rl_config.partial_rollout_chunk=2"]
        whole = small_runs.run(inputs, tmp_path / "whole", *words)
    checkpoint = whole / "checkpoints" / "step_000002"
    words.append(f"--rl_config.resume_training={checkpoint}")
    again = small_runs.run(inputs, tmp_path / "again", *words)
    assert small_runs.rows(again) == small_runs.rows(whole)
    assert small_runs.model_bits(again) == small_runs.model_bits(whole)


def test_an_evaluation_of_the_export_answers_as_the_run_did(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    rows = str(inputs / "train.jsonl")
    words = ["--model", str(whole / "hf"), "--data", rows]
    words += ["--reward_config.verifier_function", "accuracy_reward"]
    words += ["--generate_config.max_prompt_length", "64", "--output", str(tmp_path / "eval.json")]
    eval_verb.main([*words, "--generate_config.sampling_config.max_tokens", "6"])
    made = json.loads((tmp_path / "eval.json").read_text())
    assert made["prompts"] == small_runs.EVAL_SAMPLES


def test_a_run_on_another_encoder_or_with_other_pixels_does_not_go_on(
    inputs: Path, whole: Path, other_encoder: Path, tmp_path: Path
) -> None:
    checkpoint = whole / "checkpoints" / "step_000002"
    words = (*ROOMY, SAVES, f"--rl_config.resume_training={checkpoint}")
    with pytest.raises(UserError, match=r"rl_config.max_pixels"):
        own = f"--rl_config.max_pixels={28 * 28 * 4}"
        small_runs.run(inputs, tmp_path / "smaller", *words, own)
    other = tmp_path / "other"
    shutil.copytree(inputs, other)
    shutil.copytree(other_encoder, other / "model", dirs_exist_ok=True)
    with pytest.raises(UserError, match=r"vision encoder"):
        small_runs.run(other, tmp_path / "newer", *words)


def test_a_broken_picture_ends_the_run_with_its_row(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(inputs, folder)
    picture = folder / "1.png"
    picture.write_bytes(picture.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"train.jsonl:2, image 1: the file .*1.png' cannot be"):
        small_runs.run(folder, tmp_path / "run", *ROOMY, *small_runs.ONE_GRAPH)


def test_supervised_training_reads_rows_with_pictures(inputs: Path, tmp_path: Path) -> None:
    from mindgrpo.config import load_config
    from mindgrpo.trainer import SFTTrainer

    words = ["--actor_config.load", str(inputs / "model"), "--rl_config.max_steps", "8"]
    words += ["--rl_config.dataset_file", str(inputs / "train.jsonl")]
    words += ["--rl_config.eval_dataset_file", str(inputs / "train.jsonl")]
    words += ["--rl_config.eval_steps", "8", "--rl_config.prompts_per_step", "4"]
    words += ["--rl_config.seq_length", "96", "--actor_config.lr_schedule.lr", "0.01"]
    loaded = load_config([], [*words, "--output_dir", str(tmp_path / "sft")], is_supervised=True)
    run = SFTTrainer(loaded, name="sft").train()
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["eval/loss"] < rows[0]["loss"]


@pytest.fixture(scope="module")
def other_encoder(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model like the run's with other weights."""
    folder = tmp_path_factory.mktemp("other") / "model"
    picture_runs.supervised.write_random_model(picture_runs.model_fields(), folder, 1)
    written = {path.name for path in folder.iterdir()}
    for path in (inputs / "model").iterdir():
        if path.name not in written:
            shutil.copy(path, folder)
    return folder


def test_a_critic_of_the_policys_model_learns_from_prompts_with_images(
    inputs: Path, tmp_path: Path
) -> None:
    words = (*ROOMY, *small_runs.ONE_GRAPH, "--rl_config.advantage_estimator=gae")
    rows = small_runs.rows(small_runs.run(inputs, tmp_path / "run", *words))
    assert all(row["logprob_gap/max"] == 0.0 and row["critic/loss"] > 0 for row in rows)


def test_a_reference_with_the_same_encoder_gets_the_features(
    inputs: Path, whole: Path, tmp_path: Path
) -> None:
    words = [*ROOMY, f"--ref_config.load={whole / 'hf'}", "--ref_config.sync_ref_model=false"]
    made = small_runs.run(inputs, tmp_path / "run", *words, "--rl_config.max_steps=1")
    assert small_runs.rows(made)[0]["kl"] > 0


def test_models_beside_the_policy_that_cannot_have_its_features_are_refused(
    inputs: Path, other_encoder: Path, tmp_path: Path
) -> None:
    small_runs.make_inputs(tmp_path / "text")
    text = tmp_path / "text" / "model"
    gae = "--rl_config.advantage_estimator=gae"
    refused = {
        f"--ref_config.load={other_encoder}": r"ref_config.load .* has another vision encoder than actor_config.load",
        f"--ref_config.load={text}": r"sees images and '.*text/model' does not",
        f"--critic_config.load={other_encoder}": r"critic_config.load .* has another vision encoder",
        f"--reward_config.model.load={text}": r"reward_config.model.load .* is a model of text",
        f"--reward_config.model.load={other_encoder}": r"sees images \(qwen2_5_vl\), which reward models are not given",
    }
    for word, expected in refused.items():
        words = [*ROOMY, "--ref_config.sync_ref_model=false", word]
        with pytest.raises(UserError, match=expected):
            small_runs.trainer(inputs, None, *words, *([gae] if "critic" in word else []))


ENVIRONMENT = '''
import io
from PIL import Image

class Own:
    """Opens with the row's question and images, or with a picture that it draws."""

    def reset(self, row):
        if row["images"] is None:
            picture = Image.new("RGB", (56, 56), (len(row["question"]) % 256, 0, 0))
            return [{"role": "user", "content": [{"type": "image", "image": picture}, "what is it?"]}]
        return row["messages"]

    def step(self, completion):
        self.turns = getattr(self, "turns", 0) + 1
        return "look again", float(sum(map(ord, completion)) % 3), self.turns == 2


class AnswersWithImages(Own):
    def step(self, completion):
        messages = [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (56, 56))}]}]
        return messages, 0.0, False
'''


def test_an_environment_opens_conversations_with_images_of_the_row_or_its_own(
    inputs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "own.py"
    path.write_text(ENVIRONMENT)
    words = [*ROOMY, *small_runs.ONE_GRAPH, "--rl_config.max_turns=2", "--rl_config.max_steps=2"]
    words += ["--generate_config.sampling_config.max_tokens=32"]
    own = f"--rl_config.environment={path}:Own"
    run = small_runs.run(inputs, tmp_path / "run", *words, own)
    for row in read_metrics(run / "metrics.jsonl"):
        assert row["logprob_gap/max"] == 0.0 and row["environment/failures"] == 0
    rows = list(map(json.loads, small_runs.completions(run)))
    opened = {row["prompt"] for row in rows}
    assert all("<|image_pad|>" in prompt for prompt in opened) and any(
        "what is it?" in prompt for prompt in opened
    )
    with pytest.raises(UserError, match=r"an image, which only the messages of reset can have"):
        small_runs.run(inputs, tmp_path / "no", *words, f"{own[:-3]}AnswersWithImages")


def test_a_model_of_text_is_not_shown_an_environments_images(inputs: Path, tmp_path: Path) -> None:
    small_runs.make_inputs(tmp_path / "text")
    (tmp_path / "own.py").write_text(ENVIRONMENT.replace('row["images"]', "None"))
    own = f"--rl_config.environment={tmp_path / 'own.py'}:Own"
    with pytest.raises(UserError, match=r"the model sees none"):
        small_runs.trainer(tmp_path / "text", None, own, "--rl_config.max_turns=2").train()
