"""Makes the folder that a run writes to, prepares one that is continued, and says which process writes it.

Nothing is overwritten: a folder with an earlier run's steps is an error, the files of one that made none are put aside,
as are a continued run's rows after its checkpoint.
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
from mindgrpo.strict_files import lines_of, row_of

ROOT = Path("output")
PROCESS_FILE = "process.json"
ROWS = ("metrics.jsonl", "evaluations.jsonl", "eval_completions.jsonl")
# All that a run writes into its folder, except checkpoints.
RUN_FILES = (
    *ROWS,
    "completions.jsonl",
    "per_token.jsonl",
    "config_resolved.yaml",
    "reward_output.txt",
    "reward_curve.png",
    "loss_curve.png",
    "report.html",
    "summary.json",
    "tensorboard",
    "trackers",
    "hf",
    "adapter",
)


def create(
    output_dir: Path | str | None,
    config_name: str,
    root: Path | str = ROOT,
    continues: bool = False,
) -> Path:
    """Makes OUTPUT_DIR (None: ROOT/CONFIG_NAME/TIME), and points ROOT/latest at it; it may hold a run that `continues`.

    Raises UserError for a folder that holds an earlier run's steps or cannot be made or written.
    """
    root = Path(root)
    directory = root / config_name if output_dir is None else Path(output_dir)
    if output_dir is not None and not continues:
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
        # The link is a convenience: a run in a named directory does not need `output/`.
        if output_dir is None:
            raise UserError(
                f"{root / 'latest'} must be a link that a run can renew, but renewing it "
                f"failed ({error.strerror}): remove or rename that file."
            ) from error
    return directory


def check_free(directory: Path | str) -> None:
    """Raises UserError if the directory holds an earlier run that has made a step, or may be making its first."""
    directory = Path(directory)
    if not (directory / ROWS[0]).exists():
        return
    steps, another = steps_in(directory), "name another output_dir or leave it out."
    if steps or _has_rows(directory / ROWS[0]):
        resume = (
            f"resume it from step {steps[-1]} with rl_config.resume_training true, "
            if steps
            else ""
        )
        raise UserError(
            f"output_dir {directory} holds an earlier run (its {ROWS[0]}), and a run overwrites nothing: "
            f"{resume}{another}"
        )
    process = read_process(directory)
    is_own = process is not None and process.is_here and process.pid == os.getpid()
    if process is not None and not is_own and process.is_alive is not False:
        now = "is running" if process.is_alive else "cannot be seen from here"
        raise UserError(
            f"output_dir {directory} is that of process {process.pid} on {process.host}, which {now}: {another}"
        )


def _has_rows(path: Path) -> bool:
    with path.open("rb") as rows:
        return row_of(rows.readline()) is not None


def check_can_be_made(asked: Path | str, key: str) -> None:
    """Raises UserError if the folder `asked` cannot be made or written, as far as this shows without making it.

    `key` is its setting.
    """
    path = Path(asked).absolute()
    there = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    reason = "" if there.is_dir() else f"{there} is no folder"
    if not reason and not os.access(there, os.W_OK | os.X_OK):
        reason = f"{there} cannot be written"
    if reason:
        raise UserError(
            f"{key} '{asked}' cannot be made or written: {reason}; name another folder, or leave it out."
        )


def own_folder(asked: Path | str, name: str, taken: str, key: str) -> Path:
    """Returns `asked`, or a new folder `name` in it if anything in it matches the glob `taken`.

    `key` is the setting of `asked`, for the UserError that is raised if the folder cannot be made or written.
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
    # A new link is renamed over the old one, so that `latest` always exists.
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(directory.resolve(), root.resolve()))
    try:
        fresh.replace(root / "latest")
    finally:
        fresh.unlink(missing_ok=True)


def cut_after(path: Path, step: int) -> int:
    """Moves the rows of steps above `step`, and a partial line, to PATH.after_step_N; returns how many."""
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
    """Copies the rows up to `step` to TARGET, if there is such a file and TARGET does not exist."""
    if not path.exists() or target.exists():
        return
    size, _ = _first_after(path, step)
    shutil.copyfile(path, target)
    os.truncate(target, size)


def _first_after(path: Path, step: int) -> tuple[int, int]:
    """Returns the offset of the first row above `step`, and the number of rows from it on."""
    first, count = path.stat().st_size, 0
    with path.open("rb") as rows:
        for offset, line in lines_of(rows):
            row = row_of(line) if line.endswith(b"\n") else None
            number = row.get("step") if row is not None else None
            if count or not isinstance(number, int | float) or number > step:
                first, count = min(first, offset), count + 1
    return first, count


def put_earlier_aside(directory: Path) -> Path | None:
    """Moves the files of a run that saved no checkpoint, or made no step, to a new folder in it.

    Returns that folder; None if there are no such files.
    """
    leftover = [directory / name for name in RUN_FILES if (directory / name).exists()]
    if not leftover:
        return None
    number = next(n for n in itertools.count(1) if not (directory / f"earlier_{n}").exists())
    aside = directory / f"earlier_{number}"
    aside.mkdir()
    for path in leftover:
        path.rename(aside / path.name)
    return aside


def rename_aside(path: Path, label: str) -> Path | None:
    """Renames PATH to PATH.label (with a number if that exists); returns the new path, None if there is no PATH."""
    return move_aside(path, label) if path.exists() else None


@dataclass(frozen=True)
class RunProcess:
    """Identifies the process that writes a run's folder, in process.json, so that others can tell whether it runs.

    `started` distinguishes it from a later process with the same number; `heartbeat` is None without a launcher.
    """

    host: str
    pid: int
    started: float
    heartbeat: str | None

    @property
    def is_here(self) -> bool:
        return self.host == os.uname().nodename

    @property
    def is_alive(self) -> bool | None:
        """Returns None on another host, from where it cannot be seen."""
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
    """Records that this process writes to `directory`."""
    own = RunProcess(
        os.uname().nodename,
        os.getpid(),
        psutil.Process().create_time(),
        str(heartbeat) if heartbeat is not None else None,
    )
    (directory / PROCESS_FILE).write_text(json.dumps(asdict(own)) + "\n", encoding="utf-8")


def read_process(directory: Path) -> RunProcess | None:
    """Reads process.json; returns None if it is missing or incomplete."""
    try:
        return RunProcess(**json.loads((directory / PROCESS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
