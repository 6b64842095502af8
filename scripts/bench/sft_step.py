"""Seconds of steps of supervised training on the product's own path, packed.

sft_step.py --work W.json [--rows 200] [--rows_a_step 20] [--steps 7] prints one JSON line. One process; weights and
rows are random, answers of ragged lengths. Refuses to count the first two steps, which compile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import assembly
import launching
import numpy as np
from work import Work, answered_rows, read_work

from mindgrpo.config import config_with
from mindgrpo.grpo.build import make_trained_roles
from mindgrpo.grpo.state import State
from mindgrpo.grpo.supervised import SupervisedStepper
from mindgrpo.plan.run_plan import plan_run

UNTIMED = 2


class RandomRows:
    """Gives each step the next rows, over and over."""

    def __init__(self, work: Work, count: int, rows_a_step: int) -> None:
        end = np.array([work.model["vocab_size"] - 1], np.int32)
        # Ids that are learnt stand as their complement.
        self._ids = [
            np.concatenate([prompt, ~answer, ~end]) for prompt, answer in answered_rows(work, count)
        ]
        self._rows_a_step = rows_a_step

    def begin_step(self, step: int) -> list[Any]:
        first = step * self._rows_a_step
        chosen = (self._ids[(first + i) % len(self._ids)] for i in range(self._rows_a_step))
        return [SimpleNamespace(ids=ids) for ids in chosen]


def measure(work: Work, given: argparse.Namespace) -> dict[str, Any]:
    backend = assembly.join_ranks(given.float32_matmul_precision)
    assert backend is not None
    rl = {"prompts_per_step": given.rows_a_step, "seq_length": given.row_tokens, "batch_size": 1}
    config = config_with({"rl_config": rl}, {}, is_supervised=True).config
    plan = replace(plan_run(config, assembly.model_of(work), 1), generates=False)
    roles = make_trained_roles(plan, backend, assembly.sampling_of(plan), random_weights=True)
    rows: Any = RandomRows(work, given.rows, given.rows_a_step)
    run = assembly.run_of(roles, rows, assembly.sampling_of(plan), 1e-6)
    stepper, state = SupervisedStepper(run), State()
    outcomes = [stepper.run(state) for _ in range(given.steps + UNTIMED)]
    seconds = [outcome.seconds["step"] for outcome in outcomes]
    timed = outcomes[UNTIMED:]
    return {
        "bench": "sft_step",
        "median_step_s": statistics.median(seconds[UNTIMED:]),
        "min_step_s": min(seconds[UNTIMED:]),
        "tokens_per_step": sum(int(o.batch.rollout.total_lengths.sum()) for o in timed)
        / len(timed),
        "padding_share": statistics.mean(outcome.reports[0].padding_share for outcome in timed),
        "loss": [outcome.reports[0].loss for outcome in outcomes],
        "grad_norm": [outcome.reports[0].grad_norm for outcome in outcomes],
        "compile_s": sum(seconds[:UNTIMED]),
        "late_compiles": outcomes[-1].late_compiles,
        "float32_matmul_precision": backend.matmul_precision,
        "steps_s": seconds[UNTIMED:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=launching.HERE / "work_smollm2.json")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rows_a_step", type=int, default=20)
    parser.add_argument("--row_tokens", type=int, default=704, help="longest packed row")
    parser.add_argument("--steps", type=int, default=7, help="timed steps")
    parser.add_argument("--float32_matmul_precision", default="auto")
    given = parser.parse_args()
    print(json.dumps(measure(read_work(given.work), given)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
