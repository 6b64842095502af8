"""What the algorithms of docs/algorithms.md make of the bundled example: one JSON line a variant, and their curves.

    python scripts/bench/learning.py [--only NAME,...] [--output DIR] [--picture docs/learning.png]

Each variant is the quickstart with other keys (VARIANTS), on 8 ranks, evaluated every 4 steps. Does not prove that
one algorithm is better than another: one seed, one small task, keys that were tried once or twice.
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

from safetensors import safe_open

from mindgrpo.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EVERY = 4
VARIANTS: dict[str, dict[str, str]] = {
    "grpo": {},
    "dapo": {
        "rl_config.loss_type": "dapo",
        "rl_config.epsilon_high": "0.28",
        "rl_config.beta": "0",
        "rl_config.dynamic_sampling": "true",
        "rl_config.updates_per_rollout": "2",
        "reward_config.verifier_function": "[accuracy_reward, format_reward, "
        '"soft_overlong_punishment(soft_punish_cache=10)"]',
        "reward_config.verifier_weight": "[1.0, 1.0, 1.0]",
    },
    "gspo": {
        "rl_config.importance_sampling_level": "sequence",
        "rl_config.epsilon_low": "3e-4",
        "rl_config.epsilon_high": "4e-4",
        "rl_config.beta": "0",
        "rl_config.updates_per_rollout": "2",
    },
    "lora": {
        "actor_config.lora.rank": "4",
        "actor_config.lora.alpha": "8",
        "actor_config.lr_schedule.lr": "3e-3",
        "actor_config.lr_schedule.min_lr": "3e-4",
    },
}
COLOURS = ("#2563eb", "#059669", "#d97706", "#7c3aed")


def train(name: str, folder: Path) -> dict[str, Any]:
    keys = {"rl_config.eval_steps": str(EVERY), "output_dir": str(folder)} | VARIANTS[name]
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    own = Path(sys.executable).parent
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), *words],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{own}:{os.environ['PATH']}"},
        stdout=sys.stderr,
    )
    if ended.returncode:
        sys.exit(ended.returncode)
    summary = json.loads((folder / "summary.json").read_text())
    figures: dict[str, Any] = {"bench": "learning", "variant": name}
    for when in ("before", "after"):
        figures |= {f"{key}/{when}": value for key, value in summary[f"eval_{when}"].items()}
    adapter = folder / "adapter" / "adapter_model.safetensors"
    if adapter.is_file():
        base = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "model" / "model.safetensors"
        figures["trained_share"] = num_elements(adapter) / num_elements(base)
    return figures | {"seconds": summary["seconds"]}


def num_elements(path: Path) -> int:
    with safe_open(path, "numpy") as file:
        return sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118


def held_out(folder: Path) -> list[tuple[int, float]]:
    """(step, accuracy), from before the first step on."""
    summary = json.loads((folder / "summary.json").read_text())
    key = "eval/accuracy_reward/mean"
    points = [
        (row["step"], row[key]) for row in read_metrics(folder / "metrics.jsonl") if key in row
    ]
    return [(0, summary["eval_before"]["accuracy_reward"]), *points]


def draw(folders: dict[str, Path], picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, folder), colour in zip(folders.items(), COLOURS, strict=False):
        steps, values = zip(*held_out(folder), strict=True)
        axes.plot(steps, values, marker="o", markersize=3, color=colour, label=name)
    axes.axhline(0.9, color="#9ca3af", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy (200 sums)")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    output = given.output or Path(tempfile.mkdtemp(prefix="mindgrpo-learning-"))
    names = given.only.split(",")
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        parser.error(f"--only {unknown[0]} is none of {', '.join(VARIANTS)}")
    folders = {name: output / name for name in names}
    for name, folder in folders.items():
        print(json.dumps(train(name, folder)), flush=True)
    if given.picture:
        draw(folders, given.picture)


if __name__ == "__main__":
    main()
