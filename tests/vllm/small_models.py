"""Model folders for the engine's tests: the bundled tied model, and an untied Qwen2 with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from engine_process import ROOT, Tensors
from safetensors.numpy import load_file, save_file

TINY = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model"
# vLLM pads a vocabulary to a multiple of 64: this one's is padded, with 1 worker and with 2.
UNTIED: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def tiny_tensors() -> Tensors:
    return load_file(TINY / "model.safetensors")


def untied_tensors() -> Tensors:
    rng = np.random.default_rng(0)
    return {
        name: (1.0 if "norm" in name else 0.0)
        + (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in untied_shapes().items()
    }


def untied_shapes() -> dict[str, tuple[int, ...]]:
    hidden, inner = UNTIED["hidden_size"], UNTIED["intermediate_size"]
    keys = hidden * UNTIED["num_key_value_heads"] // UNTIED["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (300, hidden)}
    for layer in range(UNTIED["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        for name, size in (("q", hidden), ("k", keys), ("v", keys)):
            shapes[f"{start}self_attn.{name}_proj.weight"] = (size, hidden)
            shapes[f"{start}self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{start}self_attn.o_proj.weight"] = (hidden, hidden)
        shapes[f"{start}mlp.gate_proj.weight"] = (inner, hidden)
        shapes[f"{start}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{start}mlp.down_proj.weight"] = (hidden, inner)
        shapes[f"{start}input_layernorm.weight"] = (hidden,)
        shapes[f"{start}post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (300, hidden)}


def write_model(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def changed(tensors: Tensors, names: list[str], seed: int) -> Tensors:
    """The tensors with noise of half their own size added to those of these names."""
    rng = np.random.default_rng(seed)
    noisy = {}
    for name in names:
        noise = rng.standard_normal(tensors[name].shape).astype(np.float32)
        noisy[name] = tensors[name] + 0.5 * tensors[name].std() * noise
    return tensors | noisy
