"""The command line of scripts that run cases on hosts made here: which ones, for how many steps, on how many ranks."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kill_matrix import words

# From a folder of the case's own, --ranks and main.py's arguments to a row with "good".
Case = Callable[[Path, int, Sequence[str]], dict[str, Any]]


def run_cases(
    about: str,
    cases: Mapping[str, Case],
    cannot: str,
    keys: Mapping[str, Any],
    ranks: int,
    steps: int,
) -> int:
    """Prints a JSON line a case; the exit status, 2 where `cannot` says why there can be no such hosts here.

    `about` is the script's docstring, `keys` are the configuration's, `ranks` and `steps` the defaults.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases))
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which then stay")
    asked, more = parser.parse_known_args()
    if cannot:
        print(f"mindgrpo: there can be no such hosts here: {cannot}.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    arguments = [*words({**keys, "rl_config.max_steps": asked.steps}), *more]
    folder = (asked.keep or Path(tempfile.mkdtemp(prefix="mindgrpo-cases-"))).absolute()
    good = True
    try:
        for name in asked.cases:
            own = folder / name
            own.mkdir(parents=True)
            result = {"case": name} | cases[name](own, asked.ranks, arguments)
            print(json.dumps(result), flush=True)
            good = good and result["good"]
    finally:
        if asked.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if good else 1
