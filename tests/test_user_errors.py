"""Mistakes in what a run is given end as one sentence and status 2, before any device is touched.

Does not prove that every mistake is found, nor what happens once a run has started.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import yaml
from tables import each_row

from mindgrpo.backend import targets
from mindgrpo.cli.verbs import main
from mindgrpo.config.names import RETIRED, SECTIONS
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.weights.model_files import SafetensorsWriter

ROOT = Path(__file__).resolve().parent.parent
PROBLEMS = ROOT / "tests" / "data" / "word_problems.jsonl"
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}

Check = Callable[..., str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RAW))
    shapes = {s.name: s.shape for s in parameter_specs(decoder_config(RAW, "here"))}
    with SafetensorsWriter(folder, shapes) as writer:
        for name, shape in shapes.items():
            writer.add(name, np.zeros(shape, np.float32))
    for name in TOKENIZER_FILES:
        shutil.copy(EXAMPLE / "model" / name, folder / name)
    return folder


@pytest.fixture
def configuration(model: Path, tmp_path: Path) -> Path:
    """The bundled example with this module's model; other files import nothing of it."""
    document = yaml.safe_load((EXAMPLE / "grpo_config.yaml").read_text())
    document["actor_config"]["load"] = str(model)
    path = tmp_path / "grpo_config.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture
