"""What the algorithms of docs/algorithms.md make of the bundled example: one JSON line a variant, and their curves.

    python scripts/bench/learning.py [--only NAME,...] [--ranks 8] [--output DIR] [--picture docs/learning.png]
    python scripts/bench/learning.py --table [--ranks 1]

Each variant is the quickstart with other keys (VARIANTS), evaluated every 4 steps: those of SHOWN, or with --table of
TABLE. Does not prove that one algorithm is better than another: one seed, one small task, keys that were tried once or
twice.
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

from mindgrpo.algorithm.estimators import ESTIMATORS
from mindgrpo.monitor.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
EVERY = 4
RECIPES = {path.stem: path for path in sorted((ROOT / "examples" / "recipes").glob("*.yaml"))}
# Those of the picture.
SHOWN: dict[str, dict[str, str]] = {
    "grpo": {},
    "dapo": {
        "config": str(RECIPES["dapo"]),
        "rl_config.updates_per_rollout": "2",
        "reward_config.verifier_function": "[accuracy_reward, format_reward, "
        '"soft_overlong_punishment(soft_punish_cache=10)"]',
        "reward_config.verifier_weight": "[1.0, 1.0, 1.0]",
    },
    "gspo": {"config": str(RECIPES["gspo"]), "rl_config.updates_per_rollout": "2"},
    "lora": {
        "actor_config.lora.rank": "4",
        "actor_config.lora.alpha": "8",
        "actor_config.lr_schedule.lr": "3e-3",
        "actor_config.lr_schedule.min_lr": "3e-4",
    },
}


def keyed(loss: str = "dapo", **keys: str) -> dict[str, str]:
    return {f"rl_config.{key}": value for key, value in {"loss_type": loss, **keys}.items()}


def of_loss(loss: str = "dapo", **keys: str) -> dict[str, str]:
    """Without KL, and with two updates a step, so that ratios are not all 1."""
    return keyed(loss, beta="0", updates_per_rollout="2") | keyed(loss, **keys)


LOSSES = ("grpo", "bnpo", "dapo", "cispo", "sapo", "gmpo", "vespo", "gpg", "clip_cov", "kl_cov")
UNSCALED = ("dr_grpo", "dppo_tv", "dppo_kl")
# Those of the table of one rank, where all but what a name says is alike.
TABLE = {
    **{f"recipe {name}": {"config": str(path)} for name, path in RECIPES.items()},
    **{f"loss {name}": of_loss(name) for name in LOSSES},
    **{f"loss {name}": of_loss(name, scale_rewards="none") for name in UNSCALED},
    "loss luspo": of_loss("luspo", importance_sampling_level="sequence"),
    "loss grpo by sequence": of_loss(
        "grpo", importance_sampling_level="sequence", epsilon_low="3e-4", epsilon_high="4e-4"
    ),
    **{f"advantage {name}": keyed(advantage_estimator=name) for name in ESTIMATORS},
    "off-policy mask": of_loss(off_policy_mask_threshold="1e-3", old_logps="generator"),
    "top entropy": of_loss(top_entropy_quantile="0.2"),
    "truncated masked": of_loss(mask_truncated_completions="true"),
    "equal groups masked": of_loss(mask_equal_groups="true"),
    "equal groups replaced": of_loss(dynamic_sampling="true"),
    "dual clip": of_loss(dual_clip="3"),
    "two-sided clip": of_loss(delta="2"),
    "unbiased KL": of_loss(beta="0.01", unbiased_kl="true"),
}
VARIANTS = SHOWN | TABLE
COLOURS = ("#2563eb", "#059669", "#d97706", "#7c3aed")


def train(name: str, folder: Path, ranks: str) -> dict[str, Any]:
    keys = {"rl_config.eval_steps": str(EVERY), "output_dir": str(folder)} | VARIANTS[name]
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    own = Path(sys.executable).parent
    ended = subprocess.run(
        ["bash", str(ROOT / "scripts" / "quickstart.sh"), "--ranks", ranks, *words],
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
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--only")
    parser.add_argument("--ranks", default="8")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    output = given.output or Path(tempfile.mkdtemp(prefix="mindgrpo-learning-"))
    names = given.only.split(",") if given.only else list(TABLE if given.table else SHOWN)
    unknown = sorted(set(names) - set(VARIANTS))
    if unknown:
        parser.error(f"--only {unknown[0]} is none of {', '.join(VARIANTS)}")
    folders = {name: output / name.replace(" ", "_") for name in names}
    for name, folder in folders.items():
        print(json.dumps(train(name, folder, given.ranks)), flush=True)
    if given.picture:
        draw(folders, given.picture)


if __name__ == "__main__":
    main()
