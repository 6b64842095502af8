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

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.errors import UserError
from mindgrpo.weights.model_files import ModelFiles, SafetensorsDirectory, SafetensorsWriter

FAMILIES = {"llama": "mixtral", "qwen3": "qwen3_moe"}
# Where router and experts of a layer are in files, and what a dense MLP's matrices are called there.
MODULE = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}
NAMES = {
    "mixtral": {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    "qwen3_moe": {name: name for name in ("gate_proj", "up_proj", "down_proj")},
}
DENSE_MLP = re.compile(r"model\.layers\.(\d+)\.mlp\.(gate_proj|up_proj|down_proj)\.weight")
ROUTER_SCALE = 0.02


def make_config(dense: dict[str, Any], experts: int, per_token: int) -> dict[str, Any]:
    """`config.json` of the mixture. Raises ValueError for a model that has no family with experts."""
    kind = dense.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {kind!r}, but only {' and '.join(FAMILIES)} can be turned")
    if dense.get("attention_bias") or dense.get("mlp_bias"):
        raise ValueError("the model has biases, which no family with experts has")
    made = {**dense, "model_type": FAMILIES[kind], "num_experts_per_tok": per_token}
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


def num_experts(config: dict[str, Any]) -> int:
    return int(config.get("num_experts") or config["num_local_experts"])


def renamed(name: str, config: dict[str, Any]) -> list[str]:
    """The tensors that tensor `name` of the dense model becomes: one for each expert, or itself."""
    if (match := DENSE_MLP.fullmatch(name)) is None:
        return [name]
    kind = config["model_type"]
    prefix, own = f"model.layers.{match[1]}.{MODULE[kind]}", NAMES[kind][match[2]]
    return [f"{prefix}.experts.{i}.{own}.weight" for i in range(num_experts(config))]


def write(dense: ModelFiles, config: dict[str, Any], directory: Path, seed: int) -> None:
    """Writes the mixture in the dense model's dtype."""
    router = (num_experts(config), config["hidden_size"])
    made = {name: renamed(name, config) for name in dense.names}
    shapes = {new: dense.shape(name) for name, all_of in made.items() for new in all_of}
    layers = range(config["num_hidden_layers"])
    routers = [f"model.layers.{i}.{MODULE[config['model_type']]}.gate.weight" for i in layers]
    rng = np.random.default_rng(seed)
    dtypes = {tensor.dtype for own in dense.slices.values() for _, tensor in own}
    dtype: Dtype = "bfloat16" if dtypes == {"BF16"} else "float32"
    shapes |= dict.fromkeys(routers, router)
    with SafetensorsWriter(directory, shapes, dtype=dtype) as writer:
        for name, all_of in made.items():
            tensor = dense.read(name)
            for new in all_of:
                writer.add(new, tensor)
        for name in routers:
            writer.add(name, (ROUTER_SCALE * rng.standard_normal(router)).astype(np.float32))


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
    try:
        write(SafetensorsDirectory(given.model), config, given.output, given.seed)
    except UserError as error:
        sys.exit(str(error))
    (given.output / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in given.model.iterdir():
        is_index = file.name in ("config.json", "model.safetensors.index.json")
        if file.suffix in (".json", ".jinja", ".txt") and not is_index:
            shutil.copy(file, given.output)


if __name__ == "__main__":
    main()
