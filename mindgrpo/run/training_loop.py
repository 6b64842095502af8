"""Runs the steps of a training run to its end, the same on every rank: metrics, evaluations, checkpoints, the model.

GRPO and supervised training differ in a step and in an evaluation.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.algorithm.sample import NOTHING_CARRIED
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import Config, Loaded, config_with
from mindgrpo.data.sources import Ranks
from mindgrpo.errors import CannotWrite, UserError, counted, is_interactive, writing
from mindgrpo.grpo.roles import TrainedRoles
from mindgrpo.monitor.host_memory import HostMemoryExhausted
from mindgrpo.report.inline import ReportFrame
from mindgrpo.report.write import FILE_NAME, write_at_end
from mindgrpo.rollout.engine import Capabilities
from mindgrpo.run.checkpoints import restored_roles
from mindgrpo.run.guards import NanGuard
from mindgrpo.run.host_limits import has_room_for_model
from mindgrpo.run.model_export import ModelExport
from mindgrpo.run.preflight import Inputs
from mindgrpo.run.session import Session, open_run
from mindgrpo.run.stop_signals import Interrupted, Stop
from mindgrpo.run.trl_arguments import refuse


class TrainingLoop(ABC):
    """`carried` is what a step has left to the next one."""

    roles: TrainedRoles

    def __init__(self, config: Config | Loaded, name: str) -> None:
        self._config, self._name = config, name
        self._open(config)

    def _open(self, config: Config | Loaded) -> None:
        """Opens the run and reads its weights, or those of the checkpoint from which it continues."""
        run = self.run = open_run(config, self._name, self._prepare)
        with run.watch.phase("load"):
            restored = restored_roles(run.config, run.start)
            with run.record.console.phase("loading weights"):
                self.roles = self._make_roles(restored)
            self.session = Session(run, self.roles)
        self.export = ModelExport(self.roles, run.inputs.tokenizer)
        self.carried = NOTHING_CARRIED
        self.nan_guard = NanGuard(
            run.config,
            run.backend,
            run.record.directory,
            run.record.console.line,
            self.export.write,
        )
        self._is_over = False

    @abstractmethod
    def _prepare(self, config: Config, world_size: int, ranks: Ranks, scores: bool) -> Inputs:
        """Reads what the run is given; see session.Prepare."""

    @abstractmethod
    def _make_roles(self, restored: tuple[str, ...]) -> TrainedRoles:
        """Makes the roles of `self.run`, and does not read the weights of those that are `restored`."""

    @abstractmethod
    def _step(self, step: int) -> dict[str, Any]:
        """Runs step number `step`, from 0, and returns its metrics."""

    @abstractmethod
    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluates after `step` steps and returns the metrics; none without held-out rows."""

    def _close_workers(self) -> Capabilities | None:
        """Ends what works for the run; returns what its engine is, if there is one."""
        return None

    def train(self, resume_from_checkpoint: bool | str | None = None, **others: object) -> Path:
        """Runs to the end and writes the model; returns the run's folder.

        A run that has ended before its last step continues from its newest checkpoint when this is called again. The
        weights in memory are given up at the end; those of the model are in the folder.
        `resume_from_checkpoint` is TRL's, and has to be what the trainer was made with: rl_config.resume_training.
        `others` are refused, with the key that takes their place. Raises SystemExit after a signal, with a checkpoint
        of the steps that are done where they were asked for, and in an interactive session, such as a notebook's,
        KeyboardInterrupt; CannotWrite, a UserError that names the newest checkpoint, where the disk is full.
        """
        refuse(f"{type(self).__name__}.train", others)
        if self._is_over:
            self._reopen()
        else:
            self._check_resumes(resume_from_checkpoint)
        try:
            directory = self._train()
        except BaseException:
            # Where the process stays, so would they. Elsewhere they end with it, and the other ranks with the launcher.
            if is_interactive() and not self._is_over and self.run.backend.world_size == 1:
                self.run.watch.close()
                self._close_workers()
                self._give_up_memory()
            raise
        finally:
            self._is_over = True
            self.run.backend.health.end_checks()
            self.run.record.console.end_live()
            # Tells them that the run has failed, unless it was closed.
            self.run.record.trackers.ask_to_finish(is_done=False)
        # The other ranks have ended: none of them waits.
        self.run.record.trackers.close(self.run.config.monitor_config.tracker_finish_seconds)
        return directory

    @property
    def is_finished(self) -> bool:
        """Tells whether `train` has run all steps and written the model, so that nothing is left to continue."""
        return self.session.done >= self.session.num_steps and self.session.has_model

    def report(self) -> ReportFrame:
        """Writes the run's page, with the steps that are done; a notebook shows what is returned. Raises UserError."""
        directory = self.run.record.directory
        if self.run.backend.rank == 0:
            _, why = write_at_end(directory)
            if why is not None:
                raise UserError(why)
        return ReportFrame(directory / FILE_NAME)

    def _reopen(self) -> None:
        session, directory = self.session, self.run.record.directory
        if self.is_finished:
            raise UserError(
                f"train() has run the {counted(session.num_steps, 'step')} of {directory}; make another trainer, with "
                f"actor_config.load {self.run.record.model_directory} to train this model further."
            )
        if not session.checkpoints.newest:
            raise UserError(
                f"train() has ended after {session.done} of {session.num_steps} steps of {directory} without a "
                "checkpoint to continue from; make another trainer, with rl_config.save_ckpt_interval to have one."
            )
        keys = {"rl_config.resume_training": True, "output_dir": str(directory)}
        self._open(config_with(self._config, keys))

    def _give_up_memory(self) -> None:
        for pool in self.run.backend.live_pools:
            pool.release()

    def _check_resumes(self, checkpoint: bool | str | None) -> None:
        if checkpoint and self.run.config.rl_config.resume_training != checkpoint:
            raise UserError(
                f"{type(self).__name__}.train gets resume_from_checkpoint={checkpoint!r}, but a trainer loads its "
                "checkpoint when it is made; set rl_config.resume_training to it, or write "
                f"args=GRPOConfig(resume_from_checkpoint={checkpoint!r}, ...)."
            )

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copies the model that `train` has written to `output_dir`, as TRL's method of that name; returns the folder.

        Without `output_dir`, it is where `train` wrote it. Only the first rank copies. Raises UserError before
        `train`, and for a folder that holds something.
        """
        written = self.run.record.model_directory
        if not self.session.has_model:
            raise UserError("save_model copies the model that train writes; call train first.")
        if output_dir is None:
            return written
        target = Path(output_dir)
        if self.run.backend.rank == 0:
            if target.exists() and (not target.is_dir() or any(target.iterdir())):
                raise UserError(
                    f"save_model: {target} holds something and is not overwritten; name another folder."
                )
            with writing(target):
                shutil.copytree(written, target, dirs_exist_ok=True)
        return target

    def _train(self) -> Path:
        run, session = self.run, self.session
        try:
            with run.stopping.listening():
                ended = self._run_to_end()
            self._close(ended)
            run.record.check_written()
        except CannotWrite as failed:
            raise CannotWrite(f"{str(failed).removesuffix('.')}; {self._what_is_left()}") from None
        if ended is not None:
            session.say_how_to_resume(ended)
        run.backend.close()
        self._give_up_memory()
        self._is_over = True
        if ended is not None and ended.status:
            if is_interactive():
                raise Interrupted(f"the run was interrupted after {counted(session.done, 'step')}")
            raise SystemExit(ended.status)
        return run.record.directory

    def _run_to_end(self) -> Stop | None:
        """Runs the steps; returns why the run has ended before its last step, if it has. Raises CannotWrite."""
        session = self.session
        try:
            try:
                self._run_steps()
                session.checkpoints.commit()
                if not session.has_model:
                    self._write_model()
            except Stop as stop:
                session.save()
                return stop
        except CannotWrite:
            session.settle()
            self._rescue_model()
            raise
        return None

    def _close(self, ended: Stop | None) -> None:
        run, session = self.run, self.session
        run.backend.health.enter("close")
        run.watch.close()
        engine = self._close_workers()
        reason = ended.reason if ended else None
        run.record.close(session.done, engine, reason, session.checkpoints.best)

    def _what_is_left(self) -> str:
        """Says what was saved, as part of a sentence, where a file could not be written."""
        session, left = self.session, self.session.checkpoints.safe
        where = f"the model after step {session.done} is in {self.run.record.model_directory}"
        model = [where] if session.has_model else []
        if session.checkpoints.newest:
            return "; ".join([*model, left])  # its command comes last, without a full stop
        return "; ".join([left, *model]) + "."

    def _rescue_model(self) -> None:
        """Writes the model of a run that cannot continue, where there is room for it."""
        run, session = self.run, self.session
        has_room = on_first_rank(
            run.backend, lambda: has_room_for_model(run.plan, run.record.model_directory)
        )
        if has_room and session.done and not session.has_model:
            with suppress(CannotWrite):
                self._write_model()

    def _run_steps(self) -> None:
        run, session, rl = self.run, self.session, self.run.config.rl_config
        run.backend.health.enter("loop")
        if session.open_row is not None:
            session.write_row(self._evaluate(session.done))
        elif session.done == 0 and rl.eval_on_start:
            self._evaluate(0)
        elif session.done == 0:
            run.record.not_evaluated()
        for step in range(session.done, run.num_steps):
            with run.watch.step(step):
                session.step_done(self._step(step), self.carried)
                is_last = step + 1 == run.num_steps
                is_due = is_last or (rl.eval_steps and (step + 1) % rl.eval_steps == 0)
                evaluation = self._evaluate(step + 1) if is_due else {}
            session.write_row(evaluation)
            exceeded = run.watch.memory_exceeded()
            if exceeded:
                session.save()
                self._write_model()
                raise HostMemoryExhausted(f"the run ends after step {step + 1}: {exceeded}")
            if not is_last:
                run.stopping.check_time()

    def _write_model(self) -> None:
        record = self.run.record
        with self.run.watch.phase("export"), record.console.phase("writing the model"):
            self.export.write_all(record.model_directory, record.directory / "adapter")
        self.session.has_model = True
