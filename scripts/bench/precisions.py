"""Held-out accuracy in float32, `medium` and bfloat16, three seeds each: one JSON line a run, and one picture of all.

    python scripts/bench/precisions.py [--only tiny,moe,smollm2,calculator] [--modes highest,medium,bfloat16]
        [--seeds 1,2,3] [--steps N] [--output DIR] [--picture PNG]

`tiny` is the quickstart, the others are examples/grpo/tiny_moe, smollm2_sums and calculator, on one rank each. `--modes
auto` runs them as they stand, `partial` in float32 with partial rollouts (docs/partial_rollout.md). A run that is in
DIR already is not made again. Nine runs of `tiny` take some 5 minutes on two cores, those of `smollm2` 40.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from learning import ROOT, held_out

from mindgrpo.monitor.metrics import read_metrics

MODES: dict[str, tuple[str, ...]] = {
    "auto": (),
    "highest": ("--context.float32_matmul_precision", "highest"),
    "medium": ("--context.float32_matmul_precision", "medium"),
    "bfloat16": ("--context.compute_dtype", "bfloat16"),
    "partial": (
        *("--rl_config.partial_rollout", "true", "--rl_config.partial_rollout_chunk", "8"),
        *("--rl_config.importance_sampling_correction", "token_truncate"),
    ),
}
COLOURS = dict(zip(MODES, ("#2563eb", "#2563eb", "#d97706", "#059669", "#7c3aed"), strict=True))
COMPARED = "highest,medium,bfloat16"
# Command, steps, and steps between evaluations.
TASKS = {
    "tiny": ("scripts/quickstart.sh --ranks 1", 24, 4),
    "moe": ("scripts/quickstart.sh --example tiny_moe --ranks 1", 24, 4),
    "smollm2": ("examples/grpo/smollm2_sums/run.sh", 16, 8),
    "calculator": ("examples/grpo/calculator/run.sh", 60, 10),
}
# With which the figures in docs/numbers.md were measured; the example itself learns faster.
RECIPES: dict[str, dict[str, str]] = {
    "tiny": {},
    "smollm2": {
        "rl_config.prompts_per_step": "16",
        "rl_config.batch_size": "4",
        "actor_config.lr_schedule.lr_decay_style": "constant",
        "actor_config.lr_schedule.lr": "5e-6",
        "generate_config.sampling_config.temperature": "1.0",
    },
    "moe": {},
    "calculator": {},
}
TITLES = {
    "tiny": "bundled example",
    "moe": "tiny mixture of experts",
    "smollm2": "SmolLM2-135M, sums",
    "calculator": "products with a calculator",
}


def train(task: str, mode: str, seed: int, steps: int | None, folder: Path) -> dict[str, Any]:
    command, own_steps, every = TASKS[task]
    steps = steps or own_steps
    own_keys = {"max_steps": steps, "eval_steps": every, "seed": seed}
    keys = RECIPES[task] | {f"rl_config.{key}": str(value) for key, value in own_keys.items()}
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    if not (folder / "summary.json").exists():
        own = Path(sys.executable).parent
        ended = subprocess.run(
            ["bash", *command.split(), *words, *MODES[mode], "--output_dir", str(folder)],
            cwd=ROOT,
            env=os.environ | {"PATH": f"{own}:{os.environ['PATH']}"},
            stdout=sys.stderr,
        )
        if ended.returncode:
            sys.exit(ended.returncode)
    rows = read_metrics(folder / "metrics.jsonl")
    return {
        "bench": "precisions",
        "task": task,
        "mode": mode,
        "seed": seed,
        "seconds": round(json.loads((folder / "summary.json").read_text())["seconds"]),
        "steps_seconds": round(sum(row["time/step"] for row in rows)),
        "accuracy": [round(value, 3) for _, value in held_out(folder)],
        "gap_mean": max(row["logprob_gap/mean"] for row in rows),
        "gap_max": max(row["logprob_gap/max"] for row in rows),
    }


def draw(tasks: list[str], modes: list[str], seeds: list[int], output: Path, picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * max(len(tasks), 1.5), 3.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for mode in modes:
            for seed in seeds:
                steps, values = zip(*held_out(output / f"{task}_{mode}_{seed}"), strict=True)
                label = mode if seed == seeds[0] and len(modes) > 1 else None
                axes.plot(steps, values, marker="o", markersize=3, color=COLOURS[mode], label=label)
        axes.set_title(TITLES[task], loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        if len(modes) > 1:
            axes.legend(loc="lower right", frameon=False)
    figure.axes[0].set_ylabel("held-out accuracy")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="tiny,smollm2")
    parser.add_argument("--modes", default=COMPARED)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    output = given.output or Path(tempfile.mkdtemp(prefix="mindgrpo-precisions-"))
    tasks, modes = given.only.split(","), given.modes.split(",")
    seeds = [int(seed) for seed in given.seeds.split(",")]
    for flag, asked, known in (("--only", tasks, TASKS), ("--modes", modes, MODES)):
        unknown = sorted(set(asked) - set(known))
        if unknown:
            parser.error(f"{flag} {unknown[0]} is none of {', '.join(known)}")
    for task in tasks:
        for seed in seeds:
            for mode in modes:
                folder = output / f"{task}_{mode}_{seed}"
                print(json.dumps(train(task, mode, seed, given.steps, folder)), flush=True)
    if given.picture:
        draw(tasks, modes, seeds, output, given.picture)


if __name__ == "__main__":
    main()