def refused(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Check:
    """Runs `check` in this process and returns its sentence, or `count` of them."""
    monkeypatch.chdir(ROOT)

    def check(*overrides: str, ranks: str | None = None, count: int = 1) -> str:
        world = [] if ranks is None else ["--ranks", ranks]
        status = main(["check", *world, "--config", str(configuration), *overrides])
        printed = capsys.readouterr()
        assert (status, printed.out) == (2, "")
        sentences = [only_sentence(line) for line in printed.err.splitlines()]
        assert len(sentences) == count, printed.err
        return "\n".join(sentences)

    return check


def only_sentence(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("mindgrpo: ")
    assert "Traceback" not in stderr
    return lines[0]


def test_all_that_has_to_change_is_told_at_once(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a configuration of MindRLHF's for another model, and for devices that are not here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(targets, "device_files", lambda: [])
    shapes = "model_configs/qwen_grpo/qwen2_5_7b/finetune_qwen2_5_7b.yaml"

    def lines(*words: str) -> list[str]:
        assert main(["check", "--config", str(configuration), *words]) == 2
        return [only_sentence(line) for line in capsys.readouterr().err.splitlines()]

    words = ["--actor_config.model_config", shapes]
    words += ["--generate_config.max_prompt_length", "999", "--rl_config.seq_length", "2048"]
    words += ["--context.device_target", "Ascend"]
    words += ["--rl_config.eval_dataset_file", "nowhere.jsonl"]
    parts = (shapes, "no Ascend device", "nowhere.jsonl", "knows positions up to 256")
    for line, part in zip(lines(*words), parts, strict=True):
        assert part in line
    # What needs the model is checked once it is named, and values of all keys before anything is read.
    parts = ("actor_config.load", "no Ascend device", "nowhere.jsonl")
    for line, part in zip(lines(*words, "--actor_config.load", ""), parts, strict=True):
        assert part in line
    wrong = [f"--{key}=-1" for key in ("rl_config.beta", "rl_config.max_steps", "context.mode")]
    parts = ("rl_config.max_steps", "rl_config.beta", "context.mode")
    for line, part in zip(lines(*wrong), parts, strict=True):
        assert f"{part} is " in line
    unknown = ("--trainer.a", "1", "--trainer.b", "2", "--rl_config.max_step", "3")
    for line, part in zip(lines(*unknown), ("'trainer' is no section", "max_step'"), strict=True):
        assert part in line


def test_keys_without_effect_are_listed(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    retired = list(RETIRED)[:9]
    words = [f"--{key}={'{}' if key in SECTIONS else '0'}" for key in retired]
    assert main(["check", "--config", str(configuration), *words]) == 0
    shown = capsys.readouterr().out
    assert all(f"{key} has no effect (command line --{key})" in shown for key in retired)


def edit(configuration: Path, old: str, new: str) -> int:
    """Replaces the first `old` and returns its line number."""
    text = configuration.read_text()
    assert old in text
    configuration.write_text(text.replace(old, new, 1))
    return text[: text.index(old)].count("\n") + 1


def test_the_example_with_a_sound_model_is_accepted(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["--ranks", "8", "--config", str(configuration)]
    assert main(["check", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    first, *lines = shown.out.splitlines()
    assert first == f"{configuration} can run:"
    heads = [line[2:10].strip() for line in lines]
    assert [head for head in heads if head] == [
        "run",
        "layouts",
        "memory",
        "data",
        "prompt",
        "rewards",
    ]
    assert lines[0].endswith(" epochs of 2000 prompts) on 8 ranks")
    # As the launcher calls it.
    assert main(["check", "--quiet", *words]) == 0
    assert capsys.readouterr().out == ""


def test_a_wrong_key_is_told_with_its_line_and_the_nearest_name(
    refused: Check, configuration: Path
) -> None:
    line = edit(configuration, "num_generations: 8", "num_generation: 8")
    sentence = refused()
    assert "rl_config.num_generation" in sentence and "num_generations" in sentence
    assert f"({configuration.name} line {line})" in sentence


def test_a_wrong_value_is_told_with_its_key_and_place(refused: Check, configuration: Path) -> None:
    line = edit(configuration, "beta: 0.01", "beta: -0.5")
    sentence = refused()
    for part in ("rl_config.beta", "-0.5", f"({configuration.name} line {line})"):
        assert part in sentence


def test_a_wrong_value_on_the_command_line_is_told_as_such(refused: Check) -> None:
    sentence = refused("--rl_config.num_generations", "many")
    for part in ("rl_config.num_generations", "many", "command line"):
        assert part in sentence


def test_a_model_parallel_degree_that_cuts_heads_is_told_with_both_numbers(refused: Check) -> None:
    sentence = refused("--actor_config.parallel_config.model_parallel", "3")
    for part in ("model_parallel 3", "num_attention_heads 4", "parallel_config.model_parallel"):
        assert part in sentence


def test_a_pipeline_longer_than_the_model_is_told(refused: Check) -> None:
    sentence = refused("--actor_config.parallel_config.pipeline_stage", "4")
    assert "pipeline_stage 4" in sentence and "2 layers" in sentence


@pytest.mark.parametrize("ranks", ["4", "16"])
def test_a_world_that_does_not_fit_the_layout_is_told_with_both_sizes(
    refused: Check, ranks: str
) -> None:
    actor, generate = refused(ranks=ranks, count=2).splitlines()
    for sentence in (actor, generate):
        assert f"{ranks} ranks; start 8, or set" in sentence
    assert "set actor_config.parallel_config" in actor
    assert "set generate_config.parallel_config" in generate


@pytest.mark.parametrize("ranks", ["many", "0", "--config"])
def test_a_number_of_ranks_that_is_none_is_told(refused: Check, ranks: str) -> None:
    sentence = refused(ranks=ranks)
    assert "--ranks" in sentence and ranks in sentence


def test_flags_of_check_stand_in_any_order(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    flags = {"--config": str(configuration), "--ranks": "8", "--rl_config.max_steps": "3"}
    printed = set()
    for order in permutations(flags):
        words = [word for flag in order for word in (flag, flags[flag])]
        assert main(["check", *words]) == 0
        printed.add(capsys.readouterr().out)
    assert main(["check", "--config", str(configuration), "--ranks=8"]) == 0
    assert len(printed) == 1 and " on 8 ranks" in printed.pop()


@each_row(
    ("words", "sentence"),
    [
        (["check", "FILE"], "write --config FILE"),
        (["train", "FILE"], "write --config FILE"),
        (["launch", "FILE", "--ranks", "2"], "write --config FILE"),
        (["train", "--config", "FILE", "--ranks", "2"], "start it with mindgrpo launch --ranks N"),
        (["check", "--config", "FILE", "--beta", "1", "--lr", "2"], "--rl_config.beta"),
        (["check", "--config", "FILE", "--beta", "1", "--lr", "2"], "mindgrpo: --lr is no flag"),
    ],
)
def test_a_word_that_is_no_flag_is_told_with_the_flag_that_was_meant(
    configuration: Path, words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("FILE", str(configuration)) for word in words]) == 2
    assert sentence.replace("FILE", str(configuration)) in capsys.readouterr().err


def test_unknown_keys_and_wrong_values_are_told_at_once(
    refused: Check, configuration: Path
) -> None:
    edit(configuration, "beta: 0.01", "beta: lots")
    edit(configuration, "num_generations: 8", "num_generation: 8")
    edit(configuration, "temperature: 1.0", "temperature: -1")
    sentences = refused(count=3)
    for part in ("rl_config.num_generation'", "rl_config.beta is 'lots'", "temperature is -1"):
        assert part in sentences
    # What only follows from a key that is not known is not told.
    edit(configuration, "beta: lots", "beta: 0.01")
    edit(configuration, "temperature: -1", "temperature: 1.0")
    edit(configuration, "seq_length: 128", "seq_lenght: 128\n  max_prompts: 3")
    edit(configuration, "max_prompt_length: 40", "max_prompt_length: 4000")
    assert "seq_lenght" in refused(count=3)


def test_layouts_without_data_parallel_are_those_of_as_many_ranks_as_are_started(
    configuration: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    document = yaml.safe_load(configuration.read_text())
    for section in ("actor_config", "generate_config"):
        del document[section]["parallel_config"]
    configuration.write_text(yaml.safe_dump(document))
    for verb in ("check", "plan"):
        for ranks in ("1", "3", "8"):
            assert main([verb, "--config", str(configuration), "--ranks", ranks]) == 0
            shown = capsys.readouterr().out
            assert f"train DP{ranks}/MP1" in shown and f"generate DP{ranks}/MP1" in shown
            assert verb == "check" or " = 128\n" in shown


def test_a_folder_that_a_run_cannot_make_is_told_by_its_key_before_it(
    refused: Check, tmp_path: Path
) -> None:
    (tmp_path / "afile").touch()
    at = str(tmp_path / "afile")
    keys = {
        "output_dir": (),
        "rl_config.tensorboard_dir": (),
        "rl_config.save_prompt_completions_dir": (),
        "profiler_config.profile_save_path": ("--profiler_config.profile",),
        "context.save_graphs_path": ("--context.save_graphs",),
    }
    for key, switches in keys.items():
        for path in (at, f"{at}/below"):
            assert f"{key} '{path}' cannot be made" in refused(f"--{key}", path, *switches)
    both = refused("--output_dir", at, "--rl_config.tensorboard_dir", at, count=2)
    assert "output_dir" in both and "tensorboard_dir" in both


def test_what_is_refused_once_ranks_run_is_refused_before(refused: Check) -> None:
    assert "context.loss_scale is 8" in refused("--context.loss_scale", "8")


def test_what_is_still_to_be_set_is_told_beside_what_is_wrong_and_once(refused: Check) -> None:
    words = ["--actor_config.load=/path/to/model", "--rl_config.dataset_file=nowhere.jsonl"]
    lines = refused(*words, "--reward_config.verifier_function=[]", count=2).splitlines()
    assert "still '/path/to/model'" in lines[0] and "verifier_function (" in lines[0]
    assert "nowhere.jsonl" in lines[1]


def test_a_missing_model_directory_is_told_with_its_key(refused: Check, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    sentence = refused("--actor_config.load", gone)
    assert gone in sentence and "actor_config.load" in sentence


def test_a_model_directory_without_a_tokenizer_is_told(
    refused: Check, model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*token*"))
    sentence = refused("--actor_config.load", str(bare))
    assert str(bare) in sentence and "tokenizer" in sentence


def test_a_model_directory_without_weights_is_told(
    refused: Check, model: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    sentence = refused("--actor_config.load", str(bare))
    assert str(bare) in sentence and "safetensors" in sentence


def test_a_tokenizer_larger_than_the_models_vocabulary_is_told(
    refused: Check, model: Path, tmp_path: Path
) -> None:
    raw = RAW | {"vocab_size": 67}
    small = tmp_path / "small"
    shutil.copytree(model, small, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (small / "config.json").write_text(json.dumps(raw))
    shapes = {s.name: s.shape for s in parameter_specs(decoder_config(raw, "here"))}
    with SafetensorsWriter(small, shapes) as writer:
        for name, shape in shapes.items():
            writer.add(name, np.zeros(shape, np.float32))
    sentence = refused("--actor_config.load", str(small))
    for part in ("train.jsonl:1", str(small), "the model has 67 (vocab_size)", "tokenizer_dir"):
        assert part in sentence


def test_a_reward_that_does_not_import_is_told_with_the_error(
    refused: Check, tmp_path: Path
) -> None:
    source = tmp_path / "my_reward.py"
    source.write_text("import nowhere_to_be_found\n\ndef judge(completions):\n    return []\n")
    given = f"{source}:judge"
    sentence = refused("--reward_config.verifier_function", given, "--verifier_weight", "1.0")
    for part in (given, "nowhere_to_be_found", "my_reward.py:1", "verifier_function"):
        assert part in sentence


def test_a_reward_that_is_not_built_in_is_told_with_the_nearest_name(refused: Check) -> None:
    given = ("--verifier_function", "acuracy_reward", "--verifier_weight", "1.0")
    sentence = refused(*given)
    assert "acuracy_reward" in sentence and "'accuracy_reward'" in sentence


def test_a_missing_data_set_is_told(refused: Check, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.jsonl")
    assert gone in refused("--rl_config.dataset_file", gone)


ACTOR = "--actor_config.parallel_config."


def test_layouts_that_the_model_does_not_allow_are_not_proposed(refused: Check) -> None:
    # 4 heads, 2 layers.
    sentence = refused(f"{ACTOR}model_parallel", "3", f"{ACTOR}pipeline_stage", "2", ranks="8")
    assert "start 6" not in sentence and "MP8" not in sentence
    assert sentence.endswith("to DP8/MP1/PP1, DP1/MP4/PP2 or DP2/MP2/PP2.")
    sentence = refused(f"{ACTOR}model_parallel", "1", f"{ACTOR}pipeline_stage", "4", ranks="8")
    assert "start 4" not in sentence and "PP4" not in sentence and "PP8" not in sentence


def test_an_output_folder_where_none_can_be_made_is_told_by_its_name(refused: Check) -> None:
    sentence = refused("--output_dir", "/proc/nope")
    assert "output_dir /proc/nope cannot be used, because /proc holds no files of users" in sentence
    assert "checkpoint" not in sentence


def test_a_folder_of_an_earlier_run_is_told_with_the_key_that_resumes_it(
    refused: Check, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    sentence = refused("--output_dir", str(tmp_path))
    assert "name another output_dir" in sentence and "resume" not in sentence
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    sentence = refused("--output_dir", str(tmp_path))
    assert "resume it from step 3 with rl_config.resume_training true" in sentence


@pytest.mark.parametrize("key", ["data_parallel", "model_parallel", "pipeline_stage"])
def test_a_layout_that_no_machine_can_hold_is_refused_like_any_other(
    refused: Check, key: str
) -> None:
    many = 10**12
    words = (f"--actor_config.parallel_config.{key}", str(many))
    words += ("--generate_config.parallel_config", "null")
    sentence = refused(*words, ranks="1")
    assert f"{key} {many}" in sentence and "but the run has 1 rank" in sentence


def test_a_model_on_the_hub_is_told_with_the_command_that_downloads_it(
    refused: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    sentence = refused("--actor_config.load", "Qwen/Qwen2.5-0.5B-Instruct")
    assert "run 'hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir Qwen2.5-0.5B-In" in sentence
    assert "hf download" not in refused("--actor_config.load", "output/run/hf")


def test_a_missing_column_is_told_with_a_key_of_the_run(refused: Check, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "1 + 1?", "output": "2"}\n')
    sentence = refused("--rl_config.dataset_file", str(tmp_path / "rows.jsonl"))
    assert "rl_config.dataset_map_keys" in sentence and "map-keys" not in sentence


def test_a_value_that_is_nearly_right_is_answered_with_the_right_one(refused: Check) -> None:
    sentence = refused("--rl_config.advantage_estimator", "reinforce++")
    assert "; did you mean 'reinforce_plus_plus' (command line" in sentence


def test_a_sentence_names_the_flag_that_was_typed(
    configuration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "nope")
    words = [
        "--config",
        str(configuration),
        "--model",
        model,
        "--data",
        str(ROOT / "README.md"),
    ]
    assert main(["check", "eval", *words]) == 2
    said = only_sentence(capsys.readouterr().err)
    assert f"'{model}' does not exist" in said
    assert "in --model." in said and "actor_config" not in said
    assert main(["score", "--reward", "nope", "--data", str(PROBLEMS)]) == 2
    said = only_sentence(capsys.readouterr().err)
    assert "'nope' is not built in" in said and said.endswith(" in --reward")


def test_a_device_that_does_not_exist_is_told(refused: Check) -> None:
    sentence = refused("--context.device_target", "Abacus")
    assert "context.device_target is 'Abacus'" in sentence


def test_a_device_that_is_not_on_this_host_is_told_once_all_else_is_right(
    refused: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(targets, "DEVICE_FILES", tmp_path)
    ascend = ("--context.device_target", "Ascend")
    assert "beta" in refused(*ascend, "--rl_config.beta=-1")
    sentence = refused(*ascend)
    for part in ("context.device_target is Ascend", "/dev/davinci*", "device_target: CPU"):
        assert part in sentence
    (tmp_path / "davinci0").touch()
    for name in targets.CANN_FOLDERS:
        monkeypatch.delenv(name, raising=False)
    assert "source its set_env.sh" in refused(*ascend)


def test_a_verb_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "'trian' is not a verb" in only_sentence(capsys.readouterr().err)


def test_a_process_of_its_own_ends_with_status_2_and_one_line(configuration: Path) -> None:
    edit(configuration, "beta: 0.01", "beta: lots")
    command = [sys.executable, "-m", "mindgrpo", "check", "--config", str(configuration)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "lots" in only_sentence(ended.stderr)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["config", "--reference"], ["config", "--explain", "rl_config.beta"], ["nope"]],
    ids=" ".join,
)
def test_a_reader_that_has_gone_ends_a_verb_without_a_word(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as unread:
        to_nobody = {"stderr" if words == ["nope"] else "stdout": unread}
        ended = subprocess.run(
            [sys.executable, "-m", "mindgrpo", *words],
            cwd=ROOT,
            **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | to_nobody),
        )
    assert (ended.stdout or b"") + (ended.stderr or b"") == b""
    # That of a program which the pipe's signal ends.
    assert ended.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_behind_standard_output_is_told() -> None:
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-m", "mindgrpo", "config", "--reference"]
        ended = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2 and "No space left" in only_sentence(ended.stderr)


def test_a_tracker_that_is_nowhere_is_told(refused: Check) -> None:
    assert "no file nowhere.py" in refused("--monitor_config.trackers", "nowhere.py:Mine")


def test_a_file_where_the_model_should_go_is_told(refused: Check, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    sentence = refused("--actor_config.save", str(tmp_path / "taken"))
    assert "actor_config.save" in sentence and str(tmp_path / "taken") in sentence
