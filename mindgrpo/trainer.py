"""Runs the training loop, the same on every rank: a step, its metrics, an evaluation where one is due, a checkpoint.

A step is defined in grpo/step.py: sync, rollout, score, reference, old log-probs, update, one call a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import Config, Loaded
from mindgrpo.errors import CannotWrite, UserError
from mindgrpo.grpo.build import evaluation_modes, make_roles, make_stepper
from mindgrpo.grpo.evaluation import Evaluator
from mindgrpo.grpo.metrics import all_metrics
from mindgrpo.grpo.scoring import RolloutScorer
from mindgrpo.grpo.settings import learning_rate_schedule
from mindgrpo.monitor.host_memory import HostMemoryExhausted
from mindgrpo.rollout.environment import environment_weight
from mindgrpo.rollout.turns import make_conversations, turn_metrics
from mindgrpo.run.checkpoints import restored_roles
from mindgrpo.run.guards import NanGuard, RewardGuard
from mindgrpo.run.host_limits import has_room_for_model
from mindgrpo.run.model_export import ModelExport
from mindgrpo.run.preflight import Reward
from mindgrpo.run.session import Session, open_run
from mindgrpo.run.stop_signals import Stop
from mindgrpo.run.trl_arguments import Rows, refuse, with_arguments


class GRPOTrainer:
    """Trains as `config` says, on every rank that msrun started, or alone.

    `reward_functions` (callables, built-in names, module:function or file.py:function) replace
    those of reward_config, each with weight 1.0 unless `reward_weights` says. `name` names the
    output folder. Raises UserError for whatever the configuration gets wrong.

    In TRL's form: `model` (a Hugging Face directory), `reward_funcs` (one or several) and `train_dataset` and
    `eval_dataset` (rows such as {"prompt": ..., "answer": ...}, or a path) take the place of the configuration's, and
    `config` is a mapping of its sections, or left out. `others`, such as `args`, are refused with the key to use.
    """

    def __init__(
        self,
        config: Config | Loaded | Mapping[str, Any] | None = None,
        reward_functions: Sequence[Reward] | None = None,
        name: str = "run",
        reward_weights: Sequence[float] | None = None,
        *,
        model: str | Path | None = None,
        reward_funcs: Reward | Sequence[Reward] | None = None,
        train_dataset: str | Path | Rows | None = None,
        eval_dataset: str | Path | Rows | None = None,
        **others: object,
    ) -> None:
        refuse("GRPOTrainer", others)
        if reward_funcs is not None:
            if reward_functions is not None:
                raise UserError(
                    "reward_functions and reward_funcs are both given; leave one of them out."
                )
            if isinstance(reward_funcs, str) or not isinstance(reward_funcs, Sequence):
                reward_functions = [reward_funcs]
            else:
                reward_functions = reward_funcs
        config = with_arguments(config, model, train_dataset, eval_dataset)
        self.run = run = open_run(config, name, reward_functions, reward_weights)
        inputs, backend, record = run.inputs, run.backend, run.record
        with run.watch.phase("load"):
            restored = restored_roles(run.config, run.start)
            with record.console.phase("loading weights"):
                self.roles = make_roles(run.plan, backend, inputs.sampling, restored=restored)
            self.session = Session(run, self.roles)
        weight = environment_weight(run.config)
        self.scorer = RolloutScorer(inputs.scorer, inputs.tokenizer, backend, weight)
        learning_rate = learning_rate_schedule(run.config, run.num_updates)
        self.conversations = make_conversations(run.config, inputs.tokenizer, inputs.turns, backend)
        self.stepper = make_stepper(
            self.roles,
            inputs.sampling,
            run.prompts,
            self.scorer,
            learning_rate,
            run.watch.step_phase,
            self.conversations,
            self.session.unfinished,
        )
        self.evaluator = Evaluator(self.stepper.replicas, self.scorer, run.config.rl_config.seed)
        self.export = ModelExport(self.roles, inputs.tokenizer)
        on_first_rank(backend, inputs.check_rewards)
        say, write = record.console.line, self.export.write
        self.reward_guard = RewardGuard(run.config.reward_config.max_failed_steps, run.num_steps)
        self.nan_guard = NanGuard(run.config, backend, record.directory, say, write)

    def train(self, **others: object) -> Path:
        """Runs to the end and writes the model; returns the run's folder.

        `others` are refused, with the key that takes their place. Raises SystemExit after a signal, with a checkpoint
        of the steps that are done where they were asked for, and CannotWrite, a UserError that names the newest
        checkpoint, where the disk is full.
        """
        refuse("GRPOTrainer.train", others)
        try:
            directory = self._train()
        finally:
            self.run.backend.health.end_checks()
            # Tells them that the run has failed, unless it was closed.
            self.run.record.trackers.ask_to_finish(is_done=False)
        # The other ranks have ended: none of them waits.
        self.run.record.trackers.close(self.run.config.monitor_config.tracker_finish_seconds)
        return directory

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
        if ended is not None and ended.status:
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
        self.scorer.close()
        if self.conversations is not None:
            self.conversations.close()
        engine = self.roles.engine.capabilities
        self.roles.engine.close()
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
                session.step_done(self._step(step), self.stepper.unfinished)
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

    def _step(self, step: int) -> dict[str, Any]:
        """Runs step number `step`, from 0, and returns its metrics."""
        run, outcome = self.run, self.stepper.run(step)
        run.watch.dump(outcome)
        owners = run.prompts.owners(outcome.batch.rollout.group_ids)
        run.record.samples(step + 1, owners, outcome)
        self.reward_guard.step_done(step + 1, outcome.scored.scores)
        metrics = all_metrics(outcome, self.roles, run.prompts.position)
        if run.inputs.turns is not None:
            metrics |= turn_metrics(outcome.batch.rollout.messages, run.inputs.turns.names)
        return metrics | self.nan_guard.step_done(step, outcome, self.roles.policy.version)

    def _evaluate(self, step: int) -> dict[str, Any]:
        """Evaluates after `step` steps and returns the metrics; none without held-out prompts."""
        run, held_out = self.run, self.run.inputs.held_out
        if held_out is None:
            return {}
        run.stopping.check()
        prompts = held_out[: run.config.rl_config.eval_samples]
        shown = run.record.console.phase(f"evaluating on {len(prompts)} held-out prompts")
        with shown, run.watch.phase("evaluate"):
            self.roles.refresh_engine()
            version = self.roles.enter_rollout()
            modes = evaluation_modes(run.config, run.inputs.sampling)
            outcomes = self.evaluator.run(prompts, modes, step, version, run.stopping.check)
        run.stopping.check()
        self.session.checkpoints.evaluated(step, outcomes[0].means)
        return run.record.evaluated(step, outcomes)

    def _write_model(self) -> None:
        record = self.run.record
        with self.run.watch.phase("export"), record.console.phase("writing the model"):
            self.export.write_all(record.model_directory, record.directory / "adapter")
        self.session.has_model = True
