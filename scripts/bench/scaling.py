"""How a step's seconds grow with completion length, group size, layers and ranks; exponents fitted for each phase.

scaling.py [--work W.json] [--axes length,group,layers,ranks] [--steps 5] [--markdown FILE] runs step.py once a point,
one axis at a time from the work file's own numbers, and prints one JSON line. An exponent is the slope of log seconds
over log size: 1 is linear. Refuses to fit fewer than two points.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import launching
import numpy as np
from work import Work, read_work, refuse

# Layouts of the ranks axis: what a user of so many ranks would pick, with every kind of parallelism from 4 on.
LAYOUTS = {1: ("1,1,1", "1,1"), 2: ("1,2,1", "1,2"), 4: ("1,2,2", "2,2"), 8: ("1,4,2", "2,4")}
SIZES = {
    "length": (32, 64, 128, 256, 512, 1024),
    "group": (2, 4, 8, 16),
    "layers": (2, 4, 8, 16),
    "ranks": tuple(LAYOUTS),
}
HEADINGS = {
    "length": "completion length",
    "group": "samples a prompt",
    "layers": "layers",
    "ranks": "ranks",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=launching.HERE / "work.json")
    parser.add_argument("--prompts", type=int, help="instead of the work file's")
    parser.add_argument("--axes", default=",".join(SIZES))
    parser.add_argument("--largest", type=int, help="leave out larger sizes")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a point")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    given = parser.parse_args()
    given.axes = given.axes.split(",")
    wrong = [axis for axis in given.axes if axis not in SIZES]
    if wrong:
        refuse(f"--axes names '{wrong[0]}', but must be of {', '.join(SIZES)}.")
    return given


def point(work: Work, axis: str, size: int) -> tuple[Work, int]:
    """The work and the number of ranks of `size` on `axis`."""
    if axis == "length":
        return replace(work, new_tokens=size), 1
    if axis == "group":
        return replace(work, generations=size), 1
    if axis == "layers":
        return replace(work, model=work.model | {"num_hidden_layers": size}), 1
    return work, size


def measure(work: Work, ranks: int, steps: int) -> dict[str, Any]:
    train, infer = LAYOUTS[ranks]
    with tempfile.TemporaryDirectory(prefix="mindgrpo-bench-") as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(asdict(work)))
        words = ["--work", str(file), "--steps", str(steps)]
        words += ["--ranks", str(ranks), "--train", train, "--infer", infer]
        figures = launching.run_on_ranks(str(launching.HERE / "step.py"), words, ranks)
    return {"step": figures["median_step_s"], **figures["phases"]}


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def fit(points: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over all sizes, and over the last two, where what does not grow weighs least."""
    sizes = [p["size"] for p in points]
    phases = [name for name, value in points[0]["seconds"].items() if value >= 1e-3]
    seconds = {name: [p["seconds"][name] for p in points] for name in phases}
    return {
        "exponents": {name: exponent(sizes, seconds[name]) for name in phases},
        "last_exponents": {name: exponent(sizes[-2:], seconds[name][-2:]) for name in phases},
    }


def table(axis: str, result: dict[str, Any]) -> str:
    names = list(result["exponents"])
    lines = [f"| {HEADINGS[axis]} | " + " | ".join(names) + " |", "|---:" * (len(names) + 1) + "|"]
    for p in result["points"]:
        lines.append(
            f"| {p['size']} | " + " | ".join(f"{p['seconds'][n]:.3f}" for n in names) + " |"
        )
    for label, key in (("exponent", "exponents"), ("of the last two", "last_exponents")):
        lines.append(f"| {label} | " + " | ".join(f"{result[key][n]:.2f}" for n in names) + " |")
    return "\n".join(lines)


def main() -> None:
    given = options()
    work = read_work(given.work)
    work = replace(work, prompts=given.prompts or work.prompts)
    results: dict[str, Any] = {}
    for axis in given.axes:
        sizes = [size for size in SIZES[axis] if size <= (given.largest or size)]
        if len(sizes) < 2:
            refuse(
                f"--largest {given.largest} leaves one size of {axis}; it takes two for a slope."
            )
        points = []
        for size in sizes:
            seconds = measure(*point(work, axis, size), given.steps)
            points.append({"size": size, "seconds": seconds})
            print(f"{axis} {size}: {json.dumps(seconds)}", file=sys.stderr, flush=True)
        results[axis] = {"points": points, **fit(points)}
    if given.markdown:
        tables = "\n\n".join(table(axis, result) for axis, result in results.items())
        given.markdown.write_text(tables + "\n")
    print(json.dumps({"bench": "scaling", "axes": results}))


if __name__ == "__main__":
    main()
