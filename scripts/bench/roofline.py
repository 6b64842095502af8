"""The estimates of `plan` against measured steps of this machine, and before and after changes of the graphs.

roofline.py --work W.json [--ranks N --train dp,mp,pp --infer dp,mp] runs step.py and prints for each phase the
seconds estimated and measured, and the error. The rates of products and of memory are measured just before and after,
as other programs on the machine take their part of them. roofline.py --config X [overrides] prints the estimate with
the counts of EARLIER graphs and with today's, without a device. One JSON line each. Refuses to fit constants to what it
measures.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import launching
import numpy as np
from work import Work, read_work

from mindgrpo.cli.plan import shapes_of
from mindgrpo.config import Config, config_with, load_config
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.seconds import Roofline, StepSeconds, speeds_of
from mindgrpo.plan.work import FUSED, GraphCounts, Launches

# What the graphs launched and repeated in an earlier state, counted in the same way: rows all of seq_length, 978
# kernels a token of 28 layers with slow operations, float32 sums, three forward passes on stages before the last,
# weights sent in buckets of 16 MiB and checked with slow operations.
EARLIER = replace(
    FUSED,
    decode=Launches(28, 194),
    prompt=Launches(30),
    forward=Launches(26, 29),
    first_back=Launches(86, 37),
    last=Launches(90, 123),
    optimizer=Launches(29, 13),
    hands_inputs_on=False,
    float32_sums=True,
    whole_mask=True,
    is_causal=False,
    whole_cache=True,
    part_caches=False,
    fits_rows=False,
    whole_prompts=True,
    tokens_a_graph=4,
    slow_a_logit=7.0,
    decode_waits=1.0,
    optimizer_bytes=66.0,
    optimizer_calls=500.0,
    sync_calls=10.4,
    sync_bytes=40.0,
    checked_calls=0.0,
    checked_bytes=20.0,
    slow_checks=1.0,
)
# Of measured rates: a side of a product's matrices, and the bytes that each core copies.
SIDE, COPIED = 1024, 64 << 20
# A step's update in metrics has what the plan says apart.
TOGETHER = {"optimizer": "update", "host": "update"}


def options() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--config", type=Path, help="estimate only; other words override its keys")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--train", type=launching.degrees, help="dp,mp,pp (default N,1,1)")
    parser.add_argument("--infer", type=launching.degrees, help="dp,mp (default N,1)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    given, words = parser.parse_known_args()
    if (given.work is None) == (given.config is None) or (words and given.config is None):
        parser.error("give --work W.json, or --config X with overrides of its keys")
    given.train = given.train or (given.ranks, 1, 1)
    given.infer = given.infer or (given.ranks, 1)
    return given, words


def plan_of_work(work: Work, given: argparse.Namespace) -> RunPlan:
    """The plan of the run that step.py makes, with the lengths of its samples."""
    import assembly

    rows = assembly.Rows.of(work, given.train[0])
    config = assembly.configuration(work, given.train, given.infer, rows)
    lengths = {"prompt_tokens": work.prompt_tokens, "completion_tokens": work.new_tokens}
    values = {f"context.roofline.{name}": value for name, value in lengths.items()}
    known: Config = config_with(config, values).config
    return plan_run(known, assembly.model_of(work), given.ranks)


def seconds_of(step: StepSeconds) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for phase in step.phases:
        name = TOGETHER.get(phase.phase, phase.phase)
        seconds[name] = seconds.get(name, 0.0) + phase.seconds
    return seconds


def compared(given: argparse.Namespace) -> dict[str, Any]:
    work = read_work(given.work)
    plan = plan_of_work(work, given)
    before = measured_rates()
    degrees = (",".join(map(str, axes)) for axes in (given.train, given.infer))
    train, infer = degrees
    words = ["--work", str(given.work), "--ranks", str(given.ranks), "--steps", str(given.steps)]
    words += ["--train", train, "--infer", infer]
    measured = launching.run_on_ranks(str(launching.HERE / "step.py"), words, given.ranks)
    after = measured_rates()
    rates = {key: (value + after[key]) / 2 for key, value in before.items()}
    speeds = replace(
        speeds_of(plan.config),
        float32_tflops=rates["float32_tflops"],
        memory_GB_per_s=rates["memory_GB_per_s"],
    )
    estimated = Roofline(plan, speeds=speeds).step()
    phases = {
        name: errors(seconds, measured["phases"].get(name, 0.0))
        for name, seconds in seconds_of(estimated).items()
    }
    return {
        "bench": "roofline",
        "model": given.work.stem,
        "ranks": given.ranks,
        "rates": rates,
        "phases": phases,
        "step": errors(estimated.total, measured["median_step_s"]),
        "compile": errors(estimated.compile, measured["compile_s"] - measured["median_step_s"]),
    }


def measured_rates(seconds: float = 1.0) -> dict[str, float]:
    """The machine's rates at this moment: a float32 product by all cores, and a copy that each core makes."""
    cores = os.cpu_count() or 1
    a, b = (np.ones((SIDE, SIDE), np.float32) for _ in range(2))
    flops = 2 * SIDE**3 * rate_of(lambda: a @ b, seconds)
    sources = np.ones((cores, COPIED // 4), np.float32)
    targets = np.empty_like(sources)

    def copy() -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(np.copyto, targets, sources))

    # Read and written.
    copied = 2 * sources.nbytes * rate_of(copy, seconds)
    return {"float32_tflops": flops / 1e12, "memory_GB_per_s": copied / 1e9}


def rate_of(call: Callable[[], object], seconds: float) -> float:
    """Calls a second."""
    call()
    started, number = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds:
        call()
        number += 1
    return number / passed


def errors(estimated: float, measured: float) -> dict[str, float | None]:
    share = estimated / measured - 1 if measured else None
    return {"estimated": estimated, "measured": measured, "error": share}


def estimates(config: Path, words: list[str]) -> dict[str, Any]:
    loaded = load_config(config, words)
    plan = plan_run(loaded.config, shapes_of(loaded.config)[0], None)
    by_state = {"earlier": EARLIER, "today": None}
    return {"bench": "roofline", "config": str(config), "train": str(plan.train.mesh)} | {
        name: estimate(plan, counts) for name, counts in by_state.items()
    }


def estimate(plan: RunPlan, counts: GraphCounts | None) -> dict[str, Any]:
    step = Roofline(plan, counts).step()
    return {
        "step": step.total,
        "limit": step.limit,
        "compile": step.compile,
        "phases": {
            phase.phase: {
                "seconds": phase.seconds,
                "limit": phase.limit,
                "by": {kind: seconds for kind, seconds in phase.by.items() if seconds},
                "counts": phase.work.counts,
            }
            for phase in step.phases
        },
    }


def main() -> None:
    given, words = options()
    figures = estimates(given.config, words) if given.config is not None else compared(given)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
