"""Trains the examples' small models from nothing: a random model, then `mindgrpo sft` stage by stage."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mindgrpo.algorithm.schedule import LRSchedule
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.models.vision_config import vision_specs
from mindgrpo.weights.expert_files import file_tensors
from mindgrpo.weights.model_files import VISUAL, SafetensorsWriter
from mindgrpo.weights.pretrained import PATCH_EMBEDDING, generator_of

ROWS_A_STEP, ROW_LENGTH, ROWS_A_MICRO_BATCH = 76, 128, 32
SCALE, WARMUP = 0.04, 50
PIXELS = "preprocessor_config.json"
# The last three are a vision encoder's.
NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")
# In models with experts: random attention gives all tokens of a text the same mean, by which routers of later layers
# would choose the same experts for all of them, and nothing here balances experts.
WRITE_NOTHING_AT_FIRST = ("o_proj.weight", "down_proj.weight")

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stage:
    """Rows as `mindgrpo sft` reads them, and the number of steps that learn from them."""

    rows: Rows
    steps: int


def write_random_model(model: dict[str, Any], directory: Path, seed: int) -> None:
    """Writes config.json and float32 weights; `model` is the content of config.json."""
    directory.mkdir(parents=True)
    config = decoder_config(model, "the example's config.json")
    specs = parameter_specs(config)
    if config.vision is not None:
        specs += vision_specs(config.vision)
    has_experts = any(len(spec.shape) == 3 for spec in specs)
    values = {}
    for spec in specs:
        drawn = generator_of(spec.name, seed).standard_normal(spec.shape, dtype=np.float32)
        # A vision encoder stays random, so its layers have to change what they get.
        is_vision = spec.name.startswith(VISUAL) and len(spec.shape) > 1
        drawn *= spec.shape[-1] ** -0.5 if is_vision else SCALE
        if len(spec.shape) == 1 and spec.name.endswith(NORMS):
            drawn[...] = 1.0
        elif has_experts and spec.name.endswith(WRITE_NOTHING_AT_FIRST):
            drawn[...] = 0.0
        values[spec.name] = drawn
    tensors = file_tensors({name: drawn.shape for name, drawn in values.items()}, "per_expert")
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    if (vision := config.vision) is not None:
        # A convolution in files.
        patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
        shapes[PATCH_EMBEDDING] = (vision.hidden_size, vision.channels, *patch)
    with SafetensorsWriter(directory, shapes) as writer:
        for tensor in tensors:
            rows = tensor.rows.made_of(lambda name, box: values[name][box.slices])
            writer.add(tensor.name, rows.reshape(shapes[tensor.name]))
    (directory / "config.json").write_text(json.dumps(model, indent=2) + "\n")


def warm_start(
    model: dict[str, Any],
    tokenizer: Path,
    stages: Sequence[Stage],
    peak: float,
    seed: int,
    output: Path,
) -> None:
    """Trains a random model stage by stage and writes model.safetensors and config.json to `output`.

    The learning rate rises to `peak` and falls by a cosine over all stages. `tokenizer` is a directory.
    """
    total, done = sum(stage.steps for stage in stages), 0
    with TemporaryDirectory(prefix="mindgrpo-warm-start-") as folder:
        work = Path(folder)
        source = work / "random"
        write_random_model(model, source, seed)
        if (tokenizer / PIXELS).exists():
            shutil.copyfile(tokenizer / PIXELS, source / PIXELS)
        for number, stage in enumerate(stages):
            rows, run = work / f"stage_{number}.jsonl", work / f"stage_{number}"
            rows.write_text("".join(json.dumps(row) + "\n" for row in stage.rows))
            schedule = LRSchedule(lr=peak, min_lr=peak / 100, warmup_step=WARMUP)
            lr = schedule.rate(max(done, WARMUP), total)
            values = {
                "rl_config": {
                    "dataset_file": str(rows),
                    "tokenizer_dir": str(tokenizer),
                    "max_steps": stage.steps,
                    "prompts_per_step": ROWS_A_STEP,
                    "seq_length": ROW_LENGTH,
                    "batch_size": ROWS_A_MICRO_BATCH,
                    "seed": seed,
                    "tensorboard": False,
                },
                "actor_config": {
                    "load": str(source),
                    "optimizer": {"adam_beta2": 0.98, "weight_decay": 0.01},
                    "lr_schedule": {
                        "lr_decay_style": "cosine",
                        "lr": lr,
                        "min_lr": peak / 100,
                        "warmup_step": 0 if done else min(WARMUP, stage.steps - 1),
                        "decay_steps": total - done,
                    },
                },
                "monitor_config": {"report": False},
            }
            config = work / f"stage_{number}.yaml"
            config.write_text(json.dumps(values))  # JSON is YAML
            run_verb("sft", "--config", str(config), "--output_dir", str(run))
            source, done = run / "hf", done + stage.steps
        made = work / "made"
        dtype = str(model["torch_dtype"])
        run_verb("export", "--from", str(source), "--output", str(made), "--dtype", dtype)
        output.mkdir(parents=True, exist_ok=True)
        for old in output.glob("*.safetensors"):
            old.unlink()
        shutil.copyfile(made / "model.safetensors", output / "model.safetensors")
    (output / "config.json").write_text(json.dumps(model, indent=2) + "\n")


def run_verb(*words: str) -> None:
    """Runs `mindgrpo` with `words`, and ends this program where it fails."""
    ended = subprocess.run([sys.executable, "-m", "mindgrpo", *words])
    if ended.returncode:
        sys.exit(ended.returncode)


def in_two_stages(steps: int, last_share: float) -> tuple[int, int]:
    """Splits the steps of a warm start: those of learning, and the last ones."""
    last = max(1, math.ceil(steps * last_share))
    return steps - last, last
