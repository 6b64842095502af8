"""A tracker's process: python -m mindgrpo.monitor.trackers.process JSON. Started by rank 0, see started.py.

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
from mindgrpo.health.processes import end_with_parent
from mindgrpo.monitor.row_follower import RowFollower, StepFollower
from mindgrpo.monitor.trackers.contract import TrackedRun, Tracker
from mindgrpo.monitor.trackers.registry import load_class
from mindgrpo.monitor.trackers.tables import MAX_ROWS, shown

SECONDS_BETWEEN_LOOKS = 0.5
LESS_URGENT = 10  # the run's processes go first
LONGEST_REASON = 300
DONE, FAILED = b"d", b"f"


class State:
    """What a resumed run needs: the tracker's id of the run, and the last step that it was given."""

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


class Completions:
    """The first rows of each step, until that step's metrics are there."""

    def __init__(self, path: Path | None, after: int) -> None:
        self._rows = RowFollower(path) if path is not None else None
        self._after = after
        self._by_step: dict[int, list[dict[str, Any]]] = {}

    def read(self) -> None:
        for row in self._rows.rows() if self._rows is not None else ():
            step = row.get("step", -1)
            kept = self._by_step.setdefault(step, []) if step > self._after else []
            if step > self._after and len(kept) < MAX_ROWS:
                kept.append(shown(row))

    def take(self, step: int) -> list[dict[str, Any]]:
        return self._by_step.pop(step, [])


def numbers_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's finite numbers by key; null and texts are left to metrics.jsonl."""
    return {
        key: float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def read_config(directory: Path) -> dict[str, Any]:
    text = (directory / "config_resolved.yaml").read_text(encoding="utf-8")
    return dict(flat(yaml.safe_load(text) or {}))


def follow(tracker: Tracker, state: State, directory: Path, rows: Path | None, rank: int) -> None:
    """Gives the tracker every new step until the rank has written to the pipe `rank`, and then finishes."""
    steps, completions = StepFollower(directory, state.step), Completions(rows, state.step)
    state.keep(tracker.id, state.step)
    is_over = False
    while not is_over:
        is_over = bool(select.select([rank], [], [], SECONDS_BETWEEN_LOOKS)[0])
        # A step's completions are written before its metrics.
        new = list(steps.rows())
        completions.read()
        for row in new:
            step = row["step"]
            tracker.log(step, numbers_of(row), completions.take(step))
            state.keep(tracker.id, step)
    is_done = os.read(rank, 1) == DONE
    summary = directory / "summary.json"
    tracker.finish(json.loads(summary.read_text()) if is_done and summary.exists() else None)


def own_streams(log: Path) -> tuple[int, int]:
    """Keeps the pipes of the rank under new numbers; the package gets no input, and its output goes to `log`."""
    rank, complaints = os.dup(0), os.dup(2)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    return rank, complaints


def sentence_of(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:LONGEST_REASON]


def main() -> None:
    about = json.loads(sys.argv[1])
    end_with_parent(about["parent"])
    os.nice(LESS_URGENT)
    directory, folder = Path(about["directory"]), Path(about["folder"])
    complaints = 2
    try:
        folder.mkdir(parents=True, exist_ok=True)
        rank, complaints = own_streams(folder / "log.txt")
        state = State(folder / "state.json")
        run = TrackedRun(
            directory,
            folder,
            about["project"],
            about["name"],
            state.id,
            read_config(directory),
        )
        rows = Path(about["completions"]) if about["completions"] else None
        follow(load_class(about["tracker"])(run), state, directory, rows, rank)
    except BaseException as error:
        os.write(complaints, sentence_of(error).encode())
        os.closerange(complaints, complaints + 1)
        traceback.print_exc()
        sys.stderr.flush()
        # What the package would still do at the end may hang where it has failed.
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
