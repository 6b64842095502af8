"""Opens a run, and keeps one start of the program within it: the steps done before it, those done now, how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindgrpo.algorithm.sample import NOTHING_CARRIED, CarriedOver
from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint.differences import scoring_changes
from mindgrpo.checkpoint.folders import Start, folder_of
from mindgrpo.checkpoint.format import restored_groups
from mindgrpo.checkpoint.remote_files import read_files
from mindgrpo.config import Config, Loaded, config_with, schedule_notes
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.data.sources import Ranks
from mindgrpo.grpo.roles import TrainedRoles
from mindgrpo.grpo.settings import runtime_settings
from mindgrpo.monitor.trackers.contract import check_installed
from mindgrpo.plan.run_plan import RunPlan
from mindgrpo.run.checkpoints import RunCheckpoints, restore, unsaved_digests
from mindgrpo.run.host_limits import refuse_small_disk
from mindgrpo.run.named_sources import with_paths_of_ranks
from mindgrpo.run.preflight import Inputs
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.start import (
    changes_since,
    check_same_start,
    find_start,
    identity_of,
    saved_values,
)
from mindgrpo.run.stop_signals import Stop, Stopping
from mindgrpo.run.watch import Watch


@dataclass(frozen=True)
class OpenRun:
    """Holds what a run of `num_steps` steps has before its weights are read; `start` is None unless it resumes one."""

    config: Config
    backend: Backend
    inputs: Inputs
    prompts: PromptSource
    start: Start | None
    record: RunRecord
    watch: Watch
    stopping: Stopping
    num_steps: int

    @property
    def plan(self) -> RunPlan:
        return self.inputs.plan

    @property
    def num_updates(self) -> int:
        return self.num_steps * self.plan.batch.updates_per_step


# Reads what a run is given, for a number of ranks that share the reading; the last says whether this one scores.
Prepare = Callable[[Config, int, Ranks, bool], Inputs]


def open_run(config: Config | Loaded, name: str, prepare: Prepare) -> OpenRun:
    """Opens a run on all ranks together and shows the banner. Raises UserError, on all ranks alike."""
    launched = float(os.environ.get("MINDGRPO_LAUNCHED_AT", time.time()))
    loaded = config if isinstance(config, Loaded) else config_with(config, {})
    settings = runtime_settings(loaded.config)
    backend = connect(loaded.config.context.target, dict(os.environ), settings)
    loaded = loaded.on_ranks(backend.world_size)
    check_same_start(loaded.config, backend)
    ranks = Ranks(backend.rank, backend.world_size, backend.world.gather_objects)
    on_first_rank(backend, lambda: check_installed(loaded.config.monitor_config.trackers))
    start, loaded = on_first_rank(backend, lambda: find_start(loaded, name))
    loaded = with_paths_of_ranks(loaded, backend, earlier=saved_values(start))
    config, rl = loaded.config, loaded.config.rl_config
    inputs = prepare(config, backend.world_size, ranks, backend.rank == 0)
    prompts = PromptSource(inputs.prompts, rl.seed, inputs.plan.batch.prompts_per_step)
    changes = on_first_rank(backend, lambda: changes_since(start, config, inputs))
    on_first_rank(backend, lambda: refuse_small_disk(inputs.plan, start))
    record = RunRecord(loaded, name, backend, launched, start)
    stopping = Stopping(backend, launched, rl.max_seconds)
    watch = Watch(config, backend, record, stopping)
    num_steps = inputs.plan.num_steps(len(inputs.prompts))
    run = OpenRun(config, backend, inputs, prompts, start, record, watch, stopping, num_steps)
    notes = [*inputs.notes, *schedule_notes(config, run.num_updates), *backend.unmet, *watch.notes]
    record.banner(inputs, [*notes, *(start.notes if start else []), *changes])
    return run


class Session:
    """Begins where the run's `start` says, or at the beginning: sets roles and prompts to that, opens the files.

    `done` steps are done. `open_row` has the metrics of the last of them while its evaluation is being made.
    `carried` is what the last of them has left to the next one.
    """

    def __init__(self, run: OpenRun, roles: TrainedRoles) -> None:
        self.num_steps = run.num_steps
        self._record, self._prompts = record, prompts = run.record, run.prompts
        config, inputs, start = run.config, run.inputs, run.start
        saves = config.rl_config.saves_checkpoints
        unsaved = unsaved_digests(config, roles) if saves else None
        # The first rank alone has the rewards.
        identity = on_first_rank(run.backend, lambda: identity_of(config, inputs, unsaved))
        chosen = state = None
        self.done = 0
        self.open_row: dict[str, Any] | None = None
        self.carried = NOTHING_CARRIED
        if start is not None and start.candidates:
            with record.console.phase("reading the checkpoint"):
                chosen = restore(start, config, roles, identity, record.console.line)
        if chosen is not None:
            state = chosen.manifest.state
            self.done, self.open_row, prompts.position = state.step, state.open_row, state.prompts
            owners = prompts.at([group.position for group in state.unfinished])
            files = read_files(chosen.folder, chosen.manifest)
            groups = restored_groups(state.unfinished, [owner.ids for owner in owners], files)
            self.carried = CarriedOver(groups, state.baselines, tuple(state.solved))
            prompts.solved = set(state.solved)
            for phase, shapes in state.shapes.items():
                if phase in roles.shape_choices:
                    roles.shape_choices[phase].restore(shapes.in_use, shapes.excess)
            record.console.line(
                f"  resumed from {chosen.folder}: {self.done} of {run.num_steps} steps are done"
            )
            changes = scoring_changes(chosen.manifest.identity, identity)
            if state.best is not None and changes:
                record.console.line(
                    f"  the best checkpoint so far, of step {state.best.step}, is not compared with later ones: "
                    f"{'; '.join(map(str, changes))}"
                )
                state = state.model_copy(update={"best": None})
        self._taken, self._last_row = prompts.position, self.done
        is_over = self.done >= run.num_steps and self.open_row is None
        self.has_model = is_over and (record.model_directory / "config.json").exists()
        record.begin(chosen, self.has_model)
        self.checkpoints = RunCheckpoints(config, roles, record, identity, state, run.watch.phase)

    def step_done(self, metrics: dict[str, Any], carried: CarriedOver) -> None:
        """Counts a step: weights and prompts are those after it, its row is still open."""
        self.done += 1
        self._taken, self.carried = self._prompts.position, carried
        self.open_row = metrics

    def write_row(self, evaluation: dict[str, Any]) -> None:
        """Writes the step's row with its evaluation's metrics, and its checkpoint where one is due."""
        checkpoints, metrics = self.checkpoints, {**(self.open_row or {}), **evaluation}
        self.open_row = None
        metrics |= checkpoints.step_done()
        if checkpoints.is_due(self.done, self.num_steps) and checkpoints.newest < self.done:
            metrics |= checkpoints.begin(self.done, self._taken, self.carried)
        self._record.step(self.done, self.num_steps, metrics)
        # A checkpoint of a step without its rows would be resumed without them.
        self._record.check_written()
        self._last_row = self.done
        checkpoints.commit(wait=False)

    def save(self) -> None:
        """Saves a checkpoint of the steps done, unless there is one or none was asked for. Raises CannotWrite."""
        self._record.check_written()
        checkpoints = self.checkpoints
        checkpoints.commit()
        if checkpoints.enabled and checkpoints.newest < self.done:
            checkpoints.begin(
                self.done, self._taken, self.carried, self.open_row, in_background=False
            )
            checkpoints.commit()

    def settle(self) -> None:
        """Keeps what is complete of a run that ends because a file cannot be written."""
        self.checkpoints.settle(self._last_row)

    def say_how_to_resume(self, ended: Stop) -> None:
        say = self._record.console.line
        say(f"  {ended.reason}: the run ends with {self.done} of {self.num_steps} steps done")
        if self.checkpoints.newest:
            say(f"  saved: {folder_of(self._record.directory, self.checkpoints.newest)}")
            say(f"  resume with: {self.checkpoints.resume_command}")
        elif self.checkpoints.enabled:
            say("  nothing was saved: no step was finished")
        else:
            say(
                "  nothing was saved: rl_config.save_ckpt_interval is 0, which means no checkpoints"
            )
