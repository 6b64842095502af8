"""Decides where a run starts and writes: compares the ranks, finds the checkpoint to resume, prepares the files.

Resuming with another model, data set or algorithm is an error unless the user allows the changed keys by name. Files of
an earlier session are cut, renamed or moved aside, never lost, and the user is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import mindgrpo
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import DTYPE_KEY, PRECISION_KEY
from mindgrpo.backend.rank_consistency import different_ranks, digest
from mindgrpo.checkpoint import differences, folders
from mindgrpo.checkpoint.folders import Candidate, Start, find
from mindgrpo.checkpoint.format import Identity, StoredTokenizer
from mindgrpo.config import Config, Loaded, values_by_key
from mindgrpo.config.supervised import is_supervised
from mindgrpo.errors import UserError, counted, error_of
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.models.precision import compute_dtype
from mindgrpo.monitor import run_directory
from mindgrpo.monitor.run_directory import ROOT
from mindgrpo.run.named_sources import with_names

SOURCES = (".py", ".c", ".h")
DATE_KEY, INVARIANT_KEY = "rl_config.chat_template_date", "context.batch_invariant"
FOLDER = Path(mindgrpo.__file__).parent


def check_same_start(config: Config, backend: Backend) -> None:
    """Verifies that all ranks have the same configuration and code. Collective. Raises UserError on all ranks."""
    values = {key: repr(value) for key, value in values_by_key(config).items()}
    # What auto is on this rank's processor.
    values[PRECISION_KEY] = repr(backend.matmul_precision)
    values[DTYPE_KEY] = repr(backend.compute_dtype)
    by_rank = backend.world.gather_objects((values, code_digest()))
    check_configurations([values for values, _ in by_rank])
    others = different_ranks([code for _, code in by_rank])
    if others:
        raise UserError(
            f"rank {others[0]} runs other code than the other ranks (mindgrpo {mindgrpo.__version__} in "
            f"{FOLDER} here); install one version on every host."
        )


def check_configurations(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Compares the ranks' configurations, {key: value as text} each. Raises UserError."""
    others = different_ranks([digest(sorted(values.items())) for values in by_rank])
    if not others:
        return
    usual = next(rank for rank in range(len(by_rank)) if rank not in others)
    here, there = by_rank[usual], by_rank[others[0]]
    keys = [key for key in {**here, **there} if here.get(key) != there.get(key)]
    more = f" and {len(keys) - 1} more keys differ" if len(keys) > 1 else ""
    raise UserError(
        f"rank {others[0]} starts with another configuration than rank {usual}: {keys[0]} is {there.get(keys[0])} "
        f"there and {here.get(keys[0])} here{more}; give all ranks the same file, flags and environment."
    )


def code_digest() -> str:
    files = sorted(path for path in FOLDER.rglob("*") if path.suffix in SOURCES)
    return digest([(str(path.relative_to(FOLDER)), path.read_bytes()) for path in files])


def find_start(loaded: Loaded, name: str) -> tuple[Start | None, Loaded]:
    """Returns the start of a resumed run, None for a new one, and the configuration with the original run's date.

    Raises UserError.
    """
    config, kind = loaded.config, is_supervised(values_by_key(loaded.config))
    start = find(
        config.rl_config.resume_training,
        config.output_dir,
        name,
        ROOT,
        lambda manifest: is_supervised(manifest.identity.config) == kind,
    )
    return start, _with_date(loaded, start)


def saved_values(start: Start | None) -> Mapping[str, Any]:
    """Returns the resumed run's values by key, empty for a new run."""
    return start.candidates[0].manifest.identity.config if start and start.candidates else {}


def _with_date(loaded: Loaded, start: Start | None) -> Loaded:
    """Returns the configuration with chat_template_date set to the date when the run began, unless the user set it."""
    rl = loaded.config.rl_config
    if rl.chat_template_date is not None:
        return loaded
    date = saved_values(start).get(DATE_KEY) or datetime.now().isoformat(" ", "seconds")
    rl = rl.model_copy(update={"chat_template_date": date})
    config = loaded.config.model_copy(update={"rl_config": rl})
    return replace(loaded, config=config, origins=loaded.origins | {DATE_KEY: "when the run began"})


def changes_since(start: Start | None, config: Config, inputs: Inputs) -> list[str]:
    """Returns messages about allowed changes since the resumed checkpoint. Raises UserError for others."""
    if start is None or not start.candidates:
        return []
    return compare(start.candidates[0], config, identity_of(config, inputs))


