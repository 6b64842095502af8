"""Compares one real step of the bundled example with the figures of first_step.json, within tolerances by dtype.

A layout changes no result, so one set of figures is for any number of ranks. first_step.json holds what the report of
a float32 run on processors has as the figures of this section.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.config import load_config
from mindgrpo.doctor.jobs import CheckLine, fails, ok
from mindgrpo.launch.plan import PACKAGE_FOLDER
from mindgrpo.monitor.metrics import read_metrics

ROOT = PACKAGE_FOLDER.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
COMMITTED = Path(__file__).with_name("first_step.json")
NUM_TOKENS = 4
# By number of ranks, as quickstart.sh has them: (data, model, stage) of the trainer, (data, model) of the generator.
LAYOUTS = {
    1: ((1, 1, 1), (1, 1)),
    2: ((1, 2, 1), (1, 2)),
    4: ((1, 2, 2), (2, 2)),
    8: ((1, 4, 2), (2, 4)),
}
REMEDY = (
    "see the lines of kernels and communication; repeat with --ranks 1, and send the report: the device computes "
    "something else than the host's processors do"
)


# How far a figure may be off in float32, where sums are in another order, and in 16 bits, where a token in some hundred
# is another one, and what follows it: (absolute, relative to what is committed) for each.
ALLOWED = {
    "loss": ((1e-5, 0.0), (2e-2, 0.0)),
    "grad_norm": ((1e-5, 1e-3), (0.0, 0.2)),
    "entropy": ((1e-5, 1e-3), (0.0, 0.2)),
    "reward/mean": ((1e-6, 0.0), (0.3, 0.0)),
    "logprob_gap/mean": ((1e-5, 0.0), (5e-2, 0.0)),
}
# The share of completions that may start with other tokens.
OTHER_STARTS = (0.0, 0.1)


def words(num_ranks: int, device: str, output: Path) -> list[str]:
    """Returns the example's keys for one step on `num_ranks` ranks of `device`."""
    train, infer = LAYOUTS[num_ranks]
    layouts = {"actor_config": train, "ref_config": train, "generate_config": (*infer, 1)}
    keys: list[str] = []
    for section, degrees in layouts.items():
        axes = ("data_parallel", "model_parallel", "pipeline_stage")
        for axis, degree in zip(axes, degrees, strict=True):
            keys += [f"--{section}.parallel_config.{axis}", str(degree)]
    return [
        *keys,
        *("--context.device_target", device, "--context.backend", "device"),
        *("--rl_config.max_steps", "1", "--rl_config.eval_dataset_file", "null"),
        *("--output_dir", str(output)),
    ]


def train_one_step(keys: Sequence[str]) -> None:
    """Runs the step on this rank, in the repository's folder."""
    from mindgrpo.trainer import GRPOTrainer

    GRPOTrainer(load_config(EXAMPLE, keys), name="doctor").train()


def read_step(run: Path) -> dict[str, Any]:
    """Reads the step's figures as first_step.json has them. Raises OSError or ValueError where the run left none."""
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no row")
    text = (run / "completions.jsonl").read_text(encoding="utf-8")
    tokens = [json.loads(line)["token_ids"][:NUM_TOKENS] for line in text.splitlines()]
    starts = [" ".join(map(str, own)) for own in tokens]
    return {**{name: rows[0][name] for name in ALLOWED}, "first_tokens": starts}


def compared(step: dict[str, Any], committed: dict[str, Any], dtype: Dtype) -> list[CheckLine]:
    """Compares the step's figures and first tokens with the committed ones, in a line each."""
    narrow = dtype != "float32"
    lines = []
    for name, limits in ALLOWED.items():
        absolute, relative = limits[narrow]
        value, wanted = step[name], committed[name]
        far = max(absolute, relative * abs(wanted))
        seen = f"{value:.7g}, committed {wanted:.7g}, allowed {far:.1g} off ({dtype})"
        good = math.isfinite(value) and abs(value - wanted) <= far
        check = f"first step's {name}"
        lines.append(ok(check, seen) if good else fails(check, seen, REMEDY))
    pairs = zip_longest(step["first_tokens"], committed["first_tokens"])
    others, count = sum(own != wanted for own, wanted in pairs), len(committed["first_tokens"])
    share = OTHER_STARTS[narrow]
    seen = f"{others} of {count} completions start with other tokens, allowed {share:.0%} ({dtype})"
    check = f"first step's first {NUM_TOKENS} tokens"
    return [*lines, ok(check, seen) if others <= share * count else fails(check, seen, REMEDY)]
