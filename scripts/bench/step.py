"""Seconds of whole GRPO steps on the product's own path: reshard, rollout, score, reference, update.

step.py --work W.json [--ranks N --train dp,tp,pp --infer dp,tp] [--steps 7] prints one JSON line. Weights, prompts and
rewards are random, completions exactly as long as the work file says. Refuses to count the first step, which compiles:
it is `compile_s`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import launching
from work import Work, read_work, refuse

from mindgrpo.grpo.state import State


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=launching.HERE / "work.json")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--train", type=launching.degrees, help="dp,tp,pp (default N,1,1)")
    parser.add_argument("--infer", type=launching.degrees, help="dp,tp (default N,1)")
    parser.add_argument("--steps", type=int, default=7, help="timed steps")
    parser.add_argument("--float32_matmul_precision", default="auto")
    parser.add_argument("--compute_dtype", default="float32")
    parser.add_argument("--row_samples", type=int, help="samples a packed row")
    parser.add_argument("--micro_rows", type=int, help="rows a micro-batch")
    given = parser.parse_args()
    given.train = given.train or (given.ranks, 1, 1)
    given.infer = given.infer or (given.ranks, 1)
    if len(given.train) != 3 or len(given.infer) != 2 or given.steps < 1:
        refuse("--train takes dp,tp,pp, --infer takes dp,tp and --steps a number from 1 up.")
    return given


def measure(given: argparse.Namespace, work: Work) -> None:
    import assembly

    backend = assembly.join_ranks(given.float32_matmul_precision, given.compute_dtype)
    if backend is None:
        return
    rows = assembly.Rows.of(work, given.train[0])
    rows = assembly.Rows(given.row_samples or rows.samples, given.micro_rows or rows.count)
    config = assembly.configuration(work, given.train, given.infer, rows, dtype=given.compute_dtype)
    plan = assembly.plan_of(config, assembly.model_of(work), backend.world_size)
    stepper = assembly.stepper_of(assembly.roles_of(plan, backend), work)
    state = State()
    first = stepper.run(state)
    compiles = len(backend.compile_log.entries)
    outcomes = [stepper.run(state) for _ in range(given.steps)]
    late = len(backend.compile_log.entries) - compiles
    own = [outcome.seconds for outcome in outcomes]
    by_rank = backend.world.gather_objects(own)
    if backend.rank == 0:
        for outcome in outcomes:
            check_tokens(outcome.batch.rollout.completion_lengths.tolist(), work)
        rollout = outcomes[-1].batch.rollout
        launching.give_figures(
            figures(by_rank, first.seconds["step"], compiles, late)
            | {
                "tokens_per_step": int(rollout.total_lengths.sum()),
                "new_tokens_per_step": int(rollout.completion_lengths.sum()),
                "padding_share": outcomes[-1].reports[-1].padding_share,
                "grad_norm": outcomes[-1].reports[-1].grad_norm,
                "rows": [rows.samples, rows.count],
                "ranks": given.ranks,
                "compute_dtype": backend.compute_dtype,
                "float32_matmul_precision": backend.matmul_precision,
                "train": given.train,
                "infer": given.infer,
            }
        )
    backend.close()


def check_tokens(lengths: list[int], work: Work) -> None:
    if lengths != [work.new_tokens] * work.samples:
        raise RuntimeError(f"completions of {sorted(set(lengths))} tokens, not {work.new_tokens}")


def figures(
    by_rank: list[list[dict[str, float]]], first: float, compiles: int, late: int
) -> dict[str, Any]:
    """A step takes as long as its slowest rank; a phase is given for each rank, as they wait for one another."""
    steps = [max(rank[i]["step"] for rank in by_rank) for i in range(len(by_rank[0]))]
    phases = [
        {name: statistics.median(s[name] for s in rank) for name in rank[0] if name != "step"}
        for rank in by_rank
    ]
    return {
        "bench": "step",
        "median_step_s": statistics.median(steps),
        "min_step_s": min(steps),
        "compile_s": first,
        "compiles": compiles,
        "late_compiles": late,
        "phases": phases[0],
        "phases_by_rank": phases,
        "steps_s": steps,
    }


def main() -> None:
    given = options()
    work = read_work(given.work)
    if launching.is_rank():
        measure(given, work)
        return
    print(json.dumps(launching.run_on_ranks(__file__, sys.argv[1:], given.ranks)))


if __name__ == "__main__":
    main()
