"""The users' own configuration and launch script, on this machine's processors, with a tiny Qwen2 model.

Of the configuration only paths, the device, the model and sizes are changed, line by line; vLLM generates, as it asks,
where it is installed, and else the embedded generator. Does not prove that the model learns, nor anything of the device
that the configuration was written for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mindgrpo.cli.verbs import main
from mindgrpo.errors import UserError
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.rollout.vllm.environment import find_python
from mindgrpo.weights.model_files import SafetensorsDirectory, SafetensorsWriter

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic"
LAUNCHER = ROOT / "examples" / "grpo" / "qwen_grpo_tutorial" / "run_grpo_vllm.sh"
CONFIGURATION = ROOT / "tests" / "data" / "users_grpo_config.yaml"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
# What the first published configuration of these models had beside: of its training model, and of its generating one.
FIRST_PUBLISHED = {
    "actor_config": {
        "use_seq_parallel": "True",
        "vocab_emb_dp": "False",
        "gradient_aggregation_group": "4",
        "micro_batch_interleave_num": "2",
    },
    "generate_config": {
        "micro_batch_num": "1",
        "vocab_emb_dp": "False",
        "gradient_aggregation_group": "4",
        "micro_batch_interleave_num": "1",
    },
}
NUM_STEPS = 2
RUN_SECONDS = 500
# A row holds one sample, and 32 x 2 x 1 of them make a step: the numbers of the configuration.
SAMPLES, UPDATES = 64, 32


def has_vllm() -> bool:
    try:
        find_python(None, os.environ)
    except UserError:
        return False
    return True


HAS_VLLM = has_vllm()
MODEL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 384,
    "hidden_size": 128 if HAS_VLLM else 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    # Heads of 8 dims are too small for vLLM.
    "num_attention_heads": 4 if HAS_VLLM else 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SIZES = {
    "seq_length": 8192,
    "max_model_len": 32768,
    "max_prompt_length": 2048,
    "max_tokens": 512,
    "block_size": 16,
}
# vLLM for processors has no blocks of 16 tokens.
SMALL = {
    "seq_length": 128,
    "max_model_len": 256,
    "max_prompt_length": 64,
    "max_tokens": 16,
    "block_size": 32,
}
PATHS = (
    "dataset_file",
    "tokenizer_dir",
    "save_strategy_dir",
    "save_data_file",
    "save_prompt_completions_dir",
    "tensorboard_dir",
    "load",
    "save",
    "model_config",
    "hf_config_path",
    "save_graphs_path",
    "profile_save_path",
    "dump_path",
)


def make_model(folder: Path) -> None:
    """Random, with vLLM but for a liking of digits: some answers shall be right, with either generator."""
    folder.mkdir()
    vocabulary = json.loads((EXAMPLE / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    digits = [vocabulary[digit] for digit in "0123456789"]
    (folder / "config.json").write_text(json.dumps(MODEL))
    rng = np.random.default_rng(0)
    specs = parameter_specs(decoder_config(MODEL, "here"))
    with SafetensorsWriter(folder, {spec.name: spec.shape for spec in specs}) as writer:
        for spec in specs:
            norm = len(spec.shape) == 1 and spec.name.endswith("norm.weight")
            noise = 0.1 * rng.standard_normal(spec.shape, dtype=np.float32)
            if HAS_VLLM and spec.name == "lm_head.weight":
                noise[digits] *= 3
            writer.add(spec.name, np.ones(spec.shape, np.float32) if norm else noise)
    for name in TOKENIZER_FILES:
        shutil.copy(EXAMPLE / "model" / name, folder / name)


def make_model_yaml(path: Path) -> None:
    """The model's shapes in the form that the users' configuration names."""
    section = {
        "model_type": "qwen2",
        "seq_length": MODEL["max_position_embeddings"],
        "hidden_size": MODEL["hidden_size"],
        "num_layers": MODEL["num_hidden_layers"],
        "num_heads": MODEL["num_attention_heads"],
        "n_kv_heads": MODEL["num_key_value_heads"],
        "vocab_size": MODEL["vocab_size"],
        "intermediate_size": MODEL["intermediate_size"],
        "qkv_has_bias": True,
    }
    path.write_text(yaml.safe_dump({"model": {"model_config": section}}))


def changed(line: str, folder: Path) -> str:
    """The line of the users' configuration for this machine."""
    paths = {
        "dataset_file": str(EXAMPLE / "train.jsonl"),
        "tokenizer_dir": str(folder / "model"),
        "save_prompt_completions_dir": str(folder / "completions"),
        "save": str(folder / "checkpoints"),
        "model_config": str(folder / "model.yaml"),
        "profile_save_path": str(folder / "profiler_data"),
        "dump_path": str(folder / "msprobe_dump"),
    }
    values = {**paths, **SMALL, "device_target": "CPU"} | ({} if HAS_VLLM else {"use_vllm": 0})
    found = re.match(r"( *)(\w+): ([^#]*?)( *#.*)?$", line)
    if found is None or found[2] not in values:
        return line
    value = values[found[2]]
    return f"{found[1]}{found[2]}: {json.dumps(value)}{found[4] or ''}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder of one run of NUM_STEPS through the users' launch script, and what it said."""
    folder = tmp_path_factory.mktemp("users")
    make_model(folder / "model")
    make_model_yaml(folder / "model.yaml")
    lines = [changed(line, folder) for line in CONFIGURATION.read_text("utf-8").splitlines()]
    (folder / "grpo_config.yaml").write_text("\n".join(lines) + "\n", "utf-8")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "QWEN_MODEL_PATH": str(folder / "model"),
        "DATASET_FILE": str(EXAMPLE / "train.jsonl"),
        "SAVE_CHECKPOINT_DIR": str(folder / "checkpoints"),
        "MINDGRPO_CONFIG": str(folder / "grpo_config.yaml"),
        "MINDGRPO_LOG_DIR": str(folder / "logs"),
    }
    words = ["--rl_config.max_steps", str(NUM_STEPS), "--output_dir", str(folder / "output")]
    for section, keys in FIRST_PUBLISHED.items():
        for key, value in keys.items():
            words += [f"--{section}.parallel_config.{key}", value]
    ended = subprocess.run(
        ["bash", str(LAUNCHER), *words],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    yield folder, ended.stdout


def test_only_paths_the_device_the_model_and_sizes_are_changed(tmp_path: Path) -> None:
    lines = CONFIGURATION.read_text("utf-8").splitlines()
    assert len(lines) == 194
    different = [line for line in lines if changed(line, tmp_path) != line]
    keys = {line.split(":")[0].strip() for line in different}
    assert keys <= {*PATHS, *SIZES, "device_target"} | (set() if HAS_VLLM else {"use_vllm"})
    assert len(different) <= 16


def test_two_steps_are_trained_with_the_configurations_numbers(run: tuple[Path, str]) -> None:
    folder, said = run
    rows = [json.loads(line) for line in (folder / "output/metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["updates_per_rollout"] == UPDATES
        assert row["grad_norm"] > 0 and np.isfinite(row["loss"])
        assert row["logprob_gap/max"] < 1e-4
        assert row["reward/format_reward/errors"] + 1 > 0
    assert [row["weights_version"] for row in rows] == [UPDATES, 2 * UPDATES]
    assert "train DP1/MP4/PP2, stages of 2+2 layers, sequence parallel" in said
    assert "generate DP2/MP4" in said and "reference DP2/MP4" in said
    rate = yaml.safe_load(CONFIGURATION.read_text())["actor_config"]["lr_schedule"]
    # Ten updates of warm-up, then next to no decay in 200,000.
    assert rows[-1]["lr"] == pytest.approx(float(rate["lr"]), rel=1e-3)


def test_what_the_run_goes_on_without_is_told_once(run: tuple[Path, str]) -> None:
    _, said = run
    for words in (
        "msprobe_config.msprobe asks for msprobe",
        "rl_config.align_type has no effect",
        "eos_token_id 151645, 151643 is outside of the model's 384 tokens",
        "actor_config.parallel_config.gradient_aggregation_group has no effect",
        "actor_config.parallel_config.micro_batch_interleave_num has no effect",
    ):
        assert said.count(words) == 1, words


def test_the_generator_is_the_one_that_was_asked_for(run: tuple[Path, str]) -> None:
    folder, said = run
    summary = json.loads((folder / "output/summary.json").read_text())
    if HAS_VLLM:
        assert summary["engine"] == "vllm" and summary["engine_version"]
        assert "vLLM in float32" in said
    else:
        assert summary["engine"] == "embedded"


def test_samples_go_where_the_configuration_says(run: tuple[Path, str]) -> None:
    folder, said = run
    rows = [json.loads(line) for line in (folder / "completions/completions.jsonl").open()]
    assert len(rows) == NUM_STEPS * SAMPLES
    assert all(row["length"] == SMALL["max_tokens"] for row in rows)
    assert "seconds: " in said, "performance_stats is on"
    assert not list(folder.rglob("*tfevents*")), "tensorboard is off"


def test_the_trained_model_lies_where_the_launch_script_says(run: tuple[Path, str]) -> None:
    folder, _ = run
    before, after = (SafetensorsDirectory(folder / name) for name in ("model", "checkpoints"))
    assert sorted(before.names) == sorted(after.names)
    moved = [
        name for name in before.names if not np.array_equal(before.read(name), after.read(name))
    ]
    assert len(moved) > len(before.names) / 2


def test_the_checkpoint_of_the_last_step_holds_the_trained_model(
    run: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = run
    source = folder / "output" / "checkpoints" / f"step_{NUM_STEPS:06d}"
    assert len(list(source.glob("*.safetensors"))) == 8
    words = ["--from", str(source), "--output", str(tmp_path / "hf")]
    assert main(["export", *words]) == 0
    saved, trained = (
        SafetensorsDirectory(tmp_path / "hf"),
        SafetensorsDirectory(folder / "checkpoints"),
    )
    assert sorted(saved.names) == sorted(trained.names)
    for name in trained.names:
        assert saved.read(name).tobytes() == trained.read(name).tobytes(), name
