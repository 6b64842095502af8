"""Runs one tracker in its own process, started by rank 0 (started.py).

It reads what the run writes, and the run never waits for it. What the package prints goes to log.txt in the tracker's
folder; a failure is one line on the standard error that it was started with.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from mindgrpo.errors import one_line
from mindgrpo.monitor.metrics import RowFollower, StepFollower
from mindgrpo.monitor.trackers.contract import TrackedRun, Tracker, load_class

SECONDS_BETWEEN_LOOKS = 0.5
LESS_URGENT = 10  # the run's processes go first
LONGEST_REASON = 300
MAX_ROWS = 64
DONE, FAILED = b"d", b"f"


class TrackerState:
    """Keeps what a resumed run needs: the tracker's id of the run, and the last step that was recorded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.id: str | None = known.get("id")
        self.step: int = known.get("step", -1)

    def keep(self, run_id: str, step: int) -> None:
        self.id, self.step = run_id, step
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"id": run_id, "step": step}) + "\n")
        fresh.replace(self._path)


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the row's finite numbers by key; null and texts are left to metrics.jsonl."""
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def cells_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a completion's cells, a conversation as one text; other lists are left to completions.jsonl."""
    cells: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells |= {f"{key}/{inner}": cell for inner, cell in cells_of(value).items()}
        elif key != "step" and (value is None or isinstance(value, str | int | float)):
            cells[key] = value
        elif key == "messages" and isinstance(value, list):
            cells["conversation"] = "\n\n".join(map(_turn, value))
    return cells


def _turn(message: Mapping[str, Any]) -> str:
    # Calls are in the content already, as the policy wrote them.
    words = [message.get(key) for key in ("role", "name", "failure")]
    return f"[{' '.join(str(word) for word in words if word)}]\n{message.get('content', '')}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def follow(
    tracker: Tracker, state: TrackerState, directory: Path, completions: Path | None, rank: int
) -> None:
    """Gives the tracker every new step until the rank has written to the pipe `rank`, and then finishes."""
    steps = StepFollower(directory, state.step)
    samples = RowFollower(completions) if completions is not None else None
    waiting: dict[int, list[dict[str, Any]]] = {}  # first rows of a step, until its metrics appear
    after = state.step
    state.keep(tracker.id, after)
    is_over = False
    while not is_over:
        is_over = bool(select.select([rank], [], [], SECONDS_BETWEEN_LOOKS)[0])
        # A step's completions are written before its metrics.
        new = list(steps.rows())
        for sample in samples.rows() if samples is not None else ():
            if (step := sample.get("step", -1)) > after:
                kept = waiting.setdefault(step, [])
                kept += [cells_of(sample)] if len(kept) < MAX_ROWS else []
        for row in new:
            step = row["step"]
            tracker.log(step, numbers_of(row), waiting.pop(step, []))
            state.keep(tracker.id, step)
    is_done = os.read(rank, 1) == DONE
    summary = directory / "summary.json"
    tracker.finish(json.loads(summary.read_text()) if is_done and summary.exists() else None)


def _separate_streams(log: Path) -> tuple[int, int]:
    """Returns new descriptors of the rank's pipes; the package gets no input, and its output goes to `log`."""
    rank, complaints = os.dup(0), os.dup(2)
    with open(os.devnull) as nothing, log.open("a") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return rank, complaints


def main(
    tracker: str, directory: str, folder: str, completions: str | None, project: str, name: str
) -> None:
    """Records the run in `directory` until it has ended, and ends this process. `folder` is the tracker's own."""
    os.nice(LESS_URGENT)
    complaints = 2
    try:
        run, own = Path(directory), Path(folder)
        own.mkdir(parents=True, exist_ok=True)
        rank, complaints = _separate_streams(own / "log.txt")
        state = TrackerState(own / "state.json")
        text = (run / "config_resolved.yaml").read_text(encoding="utf-8")
        config = dict(_flat(yaml.safe_load(text) or {}))
        tracked = TrackedRun(run, own, project, name, state.id, config)
        rows = Path(completions) if completions else None
        follow(load_class(tracker)(tracked), state, run, rows, rank)
    except BaseException as error:
        reason = one_line(f"{type(error).__name__}: {error}")[:LONGEST_REASON]
        os.write(complaints, reason.encode())
        os.close(complaints)
        traceback.print_exc()
        sys.stderr.flush()
        # What the package would still do at the end may hang where it has failed.
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