def compare(candidate: Candidate, config: Config, now: Identity) -> list[str]:
    saved = candidate.manifest.identity
    kinds = [is_supervised(one.config) for one in (saved, now)]
    if kinds[0] != kinds[1] and "all" not in config.rl_config.resume_changed:
        was, is_now = ("supervised training" if one else "GRPO" for one in kinds)
        raise UserError(
            f"{candidate.folder} is of a run of {was} and cannot be resumed by {is_now}; to begin with its weights, "
            f"export them (python -m mindgrpo export --from {candidate.folder} --output DIR) and set actor_config.load "
            "to DIR."
        )
    changes = differences.differences(saved, now)
    if not now.unsaved:  # weights are compared when they have been read
        changes = [one for one in changes if not one.key.startswith("weights.")]
    return differences.check(changes, config.rl_config.resume_changed, str(candidate.folder))


def identity_of(
    config: Config, inputs: Inputs, unsaved: Mapping[str, str] | None = None
) -> Identity:
    plan, tokenizer = inputs.plan, inputs.tokenizer
    model = asdict(plan.model)
    # Nothing of the file's words, nor of how the package describes what model_type means.
    del model["raw"], model["family"]
    batch, template = plan.batch, inputs.tokenizer.template
    rewards, scorer = None, inputs.scorer
    if scorer is not None and not config.reward_config.verifier_function:
        rewards = {name: float(own) for name, own in zip(scorer.names, scorer.weights, strict=True)}
    # What they are on this machine and with this model.
    numbers = {DTYPE_KEY: compute_dtype(config), INVARIANT_KEY: plan.batch_invariant}
    return Identity(
        code=mindgrpo.__version__,
        config=_as_json(values_by_key(with_names(config)) | numbers),
        model=_as_json(model),
        data=inputs.prompts.fingerprint,
        batch={
            "prompts_per_step": batch.prompts_per_step,
            "updates_per_rollout": batch.updates_per_rollout,
        },
        unsaved=dict(unsaved or {}),
        held_out=inputs.held_out.fingerprint if inputs.held_out else "",
        rewards=rewards,
        tokenizer=StoredTokenizer(
            directory=str(tokenizer.directory),
            template=template.text if template else None,
            is_chosen=config.rl_config.chat_template is not None,
            turn_end=template.stop if template else None,
            stop_ids=list(tokenizer.stop_ids),
        ),
    )


def _as_json(values: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(values, default=str))


@dataclass(frozen=True)
class OutputPaths:
    """The run's folders; `completions` and `tensorboard` are None if off; `elsewhere` lists folders the user chose."""

    directory: Path
    model: Path
    completions: Path | None
    tensorboard: Path | None
    elsewhere: list[str] = field(default_factory=list)

    @property
    def outside(self) -> dict[str, str]:
        """Returns the paths outside of the run's folder, which a resuming session could not find otherwise."""
        named = {"completions": self.completions, "tensorboard": self.tensorboard}
        return {
            name: str(path.absolute())
            for name, path in named.items()
            if path is not None and self.directory not in (path, path.parent)
        }


def label_of(directory: Path) -> str:
    """Returns a run's name in folders that it shares with others."""
    return "-".join(directory.absolute().parts[-2:]).strip("/")


def _folder_of(config: Config, start: Start | None) -> tuple[str | None, bool]:
    """Returns the run's folder (None: to be created) and whether it may already hold the resumed run."""
    if start is None or start.output is None:
        return config.output_dir, False
    # A folder that is not the source's is a new run's, and must be free unless there is nothing to begin from.
    return str(start.output), start.output == start.source or not start.candidates


def check_folders(config: Config, name: str, start: Start | None) -> None:
    """Raises UserError for all folders that the run cannot create or write; creates none."""
    rl, profiler, msprobe = config.rl_config, config.profiler_config, config.msprobe_config
    asked, continues = _folder_of(config, start)
    folders = {
        "output_dir": asked or ROOT / name,
        "actor_config.save": config.actor_config.save,
        "rl_config.tensorboard_dir": rl.tensorboard and rl.tensorboard_dir,
        "rl_config.save_prompt_completions_dir": rl.save_prompt_completions_data
        and rl.save_prompt_completions_dir,
        "profiler_config.profile_save_path": profiler.profile and profiler.profile_save_path,
        "msprobe_config.dump_path": msprobe.msprobe and msprobe.dump_path,
        "context.save_graphs_path": config.context.save_graphs and config.context.save_graphs_path,
    }
    refused = []
    for key, folder in folders.items():
        try:
            if folder:
                run_directory.check_can_be_made(folder, key)
            if key == "output_dir" and asked and not continues:
                run_directory.check_free(asked)
        except UserError as error:
            refused.append(str(error))
    if refused:
        raise error_of(refused)


