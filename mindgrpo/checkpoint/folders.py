"""Names the folders of a run's checkpoints, and decides which of them stay and which one a run resumes from.

A folder counts as a checkpoint by its name: it gets that name last and loses it first.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mindgrpo.checkpoint.format import MANIFEST, Manifest, read_manifest
from mindgrpo.errors import UserError

if TYPE_CHECKING:
    from mindgrpo.backend.contract import Backend

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step_(\d{6,12})")
_LEFT_OVER = re.compile(r"\.step_\d{6,12}\.(partial|deleted)")
# A network's file system may show a new file late.
PATIENCE_SECONDS = 5.0
NAP_SECONDS = 0.05


def folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step_{step:06d}"


def partial_of(run: Path, step: int) -> Path:
    """Names the folder that a checkpoint is written in."""
    return run / CHECKPOINTS / f".step_{step:06d}.partial"


def steps_in(run: Path) -> list[int]:
    """Returns the steps of the checkpoints in a run's folder, ascending."""
    try:
        entries = list((run / CHECKPOINTS).iterdir())
    except OSError:
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir())
    return sorted({int(match[1]) for match in matches if match})


def to_delete(steps: Iterable[int], keep: int | None, best: int | None = None) -> list[int]:
    """Returns the steps to delete: all but the `keep` newest (None: all), the very newest and `best`."""
    ordered = sorted(set(steps))
    newest = ordered if keep is None else ordered[-max(keep, 1) :]
    return [step for step in ordered if step not in newest and step != best]


def delete(run: Path, step: int) -> None:
    """Deletes a checkpoint, its name first, so that no half of one has a name. Raises OSError."""
    folder = folder_of(run, step)
    shutil.rmtree(folder.rename(folder.with_name(f".{folder.name}.deleted")))


def remove_left_overs(run: Path) -> None:
    """Deletes what killed runs have left half written or half deleted."""
    with contextlib.suppress(OSError):
        for entry in (run / CHECKPOINTS).iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def set_aside(run: Path, step: int) -> Path:
    """Renames a checkpoint so that no run resumes from it. Raises OSError."""
    return move_aside(folder_of(run, step), "set_aside")


def move_aside(path: Path, word: str) -> Path:
    """Renames `path` to its name with `word`, and a number where that is taken. Raises OSError."""
    target, number = path.with_name(f"{path.name}.{word}"), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.{word}_{number}")
    return path.rename(target)


@dataclass(frozen=True)
class Candidate:
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Start:
    """Names where a run that was asked to resume begins.

    `candidates` are readable, the newest first; without any the run starts from the beginning. `source` is the run
    that wrote them, `output` the folder to continue in, None for a fresh one. `only`: the user named this one
    checkpoint. `notes` are for the user.
    """

    source: Path | None
    output: Path | None
    candidates: list[Candidate] = field(default_factory=list)
    only: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def output_paths(self) -> dict[str, str]:
        """Returns the folders outside of the run's own that it wrote to and continues in."""
        same_run = self.output is not None and self.output == self.source
        return (
            self.candidates[0].manifest.state.output_paths if same_run and self.candidates else {}
        )


def find(
    asked: bool | str,
    output_dir: str | None,
    name: str,
    root: Path | str,
    is_alike: Callable[[Manifest], bool] = lambda manifest: True,
) -> Start | None:
    """Finds the checkpoints that `rl_config.resume_training` asks for; None where it asks for none.

    Reads manifests, no weights. `root`/`name` holds earlier runs of the configuration, of which the newest is taken
    whose manifests are alike. Raises UserError.
    """
    if asked is False:
        return None
    output = Path(output_dir) if output_dir else None
    if isinstance(asked, str):
        return _of_path(Path(asked), output)
    if output is not None:
        return _of_run(output, output)
    runs = [run for run in Path(root, name).glob("*") if steps_in(run)]
    runs.sort(key=lambda run: folder_of(run, steps_in(run)[-1]).stat().st_mtime, reverse=True)
    notes: list[str] = []
    for run in runs:
        start = _of_run(run, run)
        if is_alike(start.candidates[0].manifest):
            start.notes.extend(notes)
            return start
        notes.append(f"passed over: {run} is of the other kind of training")
    note = f"no run in {Path(root, name)} has a checkpoint: this one starts from the beginning"
    return Start(None, None, notes=[*notes, note])


def _of_path(path: Path, output: Path | None) -> Start:
    is_in_run = path.parent.name == CHECKPOINTS and _NAME.fullmatch(path.name) is not None
    if is_in_run or (path / MANIFEST).exists():
        source = path.parent.parent if is_in_run else None
        return Start(source, output or source, [Candidate(path, read_manifest(path))], only=True)
    run = path.parent if path.name == CHECKPOINTS else path
    if not steps_in(run):
        raise UserError(
            f"rl_config.resume_training '{path}' holds no checkpoint; name a run's folder, one of its "
            f"{CHECKPOINTS}/step_* or true for the latest."
        )
    return _of_run(run, output or run)


def _of_run(run: Path, output: Path) -> Start:
    folders = [folder_of(run, step) for step in reversed(steps_in(run))]
    if not folders:
        note = f"{run} has no checkpoint: the run starts from the beginning"
        return Start(None, output, notes=[note])
    start = Start(run, output)
    for folder in folders:
        try:
            start.candidates.append(Candidate(folder, read_manifest(folder)))
        except UserError as error:
            start.notes.append(f"passed over: {error}")
    if not start.candidates:
        raise UserError(
            f"No checkpoint in {run / CHECKPOINTS} can be read; the newest: {start.notes[0]}"
        )
    return start


def ranks_that_see(folder: Path, backend: Backend) -> tuple[Path, list[bool]]:
    """Returns rank 0's path of `folder`, and of each rank whether it sees a file that is made there for a moment.

    All ranks together. Where rank 0 cannot write, all of them see it: what is to be written there says so.
    """
    probe = folder.absolute() / f".seen-{secrets.token_hex(8)}"
    if backend.rank == 0:
        with contextlib.suppress(OSError):
            probe.touch()
    probe, is_there = backend.world.gather_objects((probe, probe.exists()))[0]
    seen: list[bool] = backend.world.gather_objects(not is_there or _appears(probe))
    if backend.rank == 0:
        with contextlib.suppress(OSError):
            os.unlink(probe)
    return probe.parent, seen


def check_seen(run: Path, backend: Backend) -> None:
    """Raises UserError on all ranks if one of them does not see the folder of the run's checkpoints."""
    folder, seen = ranks_that_see(run, backend)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise UserError(
            f"rank {blind[0]}{f' and {len(blind) - 1} more' if blind[1:] else ''} cannot see {folder}, where "
            "all ranks write checkpoints; give --output_dir a folder that all hosts share at the same path, or leave "
            "rl_config.save_ckpt_interval out."
        )


def _appears(path: Path) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(NAP_SECONDS)
    return True
