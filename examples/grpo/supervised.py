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
from mindgrpo.weights.expert_files import file_tensors
from mindgrpo.weights.model_files import SafetensorsWriter
from mindgrpo.weights.pretrained import fill_random

# Packed rows a step, and tokens a row; samples may take so much of them.
ROWS, ROW_LENGTH = 32, 128
TOKENS_A_STEP = int(ROWS * ROW_LENGTH * 0.85)
# In models with experts: random attention gives all tokens of a text the same mean, by which routers of later layers
# would choose the same experts for all of them, and nothing here balances experts.
WRITE_NOTHING_AT_FIRST = ("o_proj.weight", "down_proj.weight")


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
    if config.moe is not None:
        with policy.weights.on_host(write=True) as full:
            for name, matrix in full.hf_views.items():
                if name.endswith(WRITE_NOTHING_AT_FIRST):
                    matrix[...] = 0
    return policy


def train(policy: Policy, rollout_of: Callable[[int], Rollout], steps: int, peak: float) -> None:
    """`rollout_of` gives what step number `step`, from 0, learns to write; `peak` is the largest learning rate.

    Prints, of a model with experts, the tokens of the fullest one as a multiple of its layer's mean.
    """
    started = time.time()
    for step in range(steps):
        rollout = rollout_of(step)
        batch = TrainBatch(rollout, np.ones(len(rollout), np.float32))
        lr = learning_rate(step, "cosine", peak, peak / 100, 50, steps)
        report = update(policy, batch, PackedRollout(rollout), range(len(batch)), lr)
        if step % 20 == 0 or step == steps - 1:
            masks = rollout.action_mask
            nll = -np.concatenate([logps[masks[i]] for i, logps in report.logps.items()]).mean()
            load = "" if report.expert_load is None else f" load {report.expert_load:.2f}"
            said = f"step {step} nll {nll:.4f} norm {report.grad_norm:.2f}{load}"
            print(f"{said} {time.time() - started:.0f} s", flush=True)


def write_model(policy: Policy, model: dict[str, Any], directory: Path) -> None:
    """config.json and model.safetensors, in the dtype that config.json names."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors"):
        old.unlink()
    tensors = file_tensors(
        {spec.name: spec.shape for spec in policy.weights.layout.specs}, "per_expert"
    )
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    with (
        SafetensorsWriter(directory, shapes, dtype=model["torch_dtype"]) as writer,
        policy.weights.on_host() as full,
    ):
        for tensor in tensors:
            rows = tensor.rows.made_of(lambda name, box: full.hf_views[name][box.slices])
            writer.add(tensor.name, rows)
    (directory / "config.json").write_text(json.dumps(model, indent=2) + "\n")
