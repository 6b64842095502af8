"""Where checkpoints lie in a run's folder, and which of them may be whole.

Refuses to look into them: a folder counts as a checkpoint by its name alone.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mindgrpo.checkpoint.format import MANIFEST, Manifest, read_manifest
from mindgrpo.errors import UserError

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step_(\d{6,12})")
_LEFT_OVER = re.compile(r"\.step_\d{6,12}\.(partial|deleted)")


def folder_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step_{step:06d}"


def partial_of(run: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return run / CHECKPOINTS / f".step_{step:06d}.partial"


def steps_in(run: Path) -> list[int]:
    """The steps of the checkpoints in a run's folder, ascending."""
    try:
        entries = list((run / CHECKPOINTS).iterdir())
    except OSError:
        return []
    found = (_NAME.fullmatch(entry.name) for entry in entries if entry.is_dir())
    return sorted({int(match[1]) for match in found if match})


def is_checkpoint(folder: Path) -> bool:
    return folder.parent.name == CHECKPOINTS and _NAME.fullmatch(folder.name) is not None


def delete(run: Path, step: int) -> None:
    """Takes its name away first, so that no half of a checkpoint is ever found under it. Raises OSError."""
    folder = folder_of(run, step)
    doomed = folder.with_name(f".{folder.name}.deleted")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_left_overs(run: Path) -> None:
    """What killed runs have left half written or half deleted."""
    with contextlib.suppress(OSError):
        for entry in (run / CHECKPOINTS).iterdir():
            if _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def set_aside(run: Path, step: int) -> Path:
    """Renames a checkpoint so that it is found no more, and is not lost either. Raises OSError."""
    return move_aside(folder_of(run, step), "set_aside")


def move_aside(path: Path, word: str) -> Path:
    """Renames `path` to its name with `word`, and a number where that is taken. Raises OSError."""
    number = 1
    while True:
        target = path.with_name(f"{path.name}.{word}" + (f"_{number}" if number > 1 else ""))
        if not target.exists():
            return path.rename(target)
        number += 1


def to_delete(steps: Iterable[int], keep: int | None, best: int | None = None) -> list[int]:
    """Of the steps whose checkpoints are whole, those to delete: all but the `keep` newest (None: all) and `best`."""
    ordered = sorted(set(steps))
    if keep is None:
        return []
    newest = ordered[-max(keep, 1) :]
    return [step for step in ordered if step not in newest and step != best]


@dataclass(frozen=True)
class Candidate:
    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Start:
    """Where a run that was asked to go on begins.

    `candidates` newest first, all of them readable; none means from the beginning. `source` is the run that wrote
    them, `output` the folder to go on in: None for a fresh one. `only`: the user named this one checkpoint. `notes`
    are for the user.
    """

    source: Path | None
    output: Path | None
    candidates: list[Candidate] = field(default_factory=list)
    only: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def places(self) -> dict[str, str]:
        """Where the run wrote outside of its folder."""
        same_run = self.output is not None and self.output == self.source
        return self.candidates[0].manifest.state.places if self.candidates and same_run else {}


def find(asked: bool | str, output_dir: str | None, name: str, root: Path | str) -> Start | None:
    """None where nothing was asked for. `root`/`name` holds earlier runs of the configuration. Raises UserError."""
    if asked is False:
        return None
    given = Path(output_dir) if output_dir else None
    if isinstance(asked, str):
        return _of_path(Path(asked), given)
    if given is not None:
        return _of_run(given, given)
    runs = [run for run in Path(root, name).glob("*") if steps_in(run)]
    if not runs:
        note = f"no run in {Path(root, name)} has a checkpoint: this one starts from the beginning"
        return Start(None, None, notes=[note])
    newest = max(runs, key=lambda run: folder_of(run, steps_in(run)[-1]).stat().st_mtime)
    return _of_run(newest, newest)


def _of_path(path: Path, given: Path | None) -> Start:
    if (path / MANIFEST).exists() or is_checkpoint(path):
        source = path.parent.parent if is_checkpoint(path) else None
        return Start(source, given or source, [Candidate(path, read_manifest(path))], only=True)
    run = path.parent if path.name == CHECKPOINTS else path
    if not steps_in(run):
        raise UserError(
            f"rl_config.resume_training '{path}' holds no checkpoint; name a run's folder, one of its "
            f"{CHECKPOINTS}/step_* or true for the latest."
        )
    return _of_run(run, given or run)


def _of_run(run: Path, output: Path) -> Start:
    steps = steps_in(run)
    if not steps:
        note = f"{run} has no checkpoint: the run starts from the beginning"
        return Start(None, output, notes=[note])
    found: list[Candidate] = []
    notes: list[str] = []
    for step in reversed(steps):
        try:
            found.append(Candidate(folder_of(run, step), read_manifest(folder_of(run, step))))
        except UserError as error:
            notes.append(f"passed over: {error}")
    if not found:
        raise UserError(f"No checkpoint in {run / CHECKPOINTS} can be read; the newest: {notes[0]}")
    return Start(run, output, found, notes=notes)
