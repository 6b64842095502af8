"""What a tracker is: a class that is made with a run and gets its steps, in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """`directory` is the run's, `folder` one inside of it for the tracker's own files.

    `config` has every key of the configuration with dots. `id` is None for a new run; where a run is resumed it is
    the `id` that the tracker had before.
    """

    directory: Path
    folder: Path
    project: str
    name: str
    id: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


class Tracker(Protocol):
    """`id` is how the tracker finds the run again when it is resumed; empty if it has no use for one."""

    id: str

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, figures: Mapping[str, float], completions: Sequence[Row]) -> None:
        """A step's finite numbers, and the first of its completions where they are kept; steps never repeat."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """The run has ended with this summary.json; None: it has failed."""
