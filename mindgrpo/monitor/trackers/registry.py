"""Which class a tracker's name stands for, and whether its package is there. Imports none until one is opened."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from mindgrpo.config.observation import TENSORBOARD
from mindgrpo.errors import UserError
from mindgrpo.monitor.trackers.contract import Tracker

KEY = "monitor_config.trackers"
# The module in this folder that holds the class, and the distributions of which one must be installed.
BUILT_IN = {
    "wandb": ("wandb_runs:WandbTracker", ("wandb",)),
    "swanlab": ("swanlab_runs:SwanlabTracker", ("swanlab",)),
    "mlflow": ("mlflow_runs:MlflowTracker", ("mlflow-skinny", "mlflow")),
    "trackio": ("trackio_runs:TrackioTracker", ("trackio",)),
}


def label_of(tracker: str) -> str:
    """What a tracker is called in messages and in the run's folder: its name, or that of the user's class."""
    return tracker.rpartition(":")[2]


def processes_of(trackers: Sequence[str]) -> list[str]:
    """Those that get a process; TensorBoard's events are written by the run itself."""
    return [tracker for tracker in trackers if tracker != TENSORBOARD]


def check_installed(trackers: Sequence[str]) -> None:
    """Raises UserError for a tracker that cannot be opened here."""
    for tracker in processes_of(trackers):
        if tracker in BUILT_IN:
            _check_package(tracker)
            continue
        source = tracker.rpartition(":")[0]
        if source.endswith(".py"):
            if not Path(source).expanduser().is_file():
                raise UserError(
                    f"{KEY} has {tracker}, but there is no file {source}; correct its path."
                )
        elif not _is_module(source):
            raise UserError(
                f"{KEY} has {tracker}, but there is no module {source}; install it or write file.py:Class."
            )


def _check_package(tracker: str) -> None:
    # Looked up by its distribution: a folder wandb/ or mlflow/ of an earlier run can be imported, too.
    for distribution in BUILT_IN[tracker][1]:
        try:
            metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return
    package = BUILT_IN[tracker][1][0]
    raise UserError(
        f"{KEY} has {tracker}, but its package is not installed; run 'pip install {package}' or take {tracker} out of "
        "the list."
    )


def _is_module(name: str) -> bool:
    _import_from_here()
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _import_from_here() -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def load_class(tracker: str) -> type[Tracker]:
    """Imports the class; whatever goes wrong in a user's module is raised as it is."""
    if tracker in BUILT_IN:
        module, _, name = BUILT_IN[tracker][0].partition(":")
        return _class_in(importlib.import_module(f"{__package__}.{module}"), name)
    source, _, name = tracker.rpartition(":")
    if not source.endswith(".py"):
        _import_from_here()
        return _class_in(importlib.import_module(source), name)
    path = Path(source).expanduser().resolve()
    sys.path.insert(0, str(path.parent))
    return _class_in(importlib.import_module(path.stem), name)


def _class_in(module: object, name: str) -> type[Tracker]:
    tracker: type[Tracker] = getattr(module, name)
    return tracker
