"""One start of the program within a run: the steps that were done before it, those done now, and how it ends."""

from __future__ import annotations

from typing import Any

from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.checkpoint.unfinished import restored_groups
from mindgrpo.grpo.roles import Roles
from mindgrpo.rollout.partial import PartialGroup
from mindgrpo.run.checkpoints import RunCheckpoints
from mindgrpo.run.open_run import OpenRun
from mindgrpo.run.resume import restore, unsaved_digests
from mindgrpo.run.start import identity_of
from mindgrpo.run.stop_signals import Stop


class Session:
    """Begins where the run's `start` says, or at the beginning: sets roles and sampler to that, opens the files.

    `done` steps are done. `open_row` has the figures of the last of them while its evaluation is being made.
    `unfinished` are groups of partial rollouts that go on in the next step.
    """

    def __init__(self, run: OpenRun, roles: Roles) -> None:
        self.num_steps = run.num_steps
        self._record, self._sampler = record, sampler = run.record, run.prompts.sampler
        config, inputs, start = run.config, run.inputs, run.start
        identity = identity_of(config, inputs)
        if config.rl_config.saves_checkpoints:
            identity = identity_of(config, inputs, unsaved_digests(config, roles))
        chosen = state = None
        self.done = 0
        self.open_row: dict[str, Any] | None = None
        self.unfinished: tuple[PartialGroup, ...] = ()
        if start is not None and start.candidates:
            with record.console.phase("reading the checkpoint"):
                chosen = restore(start, config, roles, identity, record.console.line)
        if chosen is not None:
            state = chosen.manifest.state
            self.done, self.open_row, sampler.position = state.step, state.open_row, state.prompts
            prompts = run.prompts.token_ids([group.position for group in state.unfinished])
            self.unfinished = restored_groups(state.unfinished, prompts)
            record.console.line(
                f"  resumed from {chosen.folder}: {self.done} of {run.num_steps} steps are done"
            )
        self._taken, self._last_row = sampler.position, self.done
        is_over = self.done >= run.num_steps and self.open_row is None
        self.has_model = is_over and (record.model_directory / "config.json").exists()
        record.begin(chosen, self.has_model)
        self.checkpoints = RunCheckpoints(config, roles, record, identity, state, run.watch.phase)

    def step_done(self, figures: dict[str, Any], unfinished: tuple[PartialGroup, ...] = ()) -> None:
        """The weights and the sampler are those after one more step; its row is still open."""
        self.done += 1
        self._taken, self.unfinished = self._sampler.position, unfinished
        self.open_row = figures

    def write_row(self, evaluation: dict[str, Any]) -> None:
        """Of the step that is done, with its evaluation's figures; its checkpoint, where one is due, around it."""
        checkpoints, figures = self.checkpoints, {**(self.open_row or {}), **evaluation}
        self.open_row = None
        figures |= checkpoints.step_done()
        if checkpoints.is_due(self.done, self.num_steps) and checkpoints.newest < self.done:
            figures |= checkpoints.begin(self.done, self._taken, self.unfinished)
        self._record.step(self.done, self.num_steps, figures)
        # A checkpoint of a step without its rows would go on without them.
        self._record.check_written()
        self._last_row = self.done
        checkpoints.commit(wait=False)

    def save(self) -> None:
        """A checkpoint of the steps that are done, unless there is one or none was asked for. Raises CannotWrite."""
        self._record.check_written()
        checkpoints = self.checkpoints
        checkpoints.commit()
        if checkpoints.enabled and checkpoints.newest < self.done:
            checkpoints.begin(
                self.done, self._taken, self.unfinished, self.open_row, in_background=False
            )
            checkpoints.commit()

    def settle(self) -> None:
        """Leaves what is whole of a run that ends because a file cannot be written."""
        self.checkpoints.settle(self._last_row)

    def tell_how_to_go_on(self, ended: Stop) -> None:
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
