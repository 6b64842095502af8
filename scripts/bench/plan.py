"""Seconds and memory of planning a reshard: by default Qwen2.5-72B on 1,024 ranks, DP8/MP8/PP16 to DP128/MP8.

plan.py [--model DIR] [--train dp,tp,pp --infer dp,tp] prints one JSON line. Counted are the layouts, the whole plan,
its totals and one rank's own moves, from shapes alone. Refuses to move anything: that is reshard.py.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from launching import degrees

from mindgrpo.models.decoder_config import DecoderConfig, decoder_config, read_config
from mindgrpo.models.parameters import num_parameters, parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.weight_sync.plan import plan_reshard

QWEN2_5_72B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
BF16_BYTES = 2


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a Hugging Face directory")
    parser.add_argument("--train", type=degrees, default=(8, 8, 16), help="dp,tp,pp")
    parser.add_argument("--infer", type=degrees, default=(128, 8), help="dp,tp")
    return parser.parse_args()


def layout(model: DecoderConfig, mesh: Mesh) -> Layout:
    return Layout.of(mesh, parameter_specs(model))


def figures(model: DecoderConfig, train: Mesh, infer: Mesh) -> dict[str, Any]:
    started = time.perf_counter()
    plan = plan_reshard(layout(model, train), layout(model, infer), BF16_BYTES)
    moved, lower_bound = plan.bytes_moved, plan.lower_bound
    plan.of(plan.num_ranks - 1)
    seconds = time.perf_counter() - started
    return {
        "bench": "plan",
        "seconds": seconds,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "bytes_moved": moved,
        "bytes_lower_bound": lower_bound,
        "moves": len(plan.part_of_move),
        "ranks": plan.num_ranks,
        "parameters": num_parameters(model),
        "train": str(train),
        "infer": str(infer),
    }


def main() -> None:
    given = options()
    model = decoder_config(QWEN2_5_72B, "Qwen2.5-72B")
    if given.model is not None:
        model = read_config(str(given.model))
    print(json.dumps(figures(model, Mesh(*given.train), Mesh(*given.infer))))


if __name__ == "__main__":
    main()
