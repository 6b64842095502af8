"""The estimates of `plan` against measured steps of this machine.

roofline.py --work W.json [--ranks N --train dp,tp,pp --infer dp,tp] runs step.py and prints, as one JSON line, for each
phase the seconds estimated and measured, and the error. The rates of products and of memory are measured just before
and after, as other programs on the machine take their part of them. Refuses to fit constants to what it measures.
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

from mindgrpo.config import Config, config_with
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.plan.seconds import Roofline, StepSeconds, speeds_of

# Of measured rates: a side of a product's matrices, and the bytes that each core copies.
SIDE, COPIED = 1024, 64 << 20
# A step's update in metrics has what the plan says apart.
TOGETHER = {"optimizer": "update"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--train", type=launching.degrees, help="dp,tp,pp (default N,1,1)")
    parser.add_argument("--infer", type=launching.degrees, help="dp,tp (default N,1)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps")
    given = parser.parse_args()
    given.train = given.train or (given.ranks, 1, 1)
    given.infer = given.infer or (given.ranks, 1)
    return given


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


def main() -> None:
    print(json.dumps(compared(options())))


if __name__ == "__main__":
    main()
