"""Makes the folders that a run writes to; one that holds an earlier run is an error: nothing is overwritten."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from mindgrpo.checkpoint.folders import steps_in
from mindgrpo.errors import UserError

ROOT = Path("output")


def create(
    output_dir: Path | str | None, config_name: str, root: Path | str = ROOT, goes_on: bool = False
) -> Path:
    """Makes OUTPUT_DIR, else ROOT/CONFIG_NAME/TIME, and points ROOT/latest at it; `goes_on` in a run that is there."""
    root = Path(root)
    directory = root / config_name if output_dir is None else Path(output_dir)
    if output_dir is not None and not goes_on:
        check_free(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if output_dir is None:
            directory = _make_fresh(directory, time.strftime("%Y%m%d-%H%M%S"))
    except OSError as error:
        raise UserError(
            f"the folder {directory} for the run cannot be made ({error.strerror}): "
            "name a directory that can be written with --output_dir."
        ) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(
            f"output_dir {directory} cannot be written: "
            "change its permissions or name another directory with --output_dir."
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        _point_latest(root, directory)
    except OSError as error:
        # The link is a convenience: who names a directory may well work where `output/` cannot be made.
        if output_dir is None:
            raise UserError(
                f"{root / 'latest'} must be a link that a run can renew, but renewing it "
                f"failed ({error.strerror}): remove or rename that file."
            ) from error
    return directory


def check_free(directory: Path | str) -> None:
    """Raises UserError if the directory holds an earlier run."""
    directory = Path(directory)
    if (directory / "metrics.jsonl").exists():
        steps = steps_in(directory)
        resume = f"resume it from step {steps[-1]} with --resume_training true, " if steps else ""
        raise UserError(
            f"output_dir {directory} holds an earlier run (its metrics.jsonl), and a run "
            f"overwrites nothing: {resume}name another directory or leave --output_dir out."
        )


def own_folder(asked: Path | str, name: str, taken: str, key: str) -> Path:
    """`asked` itself where nothing in it matches `taken` (a glob), else a new folder in it called `name`.

    `key` is the setting that `asked` came from. Raises UserError for what cannot be made.
    """
    folder = Path(asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.glob(taken)):
            return _make_fresh(folder, name)
    except OSError as error:
        raise UserError(
            f"{key} '{asked}' cannot be made or read as a folder ({error.strerror}): name a folder "
            "that can be written, or leave it out."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{key} '{asked}' cannot be written: name a folder that can, or leave it out."
        )
    return folder


def _make_fresh(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        directory = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("itertools.count ended")


def _point_latest(root: Path, directory: Path) -> None:
    fresh = root / f".latest-{os.getpid()}"
    # A link is made aside and renamed over the old one, so that `latest` is there at every instant.
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(directory.resolve(), root.resolve()))
    try:
        fresh.replace(root / "latest")
    finally:
        fresh.unlink(missing_ok=True)
