"""One long row on 1, 2 and 4 ranks that share it: loss, gradients, bits of log-probs, memory and time of an update.

context_parallel.py [--tokens 16384] [--ranks 1,2,4] [--updates 3] [--backend shared_memory] prints one JSON line. A row
is one sample ("alone"), or a prompt of a quarter and three completions that share it ("shared"), with random weights.
Gradients are compared with those of the first number of ranks: the largest difference of an element, as a share of its
tensor's largest one. Memory is what activations.py measures, on the rank that touches most, beside what is planned; the
time is the median of all updates but the first. Refuses to say anything of accelerators.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import activations
import launching
import numpy as np

MODEL = activations.model(256, 704, 4, 8, 4, 2048) | {"max_position_embeddings": 1 << 17}
ROWS = {"alone": (1 / 2, 1), "shared": (1 / 4, 3)}
SEED, DEVIATION = 3, 0.05


def rollout_of(row: str, tokens: int) -> Any:
    """Samples that fill one row of `tokens` to its last columns."""
    from mindgrpo.algorithm.sample import Rollout

    share, number = ROWS[row]
    prompt = int(tokens * share)
    completion = (tokens - prompt) // number
    rng = np.random.default_rng(SEED)

    def drawn(count: int) -> np.ndarray:
        return rng.integers(3, MODEL["vocab_size"], count, dtype=np.int32)

    prompts = [drawn(prompt)] * number
    completions = [drawn(completion) for _ in range(number)]
    logps = [np.zeros(completion, np.float32)] * number
    return Rollout.single_turn(prompts, completions, ["length"] * number, logps, [0] * number)


def policy_of(backend: Any, tokens: int) -> Any:
    from mindgrpo.algorithm.estimators import AlgorithmConfig
    from mindgrpo.algorithm.packing import MicroShape
    from mindgrpo.backend.kernels.shapes import AdamWSettings
    from mindgrpo.models.decoder import KEEP_ALL
    from mindgrpo.models.decoder_config import decoder_config
    from mindgrpo.models.parameters import parameter_specs
    from mindgrpo.parallel.mesh import Mesh
    from mindgrpo.parallel.sharding import Layout
    from mindgrpo.training.policy import Policy, UpdateSettings
    from mindgrpo.weights.pretrained import fill_random

    size = backend.world_size
    config = decoder_config(MODEL, "the bench's model")
    layout = Layout.of(Mesh(1, 1, 1, size), parameter_specs(config))
    settings = UpdateSettings(
        shape=MicroShape(1, tokens, context_ranks=size),
        num_positions=tokens,
        temperature=1.0,
        recompute=KEEP_ALL,
        loss_config=AlgorithmConfig(beta=0.0),
        max_tokens=tokens,
        max_grad_norm=1.0,
        adamw=AdamWSettings(0.9, 0.95, 1e-8, 0.0),
    )
    policy = Policy(config, layout, backend, settings)
    for pool in backend.live_pools:
        pool.load()
    fill_random(policy.masters, SEED, DEVIATION)
    policy.masters_changed()
    return policy


def planned_bytes(policy: Any, tokens: int) -> int:
    from mindgrpo.models.shard import LOGITS_BYTES
    from mindgrpo.plan.activations import Block, ChunkLayers, Graphs, update_bytes

    shard, shape = policy.shard, policy.settings.shape
    block = Block(MODEL["hidden_size"], MODEL["intermediate_size"], shard.heads())
    kind: Any = "native" if policy.backend.kernels.ragged else "plain"
    sizes = kind, block, shard.local_vocab, shape.tokens, tokens, 4, LOGITS_BYTES
    graphs = Graphs(*sizes, summed=0, context_ranks=shape.context_ranks)
    by_layer = [0] * MODEL["num_hidden_layers"]
    table = 4 * shard.local_vocab * MODEL["hidden_size"]
    layers = ChunkLayers([frozenset()] * len(by_layer), by_layer, 0, table, table)
    return update_bytes(graphs, layers).total


def measure(given: argparse.Namespace) -> None:
    from mindgrpo.algorithm.packing import PackedRollout
    from mindgrpo.algorithm.sample import TrainBatch
    from mindgrpo.backend.connect import connect
    from mindgrpo.backend.targets import choose_target
    from mindgrpo.training.update import update

    backend = connect(choose_target("CPU", given.backend), dict(os.environ))
    activations.own_block()
    rollout, policy = rollout_of(given.row, given.tokens), policy_of(backend, given.tokens)
    packed, touched, seconds = PackedRollout(rollout), dict[str, int](), []
    policy.accumulate = activations.measured(policy.accumulate, touched, "update")
    advantages = np.linspace(0.5, 1.0, len(rollout)).astype(np.float32)
    batch = TrainBatch(rollout, advantages)
    gradients: dict[str, np.ndarray] = {}

    def keep(report: Any) -> None:
        with policy.gradients.on_host() as host:
            gradients.update({name: np.array(own) for name, own in host.hf_views.items()})

    for _ in range(given.updates):
        backend.world.barrier()
        started = time.perf_counter()
        report = update(policy, batch, packed, range(len(rollout)), 0.0, keep)
        seconds.append(time.perf_counter() - started)
    most = max(backend.world.gather_objects(touched["update"]))
    if backend.rank == 0:
        np.savez(given.gradients, **gradients)
        launching.give_figures(
            {
                "loss": report.loss,
                "grad_norm": report.grad_norm,
                "logps": [zlib.crc32(report.logps[i].tobytes()) for i in sorted(report.logps)],
                "bytes": most,
                "planned": planned_bytes(policy, given.tokens),
                "seconds": statistics.median(seconds[1:]),
            }
        )
    backend.close()


def difference(one: Path, other: Path) -> float:
    """The largest, as a share of a tensor's largest element."""
    with np.load(one) as ours, np.load(other) as expected:
        return max(
            float(np.abs(ours[name] - expected[name]).max() / np.abs(expected[name]).max())
            for name in expected
        )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16384, help="of the row")
    parser.add_argument("--ranks", type=launching.degrees, default=(1, 2, 4))
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--backend", default="shared_memory", help="or device")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    given = options()
    if launching.is_rank():
        measure(given)
        return
    cases = []
    with tempfile.TemporaryDirectory(prefix="mindgrpo-bench-") as folder:
        for row in ROWS:
            found: list[dict[str, Any]] = []
            for ranks in given.ranks:
                kept = Path(folder) / f"{row}_{ranks}.npz"
                words = ["--tokens", str(given.tokens), "--updates", str(given.updates)]
                words += ["--backend", given.backend, "--row", row, "--gradients", str(kept)]
                figures = launching.run_on_ranks(__file__, words, ranks)
                first = Path(folder) / f"{row}_{given.ranks[0]}.npz"
                figures["gradients_differ"] = difference(kept, first)
                same = figures.pop("logps")
                figures["same_log_probs"] = same == (found[0]["logps"] if found else same)
                found.append({"logps": same, **figures})
                cases.append({"row": row, "ranks": ranks, **figures})
    print(json.dumps({"bench": "context_parallel", "tokens": given.tokens, "cases": cases}))


if __name__ == "__main__":
    main()
