"""Which checkpoints a run may go on from, and in which folder it then writes.

Reads manifests, no weights. Refuses a path that leads to no run and no checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mindgrpo.checkpoint.folders import CHECKPOINTS, folder_of, is_checkpoint, steps_in
from mindgrpo.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from mindgrpo.errors import UserError


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
