"""Trackers of the tests' own: one that keeps what it gets, and others that raise, hang and write to a full disk."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mindgrpo.monitor.trackers.contract import Cells, TrackedRun


class Keeps:
    def __init__(self, run: TrackedRun) -> None:
        self.id = run.id or "first"
        self._path = run.folder / "kept.jsonl"
        self._keep({"project": run.project, "name": run.name, "config": dict(run.config)})

    def _keep(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a") as kept:
            kept.write(json.dumps(entry) + "\n")

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        self._keep({"step": step, "figures": figures, "completions": list(completions)})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._keep({"summary": summary})


class Raises(Keeps):
    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        raise ValueError(f"no step {step} here")


class Hangs(Keeps):
    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        time.sleep(3600)


class FillsTheDisk(Keeps):
    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        with open("/dev/full", "w") as full:
            full.write("x" * 10000)


class Talks(Keeps):
    """More than a pipe holds."""

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        print("word " * 100_000, flush=True)
        super().log(step, figures, completions)


class Asks(Keeps):
    """As a package does that wants a login."""

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Cells]) -> None:
        input("your key: ")


class NeedsAPackage:
    def __init__(self, run: TrackedRun) -> None:
        import no_such_package_at_all  # noqa: F401
