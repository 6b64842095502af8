"""A small model's layouts and values for tests of checkpoints."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.checkpoint.format import Identity, Manifest, RunState
from mindgrpo.checkpoint.save import Saver
from mindgrpo.models.decoder_config import decoder_config
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weights.local_weights import Weights

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 21,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
WITH_EXPERTS = MODEL | {
    "model_type": "mixtral",
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
ROLES = ("policy", "first", "second")
IDENTITY = Identity(
    code="0.4.0",
    config={"rl_config.seed": 1, "actor_config.parallel_config.model_parallel": 2},
    model={"hidden_size": 16},
    data="d" * 64,
    batch={"prompts_per_step": 4},
    unsaved={},
)


def layout(mesh: tuple[int, ...], model: dict[str, Any] = MODEL) -> Layout:
    config = decoder_config(model, "the test's model")
    return Layout.of(Mesh(*mesh), parameter_specs(config))


def value(role: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Every element its own bits, NaNs among them."""
    seed = zlib.crc32(f"{role} {name}".encode())
    words = np.random.default_rng(seed).integers(0, 2**32, shape, dtype=np.uint32)
    return words.view(np.float32)


def filled(backend: Any, place: Layout, empty: bool = False) -> dict[str, Weights]:
    roles = {role: Weights(place, backend.rank, backend) for role in ROLES}
    for role, weights in roles.items():
        for spec in weights.specs():
            if spec.name in weights.arrays.hf_views and not empty:
                whole = value(role, spec.name, spec.shape)
                weights.arrays.hf_views[spec.name][...] = whole[weights.boxes[spec.name].slices]
    return roles


def manifest_of(stored: dict[str, Any], step: int = 3) -> Manifest:
    state = RunState(step=step, prompts=4 * step, updates=step, weights_version=step)
    return Manifest(layout="test", state=state, identity=IDENTITY, **stored)


def save(
    backend: Any,
    run: Path,
    mesh: tuple[int, ...],
    background: bool,
    step: int = 3,
    model: dict[str, Any] = MODEL,
) -> Path:
    saver = Saver(run, backend)
    roles = filled(backend, layout(mesh, model))
    saver.begin(step, roles, lambda stored: manifest_of(stored, step), background)
    if background:  # what happens after the copy must not reach the file
        for weights in roles.values():
            for part in weights.arrays.hf_views.values():
                part[...] = 0.0
    return saver.commit()
