"""A Qwen2 decoder in plain NumPy, one sequence at a time and in float64, to hold packed rows and prefix blocks to.

Uses nothing of mindgrpo.models. Does not compute scaled positions, nor anything of another family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def log_probs(
    weights: Weights, config: Mapping[str, Any], prompt: np.ndarray, completion: np.ndarray
) -> np.ndarray:
    """float64 [completion length], in nats at temperature 1; `config` is a config.json with tied embeddings."""
    tokens = np.concatenate([prompt, completion])
    table = weights["model.embed_tokens.weight"].astype(np.float64)
    hidden = table[tokens]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        layer = {
            name.removeprefix(prefix): value.astype(np.float64)
            for name, value in weights.items()
            if name.startswith(prefix)
        }
        normed = _norm(hidden, layer["input_layernorm.weight"])
        hidden = hidden + _attention(layer, config, normed)
        normed = _norm(hidden, layer["post_attention_layernorm.weight"])
        gate = normed @ layer["mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj.weight"].T)
        hidden = hidden + inner @ layer["mlp.down_proj.weight"].T
    logits = _norm(hidden, weights["model.norm.weight"]) @ table.T
    logits = logits[len(prompt) - 1 : -1]
    top = logits.max(axis=1)
    total = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return logits[np.arange(len(completion)), completion] - total


def _attention(layer: Weights, config: Mapping[str, Any], x: np.ndarray) -> np.ndarray:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, length = config["hidden_size"] // heads, len(x)
    angles = np.arange(length)[:, None] / 10000.0 ** (np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def projected(name: str, count: int) -> np.ndarray:
        weight, bias = layer[f"self_attn.{name}.weight"], layer[f"self_attn.{name}.bias"]
        return (x @ weight.T + bias).reshape(length, count, dim)

    def turned(rows: np.ndarray) -> np.ndarray:
        low, high = rows[..., : dim // 2], rows[..., dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    queries = turned(projected("q_proj", heads))
    keys, values = turned(projected("k_proj", kv_heads)), projected("v_proj", kv_heads)
    out = np.zeros_like(queries)
    for head in range(heads):
        shared = head // (heads // kv_heads)
        scores = queries[:, head] @ keys[:, shared].T / np.sqrt(dim)
        scores[np.triu_indices(length, 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = shares / shares.sum(axis=1, keepdims=True) @ values[:, shared]
    return out.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight
