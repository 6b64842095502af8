"""Whether transformers computes what mindgrpo does from a model directory, such as an exported one.

In mindgrpo's environment:          compare_with_transformers.py write MODEL_DIR logits.npz [--tokens N | --ids 5,7,9]
In one with torch and transformers: compare_with_transformers.py compare MODEL_DIR logits.npz
The second ends with status 1 where a logit differs by more than --tolerance. Refuses to convert or to download: both
read the same directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

SEED = 0


def write(model: Path, output: Path, ids: list[int], num_tokens: int) -> int:
    from mindspore import Tensor

    from mindgrpo.backend.connect import connect
    from mindgrpo.backend.targets import SHARED_MEMORY
    from mindgrpo.models.decoder import Stage
    from mindgrpo.models.decoder_config import read_config
    from mindgrpo.models.parameters import parameter_specs
    from mindgrpo.models.shard import Shard
    from mindgrpo.parallel.mesh import Mesh
    from mindgrpo.parallel.sharding import Layout
    from mindgrpo.weights.local_weights import Weights
    from mindgrpo.weights.pretrained import load_weights

    config = read_config(model)
    backend = connect(SHARED_MEMORY, {})
    weights = Weights(Layout.of(Mesh(1, 1), parameter_specs(config)), 0, backend)
    load_weights(weights, model)
    drawn = np.random.default_rng(SEED).integers(0, config.vocab_size, num_tokens)
    tokens = np.array([ids or drawn], np.int32)
    shard = Shard(config, weights, backend)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape).copy()
    spans = np.zeros((*tokens.shape, 3), np.int32)
    stage = Stage(shard, tokens.shape[1])
    inputs = tokens, positions, spans, positions[None]
    hidden = stage(*map(Tensor, inputs)).asnumpy()
    rms = np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + config.rms_norm_eps)
    logits = hidden / rms * shard["model.norm.weight"].asnumpy() @ shard.head_table.asnumpy().T
    np.savez(output, input_ids=tokens, logits=logits.reshape(*tokens.shape, -1))
    print(f"{output}: logits of {tokens.shape[1]} tokens")
    return 0


def compare(model: Path, stored: Path, tolerance: float) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with np.load(stored) as values:
        ids, expected = values["input_ids"], values["logits"]
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = network(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    gap = float(np.abs(logits - expected).max())
    largest = float(np.abs(logits).max())
    print(f"largest difference {gap:.2e} of logits up to {largest:.3g}; allowed {tolerance:g}")
    # Written so that not-a-number fails.
    return 0 if gap <= tolerance else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("write", "compare"):
        given = verbs.add_parser(verb)
        given.add_argument("model", type=Path)
        given.add_argument("logits", type=Path)
    verbs.choices["write"].add_argument("--tokens", type=int, default=32)
    verbs.choices["write"].add_argument(
        "--ids", type=lambda text: [int(word) for word in text.split(",")], default=[]
    )
    verbs.choices["compare"].add_argument("--tolerance", type=float, default=1e-4)
    words = parser.parse_args()
    if words.verb == "write":
        return write(words.model, words.logits, words.ids, words.tokens)
    return compare(words.model, words.logits, words.tolerance)


if __name__ == "__main__":
    sys.exit(main())
