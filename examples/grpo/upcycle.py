"""Turns a dense model into a mixture of experts: every expert is a copy of the dense MLP, the router is random.

    python upcycle.py --model DIR --output DIR [--experts 8] [--per_token 2] [--seed 0]

A llama becomes a mixtral, a qwen3 a qwen3_moe. Scores of a token's experts sum to 1, so the new model computes what the
dense one does, to rounding, until training tells its experts apart (sparse upcycling, arXiv:2212.05055).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

# The names of a dense MLP's matrices in each family's experts.
FAMILIES = {
    "llama": ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3": ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
}
DENSE = ("gate_proj", "up_proj", "down_proj")
DENSE_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
ROUTER_SCALE = 0.02


def make_config(dense: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """`config.json` of the mixture. Raises ValueError for a model that has no family with experts."""
    kind = dense.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {kind!r}, but only {' and '.join(FAMILIES)} can be turned")
    if dense.get("attention_bias") or dense.get("mlp_bias"):
        raise ValueError("the model has biases, which no family with experts has")
    made = {**dense, "model_type": FAMILIES[kind][0], "num_experts_per_tok": per_token}
    if kind == "llama":
        return {**made, "architectures": ["MixtralForCausalLM"], "num_local_experts": experts}
    return {
        **made,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "moe_intermediate_size": dense["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def make_tensors(
    dense: dict[str, np.ndarray], config: dict[str, Any], experts: int, seed: int
) -> dict[str, np.ndarray]:
    module, names = next(own[1:] for own in FAMILIES.values() if own[0] == config["model_type"])
    rng, made = np.random.default_rng(seed), {}
    for key, tensor in dense.items():
        if (match := DENSE_MLP.fullmatch(key)) is None:
            made[key] = tensor
            continue
        prefix = f"model.layers.{match[1]}.{module}"
        for expert in range(experts):
            made[f"{prefix}.experts.{expert}.{names[DENSE.index(match[2])]}.weight"] = tensor
        if match[2] == "gate_proj":
            router = ROUTER_SCALE * rng.standard_normal((experts, config["hidden_size"]))
            made[f"{prefix}.gate.weight"] = router.astype(tensor.dtype)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--per_token", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if not 0 < given.per_token <= given.experts:
        sys.exit(f"--per_token {given.per_token} is not one of 1 to --experts {given.experts}.")
    try:
        dense = json.loads((given.model / "config.json").read_text())
        config = make_config(dense, given.experts, given.per_token)
    except (OSError, ValueError) as error:
        sys.exit(f"{given.model / 'config.json'}: {error}.")
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(given.model.glob("*.safetensors")):
        tensors |= load_file(file)
    given.output.mkdir(parents=True, exist_ok=True)
    made = make_tensors(tensors, config, given.experts, given.seed)
    save_file(made, given.output / "model.safetensors", metadata={"format": "pt"})
    (given.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in given.model.iterdir():
        if (
            file.name != "config.json"
            and file.suffix in (".json", ".jinja", ".txt")
            and "safetensors" not in file.name
        ):
            shutil.copy(file, given.output)


if __name__ == "__main__":
    main()
