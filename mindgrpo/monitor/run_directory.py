"""Makes the folder that a run writes to, prepares one that is continued, and says which process writes it.

Nothing is overwritten: a folder that holds an earlier run is an error, and a continued run's rows after its checkpoint
are put aside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mindgrpo.checkpoint.folders import move_aside, steps_in
from mindgrpo.errors import UserError
from mindgrpo.health.heartbeat import Heartbeat, read_heartbeat

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


# What a run writes into its folder, except checkpoints.
ROWS = ("metrics.jsonl", "evaluations.jsonl", "eval_completions.jsonl")
RUN_FILES = (
    *ROWS,
    "completions.jsonl",
    "per_token.jsonl",
    "config_resolved.yaml",
    "reward_output.txt",
    "reward_curve.png",
    "report.html",
    "summary.json",
    "tensorboard",
    "trackers",
    "hf",
    "adapter",
)


def cut_after(path: Path, step: int) -> int:
    """Moves the rows of steps above `step` (and a half line at the end) to PATH.after_step_N; how many."""
    start, count = _first_after(path, step)
    if not count:
        return 0
    with (
        path.open("r+b") as rows,
        path.with_name(f"{path.name}.after_step_{step}").open("ab") as aside,
    ):
        rows.seek(start)
        shutil.copyfileobj(rows, aside)
        aside.flush()
        os.fsync(aside.fileno())
        rows.truncate(start)
    return count


def copy_until(path: Path, step: int, target: Path) -> None:
    """Copies the rows up to `step` to TARGET, if there is such a file and TARGET is free."""
    if not path.exists() or target.exists():
        return
    size, _ = _first_after(path, step)
    shutil.copyfile(path, target)
    os.truncate(target, size)


def _first_after(path: Path, step: int) -> tuple[int, int]:
    """(bytes before the first row above `step`, how many rows there are from it on)."""
    offset = count = 0
    with path.open("rb") as rows:
        for row in rows:
            if count or not row.endswith(b"\n") or _step_of(row) > step:
                count += 1
            else:
                offset += len(row)
    return offset, count


def _step_of(row: bytes) -> float:
    try:
        return float(json.loads(row)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def put_earlier_aside(directory: Path) -> Path | None:
    """Moves what a run left here that never came to a checkpoint into a folder of its own; None where nothing is."""
    leftover = [directory / name for name in RUN_FILES if (directory / name).exists()]
    if not leftover:
        return None
    number = 1
    while (aside := directory / f"earlier_{number}").exists():
        number += 1
    aside.mkdir()
    for path in leftover:
        path.rename(aside / path.name)
    return aside


def rename_aside(path: Path, label: str) -> Path | None:
    """PATH as PATH.label (and a number where that is taken); None where there is no PATH."""
    return move_aside(path, label) if path.exists() else None


PROCESS_FILE = "process.json"


@dataclass(frozen=True)
class RunProcess:
    """`started` tells it from a later process of the same number; `heartbeat` is None where nothing launched it."""

    host: str
    pid: int
    started: float
    heartbeat: str | None

    @property
    def is_here(self) -> bool:
        return self.host == os.uname().nodename

    @property
    def is_alive(self) -> bool | None:
        """None on another host, from where it cannot be seen."""
        if not self.is_here:
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < 1
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def last_heartbeat(self) -> Heartbeat | None:
        if self.heartbeat is None or not self.is_here:
            return None
        return read_heartbeat(Path(self.heartbeat))


def write_process(directory: Path, heartbeat: Path | None) -> None:
    """This process is the one that writes to `directory`."""
    own = RunProcess(
        os.uname().nodename,
        os.getpid(),
        psutil.Process().create_time(),
        str(heartbeat) if heartbeat is not None else None,
    )
    (directory / PROCESS_FILE).write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")


def read_process(directory: Path) -> RunProcess | None:
    """None where there is none, or only the beginning of one."""
    try:
        return RunProcess(**json.loads((directory / PROCESS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
