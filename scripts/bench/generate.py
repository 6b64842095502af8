"""Tokens a second of the embedded generator: temperature, top-k, top-p and log-probs on, one process.

generate.py --work W.json | --model DIR [--ragged] [--temperature 1] prints one JSON line. By default 32 random prompts
of 32 tokens, one completion of 64 each; `--ragged` gives every completion a length of its own. Refuses to count the
first run, which compiles: it is `compile_s`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time

import launching
from generation import Generation, add_options, generation_of


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--float32_matmul_precision", default="auto")
    parser.add_argument("--compute_dtype", default="float32")
    parser.add_argument("--slots", type=int, help="samples in flight; default all")
    return parser.parse_args()


def measure(given: argparse.Namespace, task: Generation) -> None:
    import assembly

    from mindgrpo.algorithm.sample import Request
    from mindgrpo.rollout.engine import SeedKey
    from mindgrpo.rollout.noise import ROLLOUT

    backend = assembly.join_ranks(given.float32_matmul_precision, given.compute_dtype)
    assert backend is not None, "one process has no scheduler"
    # beta 0 and a row a sample: the other roles are there, but nothing of them is compiled or run.
    rows = assembly.Rows(1, 1)
    config = assembly.configuration(
        task.work,
        (1, 1, 1),
        (1, 1),
        rows,
        given.slots,
        beta=0.0,
        directory=given.model,
        dtype=given.compute_dtype,
    )
    plan = assembly.plan_of(config, assembly.model_of(task.work, given.model), 1)
    sampling = assembly.sampling_of(plan, **task.drawing)
    roles = assembly.roles_of(plan, backend, sampling)
    roles.refresh_engine()
    version = roles.enter_rollout()

    def run(number: int) -> float:
        requests = [
            Request(ids, (i,), max_tokens=(task.lengths[i],))
            for i, ids in enumerate(task.work.prompt_ids(number))
        ]
        started = time.perf_counter()
        key = SeedKey(0, ROLLOUT, number)
        done = roles.engine.generate(requests, sampling, key, version)
        seconds = time.perf_counter() - started
        task.check([len(c.tokens) for c in done])
        assert all(len(c.logps) == len(c.tokens) for c in done)
        return seconds

    first = run(0)
    compiles = len(backend.compile_log.entries)
    seconds = [run(number) for number in range(1, given.repeats + 1)]
    late = len(backend.compile_log.entries) - compiles
    launching.give_figures(
        {
            "bench": "generate",
            "compute_dtype": backend.compute_dtype,
            "float32_matmul_precision": backend.matmul_precision,
            "tokens_per_s": task.tokens / statistics.median(seconds),
            "compile_s": first,
            "compiles": compiles,
            "late_compiles": late,
            "usage": dataclasses.asdict(roles.engine.stats),
            "seconds": seconds,
            **task.described(),
        }
    )
    backend.close()


def main() -> None:
    given = options()
    task = generation_of(given)
    if launching.is_rank():
        measure(given, task)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], 1)))


if __name__ == "__main__":
    main()
