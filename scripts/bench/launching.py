"""Runs a bench's program on ranks and brings its figures back: one JSON line, alone on standard output.

The program itself runs under scripts/launch.sh, with one rank too, so that threads and environment are those of a
user's run; rank 0 leaves its figures in a file, as what ranks print is mixed with MindSpore's warnings. Refuses to
measure anything.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAUNCH = HERE.parent / "launch.sh"
RESULT = "MINDGRPO_BENCH_RESULT"


def is_rank() -> bool:
    return RESULT in os.environ


def run_on_ranks(program: str, arguments: Sequence[str], ranks: int) -> dict[str, Any]:
    """The figures that rank 0 of `program ARGUMENTS` gave to `give_figures`; ends this program if it failed."""
    with tempfile.TemporaryDirectory(prefix="mindgrpo-bench-") as folder:
        result = Path(folder) / "figures.json"
        own = Path(sys.executable).parent
        environment = os.environ | {RESULT: str(result), "PATH": f"{own}:{os.environ['PATH']}"}
        command = ["bash", str(LAUNCH), "--ranks", str(ranks), "--", program, *arguments]
        ended = subprocess.run(command, env=environment, stdout=sys.stderr)
        if ended.returncode or not result.exists():
            sys.exit(ended.returncode or 1)
        return dict(json.loads(result.read_text()))


def give_figures(figures: dict[str, Any]) -> None:
    """On rank 0, at the end."""
    Path(os.environ[RESULT]).write_text(json.dumps(figures))


def degrees(text: str) -> tuple[int, ...]:
    """`1,4,2` as numbers; an argparse type."""
    return tuple(int(word) for word in text.split(","))
