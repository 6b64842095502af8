"""One real step of the bundled example against the committed figures of first_step.json, within tolerances by dtype.

A layout changes no result, so one set of figures is for any number of ranks. first_step.json holds what the report of
a float32 run on processors has as the figures of this section.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindgrpo.backend.dtypes import Dtype
from mindgrpo.config import load_config
from mindgrpo.doctor.records import CheckLine, fails, ok
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


@dataclass(frozen=True)
class Allowed:
    """How far a figure may be off: by `absolute`, or by `relative` of what is committed."""

    absolute: float
    relative: float = 0.0


# In float32 sums are in another order. In 16 bits a token in some hundred is another one, and what follows it.
_EXACT = {
    "loss": Allowed(1e-5),
    "grad_norm": Allowed(1e-5, 1e-3),
    "entropy": Allowed(1e-5, 1e-3),
    "reward/mean": Allowed(1e-6),
    "logprob_gap/mean": Allowed(1e-5),
    "first_tokens": Allowed(0.0),
}
_NARROW = {
    "loss": Allowed(2e-2),
    "grad_norm": Allowed(0.0, 0.2),
    "entropy": Allowed(0.0, 0.2),
    "reward/mean": Allowed(0.3),
    "logprob_gap/mean": Allowed(5e-2),
    "first_tokens": Allowed(0.1),
}
FIGURES = tuple(name for name in _EXACT if name != "first_tokens")


def allowed(dtype: Dtype) -> dict[str, Allowed]:
    return _EXACT if dtype == "float32" else _NARROW


def words(num_ranks: int, device: str, output: Path) -> list[str]:
    """The example's keys for one step on `num_ranks` ranks of `device`."""
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
    """On every rank, in the repository's folder."""
    from mindgrpo.trainer import GRPOTrainer

    GRPOTrainer(load_config(EXAMPLE, keys), name="doctor").train()


def read_step(run: Path) -> dict[str, Any]:
    """The step's figures as first_step.json has them. Raises OSError or ValueError where the run left none."""
    rows = read_metrics(run / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{run}/metrics.jsonl has no row")
    text = (run / "completions.jsonl").read_text(encoding="utf-8")
    tokens = [json.loads(line)["token_ids"][:NUM_TOKENS] for line in text.splitlines()]
    starts = [" ".join(map(str, own)) for own in tokens]
    return {**{name: rows[0][name] for name in FIGURES}, "first_tokens": starts}


def compared(step: dict[str, Any], committed: dict[str, Any], dtype: Dtype) -> list[CheckLine]:
    """A line a figure."""
    limits = allowed(dtype)
    lines = []
    for name in FIGURES:
        value, wanted, limit = step[name], committed[name], limits[name]
        far = max(limit.absolute, limit.relative * abs(wanted))
        seen = f"{value:.7g}, committed {wanted:.7g}, allowed {far:.1g} off ({dtype})"
        good = math.isfinite(value) and abs(value - wanted) <= far
        check = f"first step's {name}"
        lines.append(ok(check, seen) if good else fails(check, seen, REMEDY))
    pairs = list(zip(step["first_tokens"], committed["first_tokens"], strict=False))
    others = sum(own != wanted for own, wanted in pairs)
    others += abs(len(step["first_tokens"]) - len(committed["first_tokens"]))
    seen = f"{others} of {len(committed['first_tokens'])} completions start with other tokens"
    good = others <= limits["first_tokens"].absolute * len(committed["first_tokens"])
    seen += f", allowed {limits['first_tokens'].absolute:.0%} ({dtype})"
    check = f"first step's first {NUM_TOKENS} tokens"
    return [*lines, ok(check, seen) if good else fails(check, seen, REMEDY)]
