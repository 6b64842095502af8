"""Compares runs of one configuration on Arm with the same on x86: the table that scripts/arm.sh prints.

Arguments: of each pair the folder of the run on Arm, its seconds, the folder on x86, its seconds. Exits with 1 where a
completion differs.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def relative_gap(ours: float, others: float) -> float:
    return abs(ours - others) / max(abs(others), 1e-30)


def compare(arm: Path, x86: Path) -> tuple[int, int, dict[str, float]]:
    """Returns how many completions differ, of how many, and by name the largest gap of a step.

    Gaps of a metric between both runs are relative; the last one is between generator and trainer on Arm.
    """
    ours, others = (rows_of(run / "completions.jsonl") for run in (arm, x86))
    differ = sum(a != b for a, b in itertools.zip_longest(ours, others))
    steps = [rows_of(run / "metrics.jsonl") for run in (arm, x86)]
    gaps = {
        name: max(relative_gap(a[name], b[name]) for a, b in zip(*steps, strict=True))
        for name in ("grad_norm", "entropy")
    }
    gaps["generator and trainer"] = max(step["logprob_gap/max"] for step in steps[0])
    return differ, max(len(ours), len(others)), gaps


def main() -> int:
    words, failed = sys.argv[1:], 0
    gaps_of = ("gap of the gradient norm", "of the entropy", "of generator and trainer on Arm")
    heads = ("ranks", "completions that differ", *gaps_of, "seconds on Arm", "on x86")
    print("|", " | ".join(heads), "|")
    print("|", " | ".join(["---"] * len(heads)), "|")
    for arm, arm_seconds, x86, x86_seconds in zip(*[iter(words)] * 4, strict=True):
        differ, total, gaps = compare(Path(arm), Path(x86))
        ranks = Path(arm).name.rpartition("-")[2]
        cells = [ranks, f"{differ} of {total}", *(f"{gap:.1e}" for gap in gaps.values())]
        print("|", " | ".join([*cells, arm_seconds, x86_seconds]), "|")
        failed |= differ > 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
