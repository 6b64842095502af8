"""Trains an initial model from nothing on worked sums with `mindgrpo sft`: the shape is a config.json's.

    python warm_start.py                                          # about 8 minutes on 2 cores; writes model/
    python warm_start.py --config ../tiny_moe/model/config.json   # writes there

First mostly careful work, so that the careful path is right when it is taken; at the end careless answers take
their share, so that a sampled answer is right about half the time and GRPO has something to teach. Held-out
numbers are never seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from make_data import Problem, careful, guessed, make_splits, sample_problem, unformatted  # noqa: E402
from supervised import ROWS_A_STEP, Stage, in_two_stages, warm_start  # noqa: E402

# (careful, unformatted, guessed): while learning to add, and at the end.
LEARNING, FINAL = (0.75, 0.25, 0.0), (0.36, 0.12, 0.52)
FINAL_SHARE_OF_STEPS = 0.2


def stage(
    steps: int, shares: tuple[float, ...], rng: random.Random, keep_out: set[tuple[int, ...]]
) -> Stage:
    """Draws as many rows as the steps read."""
    rows = []
    for _ in range(steps * ROWS_A_STEP):
        problem: Problem = sample_problem(rng, keep_out)
        style = rng.choices((careful, unformatted, guessed), shares)[0]
        rows.append({"question": problem.question, "answer": style(problem, rng)})
    return Stage(rows, steps)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example's warm start.")
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", type=Path, default=HERE / "model" / "config.json")
    parser.add_argument("--output_dir", type=Path, help="default: the folder of --config")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    _, heldout = make_splits()
    keep_out = {problem.key for problem in heldout}
    learning, last = in_two_stages(arguments.steps, FINAL_SHARE_OF_STEPS)
    stages = [stage(learning, LEARNING, rng, keep_out), stage(last, FINAL, rng, keep_out)]
    model, output = json.loads(arguments.config.read_text()), arguments.output_dir
    warm_start(
        model,
        HERE / "model",
        stages,
        arguments.lr,
        arguments.seed,
        output or arguments.config.parent,
    )


if __name__ == "__main__":
    main()