def make_output_paths(config: Config, name: str, start: Start | None) -> OutputPaths:
    """Creates the run's folders. Raises UserError for those that cannot be created or written."""
    asked, continues = _folder_of(config, start)
    directory = run_directory.create(asked, name, continues=continues)
    label = label_of(directory)
    rl, save = config.rl_config, config.actor_config.save
    notes: list[str] = []
    if asked and not continues and (directory / run_directory.ROWS[0]).exists():
        aside = run_directory.put_earlier_aside(directory)
        notes.append(f"what an earlier run left before its first step: {aside}")

    def outside(key: str, asked: str | None, taken: str, kept: str) -> Path | None:
        if not asked:
            return None
        known = start.output_paths.get(kept) if start else None
        path = Path(known) if known and Path(known).is_dir() else None
        path = path or run_directory.own_folder(asked, label, taken, f"rl_config.{key}")
        notes.append(f"{key}: {path}")
        return path

    board = completions = None
    if rl.tensorboard:
        named = outside("tensorboard_dir", rl.tensorboard_dir, "*tfevents*", "tensorboard")
        board = named or directory / "tensorboard"
    if rl.save_prompt_completions_data:
        key, folder = "save_prompt_completions_dir", rl.save_prompt_completions_dir
        completions = outside(key, folder, "completions.jsonl", "completions") or directory
    model = directory / "hf"
    if save:
        model = run_directory.own_folder(save, label, "*", "actor_config.save")
    return OutputPaths(directory, model, completions, board, notes)


def continue_files(
    paths: OutputPaths, start: Start | None, chosen: Candidate | None, keep_model: bool
) -> list[str]:
    """Cuts the run's files back to the end of the chosen checkpoint's step; returns messages for the user.

    Raises UserError.
    """
    try:
        folders.remove_left_overs(paths.directory)
        if start is None:
            return []
        if chosen is None:
            aside = run_directory.put_earlier_aside(paths.directory)
            return [f"what an earlier run left is in {aside}"] if aside else []
        state = chosen.manifest.state
        # A row that is still open is written again.
        step, rows_until = state.step, state.step - (state.open_row is not None)
        source = start.source
        if start.output != source or source is None:
            if source is not None:
                for path, last in _row_files(paths, rows_until, step):
                    run_directory.copy_until(source / path.name, last, path)
            return []
        return _continue(paths, step, rows_until, keep_model)
    except OSError as error:
        raise UserError(
            f"The run in {paths.directory} cannot be resumed: {error.filename or ''}: {error.strerror}; make it "
            "writable or name another --output_dir."
        ) from error


def _row_files(paths: OutputPaths, rows_until: int, step: int) -> list[tuple[Path, int]]:
    """Returns each file of rows with the last step to keep in it, for a run that resumes after `step`."""
    completions = (paths.completions or paths.directory) / "completions.jsonl"
    return [(paths.directory / name, rows_until) for name in run_directory.ROWS] + [
        (completions, step),
        (paths.directory / "per_token.jsonl", step),
    ]


def _continue(paths: OutputPaths, step: int, rows_until: int, keep_model: bool) -> list[str]:
    notes = []
    label = f"until_step_{step}"
    for path, last in _row_files(paths, rows_until, step):
        rows = run_directory.cut_after(path, last) if path.exists() else 0
        if rows:
            aside = f"{path.name}.after_step_{last}"
            notes.append(
                f"{counted(rows, 'row')} of {path} after step {last} {'is' if rows == 1 else 'are'} now in {aside}"
            )
    run_directory.rename_aside(paths.directory / "config_resolved.yaml", label)
    if not keep_model:
        for folder in (paths.directory / "hf", paths.directory / "adapter"):
            renamed = run_directory.rename_aside(folder, label)
            notes += [f"{folder.name} of an earlier end is now {renamed.name}"] if renamed else []
    for later in folders.steps_in(paths.directory):
        if later > step:
            moved = folders.set_aside(paths.directory, later)
            notes.append(f"checkpoint step_{later:06d} is now {moved.name}")
    return notes


def run_name(files: Sequence[Path]) -> str:
    """Names a run after its configuration files, or after the folders of files with a generic name."""
    common = ("grpo_config", "config")
    return "-".join((file.stem in common and file.parent.name) or file.stem for file in files)
