"""Defines a tracker, a class that receives a run's steps in a process of its own, and finds the class for a name.

No tracker's package is imported until one is opened.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from mindgrpo.config.observation import TENSORBOARD
from mindgrpo.errors import UserError
from mindgrpo.user_code import Kind, import_named

KEY = "monitor_config.trackers"
# The class in built_in.py, and the distributions of which one must be installed.
BUILT_IN = {
    "wandb": ("WandbTracker", ("wandb",)),
    "swanlab": ("SwanlabTracker", ("swanlab",)),
    "mlflow": ("MlflowTracker", ("mlflow-skinny", "mlflow")),
    "trackio": ("TrackioTracker", ("trackio",)),
}

Cells = Mapping[str, Any]
"""A completion's texts and numbers by column."""


@dataclass(frozen=True)
class TrackedRun:
    """Describes the run to its tracker: `directory` is the run's, `folder` one in it for the tracker's own files.

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
    """Records a run; `id` is how it finds the run again when that is resumed, empty if it has no use for one."""

    id: str

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float], completions: Sequence[Cells]) -> None:
        """Records a step's finite numbers, and its first completions if they are kept; steps never repeat."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Ends the record of a run that has ended with this summary.json, or has failed (None)."""


def label_of(tracker: str) -> str:
    """Returns the tracker's name in messages and folders: the built-in name, or that of the user's class."""
    return tracker.rpartition(":")[2]


def processes_of(trackers: Sequence[str]) -> list[str]:
    """Returns the trackers that get a process; TensorBoard's events are written by the run itself."""
    return [tracker for tracker in trackers if tracker != TENSORBOARD]


def check_installed(trackers: Sequence[str]) -> None:
    """Raises UserError for a tracker that cannot be opened here."""
    for tracker in processes_of(trackers):
        source = tracker.rpartition(":")[0]
        if tracker in BUILT_IN:
            # Looked up by its distribution: a folder wandb/ or mlflow/ of an earlier run can be imported, too.
            packages = BUILT_IN[tracker][1]
            if not any(map(_is_distribution, packages)):
                raise UserError(
                    f"{KEY} has {tracker}, but its package is not installed; run 'pip install {packages[0]}' or "
                    f"take {tracker} out of the list."
                )
        elif source.endswith(".py"):
            if not Path(source).expanduser().is_file():
                raise UserError(
                    f"{KEY} has {tracker}, but there is no file {source}; correct its path."
                )
        elif not _is_module(source):
            raise UserError(
                f"{KEY} has {tracker}, but there is no module {source}; install it or write file.py:Class."
            )


def _is_distribution(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _is_module(name: str) -> bool:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def load_class(tracker: str) -> type[Tracker]:
    """Imports the class. Raises UserError for one that does not import."""
    source, _, name = tracker.rpartition(":")
    if tracker in BUILT_IN:
        source, name = f"{__package__}.built_in", BUILT_IN[tracker][0]
    loaded: type[Tracker] = import_named(Kind("tracker", KEY), tracker, source, name)
    return loaded
