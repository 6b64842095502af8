"""Supervised training of the examples' small models, in one process: the policy's own update, every advantage 1."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm.loss_config import LossConfig
from mindgrpo.algorithm.packing import MicroShape, PackedRollout
from mindgrpo.algorithm.sample import Rollout, TrainBatch
from mindgrpo.algorithm.schedule import learning_rate
from mindgrpo.backend.connect import connect
from mindgrpo.backend.targets import SHARED_MEMORY
from mindgrpo.models.decoder import KEEP_ALL
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.training.optimizer import AdamWSettings
from mindgrpo.training.policy import Policy, UpdateSettings
from mindgrpo.training.update import update
from mindgrpo.weights.model_files import SafetensorsWriter
from mindgrpo.weights.pretrained import fill_random

# Packed rows a step, and tokens a row; samples may take so much of them.
ROWS, ROW_LENGTH = 32, 128
TOKENS_A_STEP = int(ROWS * ROW_LENGTH * 0.85)


def small_qwen2(
    vocab_size: int, hidden_size: int, intermediate_size: int, positions: int
) -> dict[str, Any]:
    """The content of config.json: 4 layers of Qwen2's architecture; tokens 0 and 2 are padding and the turn's end."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": positions,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float32",
    }


def new_policy(model: dict[str, Any], seed: int) -> Policy:
    """With random weights; `model` is the content of config.json."""
    config = decoder_config(model, "the example's warm start")
    layout = Layout.of(Mesh(1, 1), parameter_specs(config))
    settings = UpdateSettings(
        shape=MicroShape(ROWS, ROW_LENGTH),
        num_positions=ROW_LENGTH,
        temperature=1.0,
        recompute=KEEP_ALL,
        # Every token alike: weighing samples alike would teach the short careless answers most.
        loss_config=LossConfig(loss_type="bnpo", beta=0.0),
        max_grad_norm=1.0,
        adamw=AdamWSettings(0.9, 0.98, 1e-8, 0.01),
    )
    policy = Policy(config, layout, connect(SHARED_MEMORY, dict(os.environ)), settings)
    fill_random(policy.weights, seed, 0.04)
    return policy


def train(policy: Policy, rollout_of: Callable[[int], Rollout], steps: int, peak: float) -> None:
    """`rollout_of` gives what step number `step`, from 0, learns to write; `peak` is the largest learning rate."""
    started = time.time()
    for step in range(steps):
        rollout = rollout_of(step)
        batch = TrainBatch(rollout, np.ones(len(rollout), np.float32))
        lr = learning_rate(step, "cosine", peak, peak / 100, 50, steps)
        report = update(policy, batch, PackedRollout(rollout), range(len(batch)), lr)
        if step % 20 == 0 or step == steps - 1:
            masks = rollout.action_mask
            nll = -np.concatenate([logps[masks[i]] for i, logps in report.logps.items()]).mean()
            seconds = time.time() - started
            print(
                f"step {step} nll {nll:.4f} norm {report.grad_norm:.2f} {seconds:.0f} s", flush=True
            )


def write_model(policy: Policy, model: dict[str, Any], directory: Path) -> None:
    """config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors"):
        old.unlink()
    shapes = {spec.name: spec.shape for spec in policy.weights.layout.specs}
    with SafetensorsWriter(directory, shapes) as writer, policy.weights.on_host() as full:
        for name in shapes:
            writer.add(name, full.hf_views[name])
    (directory / "config.json").write_text(json.dumps(model, indent=2) + "\n")
