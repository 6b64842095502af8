"""Seconds of a rollout with drafts against one without, by samples at a time, in one process.

drafts.py [--work W.json] [--samples 1,4,8,32] [--repeats 7] prints one JSON line. Groups of up to 8 samples of 32 + 64
tokens take turns: without drafts, with drafts of other completions (`wrong`: noise of another step) and with drafts of
the same (`right`: the step again, as its history has it). Figures are ratios of medians to the rollout without; with
--rows, seconds of a decode step by its rows instead, as a ratio to one row. Weights and prompts are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import assembly
import launching
import numpy as np
from work import read_work

from mindgrpo.algorithm.sample import Request
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.models.parameters import parameter_specs
from mindgrpo.parallel.mesh import Mesh
from mindgrpo.parallel.sharding import Layout
from mindgrpo.rollout.embedded.engine import EmbeddedEngine
from mindgrpo.rollout.embedded.kv_cache import KVCacheConfig
from mindgrpo.rollout.engine import RolloutStats, SeedKey
from mindgrpo.rollout.noise import ROLLOUT
from mindgrpo.weights.pretrained import fill_random

PROMPT, NEW, GROUP = 32, 64, 8
ROWS = (1, 2, 3, 4, 6, 8, 16, 32)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).with_name("work_smollm2.json"))
    parser.add_argument("--samples", default="1,4,8,32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--backend", help="context.backend")
    parser.add_argument("--draft_rows", default="auto", help="generate_config.draft_rows")
    return parser.parse_args()


class Rollouts:
    """One engine with drafts and one without, for `count` samples at a time."""

    def __init__(self, given: argparse.Namespace, backend: Backend, count: int) -> None:
        config = assembly.model_of(read_work(given.work))
        layout = Layout.of(Mesh(1, 1), parameter_specs(config))
        self.sampling = SamplingParams(max_tokens=NEW)
        rows = given.draft_rows if given.draft_rows == "auto" else int(given.draft_rows)
        group = min(count, GROUP)
        rng = np.random.default_rng(0)
        prompts = rng.integers(0, config.vocab_size, (count // group, PROMPT), dtype=np.int32)
        self.requests = [
            Request(prompt, tuple(range(i * group, (i + 1) * group)))
            for i, prompt in enumerate(prompts)
        ]
        self.engines = {}
        for name, drafts in (("off", 0), ("drafts", rows)):
            cache = KVCacheConfig(
                count, group, len(prompts), PROMPT, NEW, draft_rows=drafts, draft_history=1 << 20
            )
            engine = EmbeddedEngine(config, layout, backend, self.sampling, cache)
            engine.publish(partial(fill_random, engine.weights, 0, 0.02), 0)
            self.engines[name] = engine

    def run(self, name: str, step: int) -> tuple[float, RolloutStats]:
        engine, started = self.engines[name], time.perf_counter()
        engine.generate(self.requests, self.sampling, SeedKey(0, ROLLOUT, step), 0)
        return time.perf_counter() - started, engine.stats


def compare(given: argparse.Namespace, backend: Backend, count: int) -> dict[str, float]:
    rollouts = Rollouts(given, backend, count)
    seconds: dict[str, list[float]] = {"off": [], "wrong": [], "right": []}
    steps: dict[str, int] = {}
    for step in range(given.repeats + 1):
        for kind, name in (("off", "off"), ("wrong", "drafts"), ("right", "drafts")):
            spent, stats = rollouts.run(name, step)
            steps[kind] = stats.steps
            if step:  # the first compiles
                seconds[kind].append(spent)
    off = statistics.median(seconds["off"])
    ratios = {kind: statistics.median(seconds[kind]) / off for kind in ("wrong", "right")}
    return {"seconds": off, **ratios, **{f"{kind}_steps": n for kind, n in steps.items()}}


def time_rows(given: argparse.Namespace, backend: Backend) -> dict[str, float]:
    found = {}
    for count in ROWS:
        rollouts = Rollouts(given, backend, count) if count < GROUP or not count % GROUP else None
        assert rollouts is not None
        spent = [rollouts.run("off", step)[0] for step in range(given.repeats + 1)][1:]
        found[str(count)] = statistics.median(spent)
    return {rows: seconds / found["1"] for rows, seconds in found.items()}


def main() -> None:
    given = options()
    if not launching.is_rank():
        print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))
        return
    backend = assembly.join_ranks("auto", backend=given.backend)
    assert backend is not None, "one process has no scheduler"
    figures: dict[str, object] = {"bench": "drafts", "work": given.work.name}
    if given.rows:
        figures["row_ratios"] = time_rows(given, backend)
    else:
        counts = [int(count) for count in given.samples.split(",")]
        figures |= {str(count): compare(given, backend, count) for count in counts}
    launching.give_figures(figures)
    backend.close()


if __name__ == "__main__":
    main()
