"""How many completions of 1,000 differ between one rank and other layouts, with a vocabulary of 49,152.

layouts_agree.py [--prompts 125] [--generations 8] [--new_tokens 24] prints one JSON line: of each layout, the
completions whose tokens differ from those of one rank, and the tokens whose log-probs differ in any bit, in the
generator and in the trainer, or between these two. Weights are random. "flat": all have a deviation of 0.02, and a
token some 1/49,152 of the probability; "peaked": the embedding, which is the head too, is 6 times as large, and few
tokens have most of it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import launching
import numpy as np
from work import Work

MODEL = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
# (ranks, the trainer's dp, tp, pp, the generator's dp, tp)
LAYOUTS = {
    "one rank": (1, (1, 1, 1), (1, 1)),
    "MP2": (2, (1, 2, 1), (1, 2)),
    "PP2": (2, (1, 1, 2), (2, 1)),
    "MP4": (4, (1, 4, 1), (1, 4)),
    "MP8": (8, (1, 8, 1), (1, 8)),
    "DP2/MP2/PP2 with DP4/MP2": (8, (2, 2, 2), (4, 2)),
}
EMBEDDING_SCALES = {"flat": 1.0, "peaked": 6.0}
SLOTS = 256


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=125)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=24)
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    parser.add_argument("--logits", choices=EMBEDDING_SCALES, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    """Writes tokens int32, and the generator's and the trainer's log-probs float32, to `given.result`, on rank 0.

    Each is [completions, new_tokens].
    """
    import assembly

    from mindgrpo.algorithm.packing import PackedRollout
    from mindgrpo.models.pipeline import compute_log_probs
    from mindgrpo.rollout.engine import SeedKey
    from mindgrpo.rollout.noise import ROLLOUT
    from mindgrpo.rollout.replicas import Replicas

    backend = assembly.join_ranks()
    if backend is None:
        return
    _, train, infer = LAYOUTS[given.layout]
    work = Work(MODEL, given.prompts, given.generations, 16, given.new_tokens)
    config = assembly.configuration(work, train, infer, assembly.Rows(1, 1), SLOTS, beta=0.0)
    plan = assembly.plan_of(config, assembly.model_of(work), backend.world_size)
    sampling = assembly.sampling_of(plan)
    roles = assembly.roles_of(plan, backend, sampling)
    weights = roles.policy.weights
    if "model.embed_tokens.weight" in weights.arrays.hf_views:
        weights.arrays.hf_views["model.embed_tokens.weight"] *= EMBEDDING_SCALES[given.logits]
    roles.refresh_engine()
    version = roles.enter_rollout()
    samples = Replicas(roles.engine, plan.infer.mesh, backend).generate(
        assembly.prompts_of(work.prompt_ids(0)),
        work.generations,
        sampling,
        SeedKey(0, ROLLOUT, 0),
        version,
    )
    roles.enter("old_logps")
    pipeline, packed = roles.policy.pipeline, PackedRollout(samples)
    trained = compute_log_probs(pipeline, plan.train.mesh, backend, packed)
    if backend.rank == 0:
        np.savez(
            given.result,
            tokens=np.stack(samples.completion_ids),
            generator=np.stack(samples.generator_logps),
            trainer=np.stack(trained),
        )
        launching.give_figures({})
    backend.close()


def compared(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> dict[str, int]:
    return {
        "completions": int((one["tokens"] != other["tokens"]).any(axis=1).sum()),
        "generator": int((one["generator"] != other["generator"]).sum()),
        "trainer": int((one["trainer"] != other["trainer"]).sum()),
        "gap": int((other["generator"] != other["trainer"]).sum()),
    }


def main() -> None:
    given = options()
    if launching.is_rank():
        measure(given)
        return
    figures: dict[str, Any] = {"bench": "layouts_agree", "new_tokens": given.new_tokens}
    counts = [
        f"--{name}={getattr(given, name)}" for name in ("prompts", "generations", "new_tokens")
    ]
    with tempfile.TemporaryDirectory(prefix="mindgrpo-bench-") as folder:
        for logits in EMBEDDING_SCALES:
            results: dict[str, dict[str, np.ndarray]] = {}
            for layout, (ranks, *_) in LAYOUTS.items():
                result = Path(folder) / f"{logits}-{len(results)}.npz"
                words = [*counts, f"--logits={logits}", f"--layout={layout}", f"--result={result}"]
                launching.run_on_ranks(__file__, words, ranks)
                with np.load(result) as arrays:
                    results[layout] = dict(arrays)
            one = results["one rank"]
            figures["of"] = len(one["tokens"])
            figures[logits] = {layout: compared(one, other) for layout, other in results.items()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
