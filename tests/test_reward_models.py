"""Reward models: scores of transformers' classifiers, what is rendered for them, and runs that train with them.

Several ranks and layouts are in test_distributed.py. Does not prove that a reward model is a good judge.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_runs
from golden_models import BOUNDS, FOLDER, read_scores, scores_of
from safetensors.numpy import load_file, save_file
from tables import each_row

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.cli.verbs import main
from mindgrpo.config import Config, config_with, load_config
from mindgrpo.config.schema import values_by_key
from mindgrpo.data.tokenizer import Tokenizer, load_tokenizer
from mindgrpo.errors import UserError
from mindgrpo.grpo.reward_model import scaled
from mindgrpo.models.decoder_config import decoder_config, read_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.monitor.metrics import read_metrics
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.rewards.classifier_texts import ClassifierTexts, Completed
from mindgrpo.run.preflight import read_model, read_reward_models
from mindgrpo.weights.pretrained import check_tensors, load_weights

SCORED = ("qwen2", "llama", "qwen3", "gemma3_text")


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    alone = connect(SHARED_MEMORY, {})
    yield alone
    alone.close()


@pytest.mark.parametrize("family", SCORED)
def test_scores_are_those_of_transformers_classifiers(
    family: str, backend: Backend, tmp_path: Path
) -> None:
    golden = read_scores(family)
    folder = golden.write(tmp_path)
    load = partial(load_weights, directory=folder)
    found = scores_of(read_config(folder), load, golden.texts, backend, Mesh(1, 1))
    assert np.abs(np.array(found) - golden.scores).max() < BOUNDS.logps
    assert np.ptp(golden.scores) > 0.1


@each_row(
    ("changes", "told"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, r"has 2 labels .*trained with num_labels=1"),
        ({"id2label": None}, r"has 2 labels"),
        ({"id2label": None, "num_labels": 1}, None),
        ({"architectures": ["Qwen2ForProcessRewardModel"]}, r"scores each step of a completion"),
        ({"quantization_config": {"bits": 4}}, r"is quantised"),
    ],
)
def test_a_classifier_has_one_label_and_one_layer(
    changes: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    folder = read_scores("qwen2").write(tmp_path, **changes)
    if told is None:
        assert read_config(folder).head == "scalar"
        return
    with pytest.raises(UserError, match=told):
        read_reward_models(config_with(None, {"reward_config.model.load": str(folder)}).config)


@each_row(
    ("name", "bias", "told"),
    [
        ("v_head.summary.weight", 0.0, None),
        ("v_head.summary.weight", 0.5, r"has a bias \(v_head\.summary\.bias\)"),
        ("value_head.weight", None, None),
        ("other.weight", None, r"has no scalar head"),
    ],
)
def test_a_head_has_the_names_of_other_trainers_and_no_bias(
    name: str, bias: float | None, told: str | None, tmp_path: Path
) -> None:
    golden = read_scores("qwen2")
    folder = golden.write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors.pop("score.weight")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    if bias is not None:
        tensors[name.replace("weight", "bias")] = np.full(1, bias, np.float32)
    save_file(tensors, folder / "model.safetensors")
    specs = parameter_specs(read_config(folder).with_scalar_head())
    if told is None:
        np.testing.assert_array_equal(
            check_tensors(folder, specs).read("score.weight"), golden.head
        )
        return
    with pytest.raises(UserError, match=told):
        check_tensors(folder, specs)


def test_a_classifier_is_no_policy_and_no_reference(tmp_path: Path) -> None:
    folder = read_scores("qwen2").write(tmp_path)
    config = config_with(None, {"actor_config.load": str(folder)}).config
    with pytest.raises(UserError, match=r"actor_config\.load names a sequence classifier"):
        read_model(config)


def test_a_scalar_head_takes_the_place_of_the_vocabularys() -> None:
    raw = json.loads((FOLDER / "qwen2" / "config.json").read_text())
    model = decoder_config(raw, "here")
    assert model.tie_word_embeddings
    names = {spec.name: spec for spec in parameter_specs(model.with_scalar_head())}
    assert names["model.embed_tokens.weight"].position == "first"
    assert names["score.weight"].shape == (1, model.hidden_size)
    assert "lm_head.weight" not in names


# -- texts -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(small_runs.EXAMPLE / "model")


ASKED = ({"role": "user", "content": "What is 3 + 4?"},)


def completed(tokenizer: Tokenizer, answer: str, stops: bool = True) -> Completed:
    begun = tokenizer.render(ASKED)
    ids = [*tokenizer.encode(answer), *([tokenizer.stop_ids[0]] if stops else [])]
    turns = ({"role": "assistant", "content": answer},)
    prompt = np.array(tokenizer.encode(begun), np.int32)
    return Completed(ASKED, begun, prompt, answer, np.array(ids, np.int32), turns)


@pytest.mark.parametrize("stops", [True, False])
def test_the_policys_tokens_are_those_of_the_rendered_conversation(
    tokenizer: Tokenizer, stops: bool
) -> None:
    sample = completed(tokenizer, "The answer is 7.", stops)
    reused = ClassifierTexts(tokenizer, tokenizer, None)
    rendered = ClassifierTexts(tokenizer, None, None)
    assert reused.ids(sample) == rendered.ids(sample)
    whole = tokenizer.render([*ASKED, *sample.turns], add_generation_prompt=False)
    assert rendered.ids(sample) == tokenizer.encode(whole)
    # Tokens that no text is encoded to show that they are the policy's own.
    odd = replace(sample, completion_ids=np.array([5, 5, 5], np.int32))
    assert reused.ids(odd)[len(sample.prompt_ids) :][:3] == [5, 5, 5]


def test_texts_without_a_template_follow_each_other_and_padding_is_no_text(
    tokenizer: Tokenizer,
) -> None:
    bare = replace(tokenizer, template=None)
    sample = completed(tokenizer, "7")
    texts = ClassifierTexts(bare, tokenizer, None)
    assert texts.ids(sample) == bare.encode(sample.text + "7")
    last = texts.ids(sample)[-1]
    assert ClassifierTexts(bare, tokenizer, last).ids(sample) == texts.ids(sample)[:-1]


def test_scores_are_scaled_as_the_key_says() -> None:
    scores = np.array([-2.0, 0.0, 1.0, 800.0])
    np.testing.assert_array_equal(scaled(scores, "none"), scores)
    expected = [1 / (1 + np.exp(2.0)), 0.5, 1 / (1 + np.exp(-1.0)), 1.0]
    np.testing.assert_allclose(scaled(scores, "sigmoid"), expected, rtol=1e-12)
    normed = scaled(scores, "batch")
    np.testing.assert_allclose([normed.mean(), normed.std()], [0.0, 1.0], atol=1e-12)
    np.testing.assert_array_equal(scaled(np.full(3, 2.5), "batch"), np.zeros(3))


# -- configuration ---------------------------------------------------------------------------------------------


def test_one_reward_model_is_a_section_and_several_are_a_list(tmp_path: Path) -> None:
    one = load_config([], ["--reward_config.model.load", "a/b", "--reward_config.model.weight=2"])
    (model,) = one.config.reward_config.models_by_key.values()
    assert (model.load, model.weight, model.score_name) == ("a/b", 2.0, "b")
    path = tmp_path / "several.yaml"
    path.write_text(
        "reward_config: {model: [{load: x/first}, {load: second, name: own, scale: sigmoid}]}\n"
    )
    several = load_config(path).config
    own = several.reward_config.models_by_key
    assert [(key, each.score_name, each.scale) for key, each in own.items()] == [
        ("reward_config.models[0]", "first", "none"),
        ("reward_config.models[1]", "own", "sigmoid"),
    ]
    again = config_with(load_config(path), {"rl_config.seed": 5}).config
    assert again.reward_config == several.reward_config
    assert values_by_key(several)["reward_config.models"] == [
        {"load": "x/first"},
        {"load": "second", "name": "own", "scale": "sigmoid"},
    ]


@each_row(
    ("values", "told"),
    [
        (
            {"models": [{"load": "a/x"}, {"load": "b/x"}]},
            r"both have scores named 'x'.*models\[1\]\.name",
        ),
        ({"models": [{"weight": 2.0}]}, r"models\[0\] has no load"),
        ({"models": [{"load": "a", "scale": "log"}]}, r"reward_config\.models is .*must be"),
        ({"model.load": "a", "model.weight": "much"}, r"reward_config\.model\.weight is 'much'"),
        (
            {"model.load": "a", "model.parallel_config.pp_interleave_num": 2},
            r"pp_interleave_num 2 deals chunks",
        ),
    ],
)
def test_wrong_sections_are_one_sentence(values: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        config_with(None, {f"reward_config.{key}": value for key, value in values.items()})


# -- runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    small_runs.make_inputs(folder)
    write_classifier(folder / "model", folder / "judge")
    return folder


def write_classifier(model: Path, folder: Path, seed: int = 1) -> None:
    shutil.copytree(model, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    draw = np.random.default_rng(seed)
    tensors["score.weight"] = draw.standard_normal((1, raw["hidden_size"]), np.float32)
    save_file(tensors, folder / "model.safetensors")


def config_of(inputs: Path, *words: str) -> Config:
    keys = [
        word for key, value in small_runs.input_keys(inputs).items() for word in (f"--{key}", value)
    ]
    return load_config(inputs / "small.yaml", [*keys, *words]).config


def rewards_in(run: Path) -> list[dict[str, float | None]]:
    path = run / "completions.jsonl"
    return [json.loads(line)["rewards"] for line in path.read_text().splitlines()]


def test_a_reward_model_scores_beside_a_function_and_alone(inputs: Path, tmp_path: Path) -> None:
    words = ["--rl_config.max_steps=2", f"--reward_config.model.load={inputs / 'judge'}"]
    words += ["--reward_config.model.weight=0.5", "--rl_config.dynamic_sampling=false"]
    run = small_runs.run(inputs, tmp_path / "beside", *words)
    rows = rewards_in(run)
    judged = [row["judge"] for row in rows]
    assert all(own is not None for own in judged) and len({*judged}) > 4
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    count = len(rows) // 2
    for step, row in enumerate(metrics):
        own = [float(value or 0.0) for value in judged[step * count : (step + 1) * count]]
        assert row["reward/judge/mean"] == pytest.approx(np.mean(own), rel=1e-6)
        assert row["reward/judge/errors"] == 0
    assert any("eval/judge/mean" in row for row in read_metrics(run / "metrics.jsonl"))


def test_a_conversation_that_is_too_long_is_a_failed_score(inputs: Path, tmp_path: Path) -> None:
    words = ["--rl_config.max_steps=1", f"--reward_config.model.load={inputs / 'judge'}"]
    words += ["--reward_config.model.max_length=43", *small_runs.ONE_GRAPH]
    words += ["--rl_config.dynamic_sampling=false", "--rl_config.eval_steps=0"]
    run = small_runs.run(inputs, tmp_path / "short", *words)
    failed = sum(row["judge"] is None for row in rewards_in(run))
    (row,) = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert 0 < failed < 12
    assert row["reward/judge/errors"] == row["reward/judge/too_long"] == failed


def test_the_score_verb_judges_completions_as_a_run_does(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    rows = [{"question": "3 + 4?", "answer": "7", "completion": text} for text in ("7", "8")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--reward-model", str(inputs / "judge"), "--data", str(data)]
    assert main(["score", *flags]) == 0
    told = capsys.readouterr().out
    assert "judge" in told and "2 rows" in told
    assert main(["score", "--reward", "accuracy_reward", *flags]) == 0
    told = capsys.readouterr().out
    assert "accuracy_reward" in told and "judge" in told


def test_shapes_of_reward_models_are_read_by_their_section(inputs: Path) -> None:
    config = config_of(inputs, f"--reward_config.model.load={inputs / 'judge'}")
    (found,) = read_reward_models(config).values()
    assert found.head == "scalar"


def test_a_folder_beside_functions_is_a_reward_model_with_its_weight(
    inputs: Path, tmp_path: Path
) -> None:
    from mindgrpo import GRPOConfig, GRPOTrainer

    judge = str(inputs / "judge")
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"),
        max_steps=1,
        num_generations=4,
        generation_batch_size=8,
        max_completion_length=6,
        reward_weights=[0.5, 2.0],
    )
    trainer = GRPOTrainer(
        {"generate_config": {"max_prompt_length": 40}, "rl_config": {"seq_length": 64}},
        model=str(inputs / "model"),
        reward_funcs=[judge, small_runs.spread],
        train_dataset=[{"prompt": row["question"], "answer": row["answer"]} for row in rows],
        args=args,
    )
    run = trainer.train()
    for line in (run / "completions.jsonl").read_text().splitlines():
        row = json.loads(line)
        judged, own = row["rewards"]["judge"], row["rewards"]["spread"]
        assert row["reward"] == pytest.approx(0.5 * judged + 2.0 * own, rel=1e-5)


def test_an_evaluation_by_itself_scores_with_the_reward_model(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    words = [f"--{key}={value}" for key, value in small_runs.input_keys(inputs).items()]
    words += [f"--reward_config.model.load={inputs / 'judge'}", f"--output={figures}"]
    assert main(["eval", "--config", str(inputs / "small.yaml"), *words]) == 0
    assert "judge" in capsys.readouterr().out
    assert json.loads(figures.read_text())["figures"]["eval/judge/errors"] == 0


def test_the_examples_classifier_is_a_reward_model_for_the_example(tmp_path: Path) -> None:
    example = small_runs.EXAMPLE.parent / "reward_model"
    program = [sys.executable, str(example / "train_classifier.py"), "--steps", "1"]
    shown = subprocess.run(
        [*program, "--output", str(tmp_path / "judge")], capture_output=True, text=True, check=True
    ).stdout
    assert "pairs in the right order before: 0.000" in shown
    words = [f"--reward_config.model.load={tmp_path / 'judge'}"]
    config = load_config(example / "grpo_config.yaml", words).config
    (shapes,) = read_reward_models(config).values()
    check_tensors(tmp_path / "judge", parameter_specs(shapes))
