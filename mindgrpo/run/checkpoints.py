"""Saves a run's checkpoints: their content, when they are due, and which are kept; resume.py loads them.

All methods are collective. A checkpoint is valid only once its step's row is written, so it is begun before the row and
committed after it. A failed write does not end the run: it is reported and counted, and the earlier checkpoint stays.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from mindgrpo.backend.remote_arrays import gathered
from mindgrpo.checkpoint import folders
from mindgrpo.checkpoint.folders import check_seen, to_delete
from mindgrpo.checkpoint.format import (
    Best,
    Identity,
    Manifest,
    RunState,
    StoredAdapters,
    StoredShapes,
    stored_groups,
)
from mindgrpo.checkpoint.remote_files import files_of
from mindgrpo.checkpoint.save import NotWritten, Saver
from mindgrpo.config import Config
from mindgrpo.errors import UserError, is_interactive
from mindgrpo.grpo.evaluation import Evaluation
from mindgrpo.grpo.roles import TrainedRoles
from mindgrpo.grpo.state import State
from mindgrpo.health.rank_health import resume_command
from mindgrpo.monitor.metrics import finite_or_null
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.resume import saved_roles

Phase = Callable[[str], AbstractContextManager[None]]


class RunCheckpoints:
    """Saves the checkpoints of one run, which starts or resumes with `state`."""

    def __init__(
        self,
        config: Config,
        roles: TrainedRoles,
        record: RunRecord,
        identity: Identity,
        state: State,
        phase: Phase,
    ) -> None:
        self._phase = phase
        self._rl = config.rl_config
        self._roles, self._record, self._identity = roles, record, identity
        self._backend = roles.backend
        self._saved = saved_roles(config, roles)
        self._saver = Saver(record.directory, self._backend)
        self._state = state
        # A run that continues in another folder has no checkpoints of the earlier folder.
        self._newest = state.step if state.step and self._is_there(state.step) else 0
        if state.best is not None and not self._is_there(state.best.step):
            state.best = None
        self._better: Best | None = None
        self._errors = 0
        self.enabled = self._rl.saves_checkpoints
        if self.enabled:
            check_seen(record.directory, self._backend)

    @property
    def newest(self) -> int:
        """Returns the step of the newest checkpoint, 0 if there is none."""
        return self._newest

    @property
    def best(self) -> dict[str, Any] | None:
        """Returns the reward, score, step and path of the best checkpoint on disk; None if there is none."""
        best = self._state.best
        if best is None:
            return None
        path = folders.folder_of(self._record.directory, best.step)
        return {
            "reward": best.reward or self._rl.save_ckpt_best,
            "score": best.score,
            "step": best.step,
            "path": str(path),
        }

    @property
    def resume_command(self) -> str:
        """Returns the shell command that resumes the run, or in an interactive session the Python call."""
        directory = self._record.directory
        if is_interactive():
            return f"train(), or rl_config.resume_training true and output_dir {directory}"
        return resume_command(sys.argv, sys.orig_argv, os.environ, directory)

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Makes a checkpoint of `step` due if its score is better than the best on disk.

        Raises UserError if save_ckpt_best names an unknown reward.
        """
        name, means = self._rl.save_ckpt_best, evaluation.means
        if name is None:
            return
        # Only then is it known which one is the best on disk.
        self.commit()
        if not means:
            raise UserError(
                f"rl_config.save_ckpt_best is '{name}', but nothing is scored: add reward functions, or leave it out."
            )
        if name not in means:
            raise UserError(
                f"rl_config.save_ckpt_best is '{name}', but the rewards are {', '.join(means)}; name one of these."
            )
        score = means[name]
        self._better = None
        sign, best = -1.0 if evaluation.is_loss else 1.0, self._state.best
        if step and score is not None and (best is None or sign * (score - best.score) > 0):
            self._better = Best(step=step, score=score, reward=name)
        if step == self._newest:
            self._state.best = self._best_with(step)

    def is_due(self, step: int, num_steps: int) -> bool:
        interval = self._rl.save_ckpt_interval
        if self._best_with(step) is not self._state.best:
            return True
        return bool(interval) and (step % (interval or 1) == 0 or step == num_steps)

    def begin(self, state: State, in_background: bool = True) -> dict[str, Any]:
        """Writes a step's checkpoint under a temporary name; returns metrics for the step's row."""
        self.commit()
        started, step, row = time.perf_counter(), state.step, state.open_row
        stored = RunState(
            step=step,
            prompts=state.position,
            updates=self._roles.policy.updates,
            weights_version=self._roles.policy.version,
            critic_updates=None if self._roles.critic is None else self._roles.critic.updates,
            best=self._best_with(step),
            open_row=None if row is None else finite_or_null(row)[0],
            unfinished=stored_groups(state.unfinished),
            baselines=dict(state.baselines),
            solved=sorted(state.solved),
            evaluations=list(state.evaluations),
            first_step_seconds=state.first_step_seconds,
            shapes={
                phase: StoredShapes(in_use=list(choice.in_use), excess=choice.excess)
                for phase, choice in self._roles.shape_choices.items()
            },
            **self._record.history(),
        )
        figures: dict[str, Any] = {}
        files, groups = files_of(stored.unfinished), state.unfinished
        remote = {n: [groups[g].samples[i].arrays[n] for g, i in keys] for n, keys in files.items()}
        plan = self._roles.plan
        lora = plan.lora and StoredAdapters(
            rank=plan.lora.rank, alpha=plan.lora.alpha, targets=list(plan.lora.targets)
        )
        described: dict[str, Any] = {
            "layout": f"train {plan.train.mesh}",
            "state": stored,
            "identity": self._identity,
            "lora": lora,
        }
        try:
            with self._phase("checkpoint"):
                figures["checkpoint/bytes"] = self._saver.begin(
                    step,
                    self._saved,
                    lambda saved: Manifest.model_validate(described | saved),
                    background=self._rl.save_ckpt_async and in_background,
                    bring=self._bring,
                    files=files,
                    arrays={n: gathered(own, self._backend.world) for n, own in remote.items()},
                )
        except NotWritten as reason:
            self._failed(step, reason)
        figures["time/checkpoint"] = time.perf_counter() - started
        return figures

    def _bring(self, role: str) -> None:
        # The roles of an update are those that a checkpoint holds; after an update they are there already.
        phase = "update_critic" if role.startswith("critic") else "update"
        self._roles.enter("reference" if role == "reference" else phase)

    def step_done(self) -> dict[str, Any]:
        """Commits a checkpoint that was written in the background; returns metrics for the next row."""
        if self._saver.pending is not None:
            written = self._backend.world.gather_objects(self._saver.is_written)
            if all(written):
                self.commit()
        return {"checkpoint/errors": self._errors} if self.enabled else {}

    def commit(self, wait: bool = True) -> None:
        """Commits the checkpoint that was begun, if any; without `wait`, only a foreground one."""
        step = self._saver.pending
        if step is None or (not wait and self._rl.save_ckpt_async):
            return
        try:
            with self._phase("checkpoint"):
                folder = self._saver.commit()
        except NotWritten as reason:
            self._failed(step, reason)
            return
        self._newest = step
        self._state.best = self._best_with(step)
        self._record.console.line(f"  checkpoint: {folder}")
        self._backend.health.report_checkpoint(folder, self.resume_command)
        if self._backend.rank == 0:
            self._delete_old()

    def settle(self, last_row: int) -> None:
        """Commits or discards the begun checkpoint after a file of the run could not be written.

        `last_row` is the last step whose row is written.
        """
        step = self._saver.pending
        if step is not None and step > last_row:
            self._saver.discard()
        self.commit()

    @property
    def safe(self) -> str:
        """Returns a clause for messages: which checkpoint can be resumed, and how."""
        if self._newest:
            folder = folders.folder_of(self._record.directory, self._newest)
            saved = f"the checkpoint of step {self._newest} is safe: {folder}"
            return f"{saved}; resume with: {self.resume_command}"
        if self.enabled:
            return "no checkpoint was finished"
        return "no checkpoint was asked for (rl_config.save_ckpt_interval is 0)"

    def _best_with(self, step: int) -> Best | None:
        """Returns the best checkpoint, given that `step`'s is on disk."""
        better = self._better
        return better if better is not None and better.step == step else self._state.best

    def _is_there(self, step: int) -> bool:
        is_there = folders.folder_of(self._record.directory, step).is_dir()
        # The first rank's folder is the run's.
        return bool(self._backend.world.gather_objects(is_there)[0])

    def _delete_old(self) -> None:
        run = self._record.directory
        best = self._state.best.step if self._state.best is not None else None
        for step in to_delete(folders.steps_in(run), self._rl.save_max_ckpt_num, best):
            try:
                folders.delete(run, step)
            except OSError as error:
                self._record.console.line(
                    f"  checkpoint of step {step} cannot be deleted: {error.filename}: {error.strerror}"
                )

    def _failed(self, step: int, reason: NotWritten) -> None:
        self._errors += 1
        kept = f"the newest is that of step {self._newest}" if self._newest else "there is none yet"
        self._record.console.line(
            f"  warning: the checkpoint of step {step} was not written: {reason}; {kept}"
        )
