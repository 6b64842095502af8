"""Compares one real step of the bundled example with the figures of first_step.json, within tolerances by dtype.

A layout changes no result, so one set of figures, of a float32 run on processors, is for any number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.config import load_config
from mindgrpo.doctor.jobs import CheckLine, Starts, fails, ok
from mindgrpo.launch.plan import PACKAGE_FOLDER
from mindgrpo.monitor.metrics import read_metrics

ROOT = PACKAGE_FOLDER.parent
EXAMPLE = ROOT / "examples" / "grpo" / "tiny_arithmetic" / "grpo_config.yaml"
COMMITTED = Path(__file__).with_name("first_step.json")
NUM_TOKENS = 4
OTHERS = "share of other starts"
# By number of ranks, as quickstart.sh has them: (data, model, stage) of the trainer, (data, model) of the generator.
LAYOUTS = {
    1: ((1, 1, 1), (1, 1)),
    2: ((1, 2, 1), (1, 2)),
    4: ((1, 2, 2), (2, 2)),
    8: ((1, 4, 2), (2, 4)),
}
TWO_STAGES = ((1, 1, 2), (2, 1))
REMEDY = "see the rungs below this one, and send the archive: the device computes something else than processors do"

# How far a figure may be off in float32, where sums are in another order, and in 16 bits, where a token in some hundred
# is another one, and what follows it: (absolute, relative to what is committed) for each.
ALLOWED = {
    "loss": ((1e-5, 0.0), (2e-2, 0.0)),
    "grad_norm": ((1e-5, 1e-3), (0.0, 0.2)),
    "entropy": ((1e-5, 1e-3), (0.0, 0.2)),
    "reward/mean": ((1e-6, 0.0), (0.3, 0.0)),
    "logprob_gap/mean": ((1e-5, 0.0), (5e-2, 0.0)),
    OTHERS: ((0.0, 0.0), (0.1, 0.0)),
}


def words(rung: str, num_ranks: int, device: str, output: Path) -> list[str]:
    """Returns the example's keys for one step on `num_ranks` ranks of `device`, as many as LAYOUTS has."""
    train, infer = TWO_STAGES if rung == "pp2" else LAYOUTS.get(num_ranks, LAYOUTS[1])
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


def step_lines(keys: Sequence[str], starts: Starts) -> Iterator[CheckLine]:
    """Runs the step on this rank, in the repository's folder."""
    from mindgrpo.trainer import GRPOTrainer

    check = "first step of the example"
    starts(check)
    started = time.monotonic()
    GRPOTrainer(load_config(EXAMPLE, keys), name="doctor").train()
    yield ok(check, f"done, {time.monotonic() - started:.0f} s with compilation")


def read_step(run: Path) -> dict[str, Any]:
    """Reads the step's figures as first_step.json has them. Raises OSError or ValueError where the run left none."""
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no row")
    text = (run / "completions.jsonl").read_text(encoding="utf-8")
    tokens = [json.loads(line)["token_ids"][:NUM_TOKENS] for line in text.splitlines()]
    starts = [" ".join(map(str, own)) for own in tokens]
    return {**{name: rows[0][name] for name in ALLOWED if name != OTHERS}, "first_tokens": starts}


def compared_run(run: Path, dtype: Dtype) -> list[CheckLine]:
    """Compares the figures of a run with the committed ones; the first line holds them."""
    step = read_step(run)
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    return [ok("first step's figures", f"of {run.name}", **step), *compared(step, committed, dtype)]


def compared(step: dict[str, Any], committed: dict[str, Any], dtype: Dtype) -> list[CheckLine]:
    """Compares the step's figures and how completions start with the committed ones, in a line each."""
    pairs = list(zip_longest(step["first_tokens"], committed["first_tokens"]))
    step = step | {OTHERS: sum(own != wanted for own, wanted in pairs) / len(pairs)}
    lines = []
    for name, limits in ALLOWED.items():
        absolute, relative = limits[dtype != "float32"]
        value, wanted = step[name], committed.get(name, 0.0)
        far = max(absolute, relative * abs(wanted))
        seen = f"{value:.7g}, committed {wanted:.7g}, allowed {far:.1g} off ({dtype})"
        good = math.isfinite(value) and abs(value - wanted) <= far
        check = f"first step's {name}"
        lines.append(ok(check, seen) if good else fails(check, seen, REMEDY))
    return lines
