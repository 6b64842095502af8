"""The training loop, the same on every rank: open, steps, export, close.

The configuration selects GRPO (grpo/step.py) or supervised training (grpo/supervised.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from mindgrpo.backend.connect import connect
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.checkpoint.folders import folder_of
from mindgrpo.config import Config, Loaded, config_with, schedule_notes
from mindgrpo.data.prompt_source import PromptSource
from mindgrpo.data.sources import Ranks
from mindgrpo.errors import CannotWrite, counted, is_interactive
from mindgrpo.grpo.build import make_roles, make_trained_roles, runtime_settings
from mindgrpo.grpo.roles import Roles, TrainedRoles
from mindgrpo.grpo.scoring import CompletionForm, RolloutScorer
from mindgrpo.grpo.state import Run
from mindgrpo.grpo.step import Stepper, make_stepper
from mindgrpo.grpo.supervised import SupervisedStepper
from mindgrpo.health.heartbeat import BETWEEN, IDLE
from mindgrpo.monitor.host_memory import HostMemoryExhausted
from mindgrpo.monitor.trackers.contract import check_installed
from mindgrpo.rollout.environment import environment_weight
from mindgrpo.rollout.turns import make_conversations
from mindgrpo.run.checkpoints import RunCheckpoints
from mindgrpo.run.guards import NanGuard, RewardGuard
from mindgrpo.run.host_limits import disk, has_room_for_model, refuse
from mindgrpo.run.model_export import ModelExport
from mindgrpo.run.named_sources import with_paths_of_ranks
from mindgrpo.run.preflight import Reward, prepare, prepare_supervised
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.resume import restored_roles, resume, unsaved_digests
from mindgrpo.run.start import (
    changes_since,
    check_same_start,
    find_start,
    identity_of,
    saved_values,
)
from mindgrpo.run.stop_signals import Interrupted, Stop, Stopping
from mindgrpo.run.watch import Watch


@dataclass(frozen=True)
class Rewards:
    """Reward functions passed by a program instead of the configuration's, with weights and format of completions."""

    functions: Sequence[Reward] | None = None
    weights: Sequence[float] | None = None
    form: CompletionForm = "text"


class TrainingLoop:
    """Runs the steps of a run: `run` holds the fixed components, `state` what steps change besides weights."""

    def __init__(self, config: Config | Loaded, name: str, rewards: Rewards) -> None:
        self._config, self._name, self._rewards = config, name, rewards
        self._open(config)

    def _open(self, config: Config | Loaded) -> None:
        """Checks the inputs, connects the ranks, loads weights and resumes. Collective.

        Raises UserError on all ranks alike.
        """
        launched = float(os.environ.get("MINDGRPO_LAUNCHED_AT", time.time()))
        loaded = config if isinstance(config, Loaded) else config_with(config, {})
        settings = runtime_settings(loaded.config)
        backend = connect(loaded.config.context.target, dict(os.environ), settings)
        try:
            self._load(backend, loaded.on_ranks(backend.world_size), launched)
        except BaseException:
            # The process may be a notebook's, and stay.
            backend.health.end_checks()
            raise
        # Until `train` is called, which may be whenever a user likes.
        backend.health.enter(IDLE)

    def _load(self, backend: Backend, loaded: Loaded, launched: float) -> None:
        """Does what `_open` says, on a connected backend; `launched` in seconds since the epoch."""
        check_same_start(loaded.config, backend)
        ranks = Ranks(backend.rank, backend.world_size, backend.world.gather_objects)
        on_first_rank(backend, lambda: check_installed(loaded.config.monitor_config.trackers))
        start, loaded = on_first_rank(backend, lambda: find_start(loaded, self._name))
        loaded = with_paths_of_ranks(loaded, backend, earlier=saved_values(start))
        config, rl = loaded.config, loaded.config.rl_config
        if loaded.is_supervised:
            inputs = prepare_supervised(config, backend.world_size, ranks)
        else:
            own, scores = self._rewards, backend.rank == 0
            if config.reward_config.score_as_ended:
                # The first rank of each generating replica.
                parallel = config.generate_config.parallel_config
                scores = backend.rank % parallel.replica_ranks == 0
            inputs = prepare(
                config, backend.world_size, own.functions, own.weights, ranks, scores, own.form
            )
        plan = inputs.plan
        num_steps = plan.num_steps(len(inputs.prompts))
        num_updates = num_steps * plan.batch.updates_per_step
        changes = on_first_rank(backend, lambda: changes_since(start, config, inputs))
        on_first_rank(backend, lambda: refuse(disk(plan, start)))
        self.record = record = RunRecord(loaded, self._name, backend, launched, start)
        self.stopping = Stopping(backend, launched, rl.max_seconds)
        self.watch = watch = Watch(config, backend, record, self.stopping)
        notes = [*inputs.notes, *schedule_notes(config, num_updates), *backend.unmet, *watch.notes]
        record.banner(inputs, [*notes, *(start.notes if start else []), *changes])
        with watch.phase("load"):
            restored = restored_roles(config, start)
            with record.console.phase("loading weights"):
                make: Callable[..., TrainedRoles] = make_trained_roles
                if plan.generates:
                    make = partial(make_roles, texts=inputs.classifier_texts)
                how = {"restored": restored, "images": inputs.images}
                roles = make(plan, backend, inputs.sampling, **how)
            self.run = Run(
                config=config,
                backend=backend,
                inputs=inputs,
                roles=roles,
                prompts=PromptSource(inputs.prompts, rl.seed, plan.batch.prompts_per_step),
                num_steps=num_steps,
                phases=watch.step_phase,
                beside=watch.beside,
            )
            unsaved = unsaved_digests(config, roles) if rl.saves_checkpoints else None
            # The first rank alone has the rewards.
            identity = on_first_rank(backend, lambda: identity_of(config, inputs, unsaved))
            self.state, chosen = resume(self.run, start, identity, record.console)
            is_over = self.state.step >= num_steps and self.state.open_row is None
            self.has_model = is_over and (record.model_directory / "config.json").exists()
            record.begin(self.state, chosen, self.has_model)
            self.checkpoints = RunCheckpoints(
                config, roles, record, identity, self.state, watch.phase
            )
        self._last_row = self.state.step
        self.export = ModelExport(roles, inputs.tokenizer)
        self.stepper = _stepper_of(self.run)
        on_first_rank(backend, inputs.check_rewards)
        self._nan_guard = NanGuard(
            config, backend, record.directory, record.console.line, self.export.write
        )
        self._reward_guard = RewardGuard(config.reward_config.max_failed_steps, num_steps)
        self._is_over = False

    def _train(self) -> Path:
        """Runs all steps, exports the model and closes; returns the run's folder.

        Raises SystemExit or KeyboardInterrupt after a signal, and CannotWrite.
        """
        try:
            with self.stopping.listening():
                ended = self._run_to_end()
            self._close(ended)
            self.record.check_written()
        except CannotWrite as failed:
            raise CannotWrite(f"{str(failed).removesuffix('.')}; {self._what_is_left()}") from None
        if ended is not None:
            self._say_how_to_resume(ended)
        self.run.backend.close()
        self._give_up_memory()
        self._is_over = True
        if ended is not None and ended.status:
            if is_interactive():
                steps = counted(self.state.step, "step")
                raise Interrupted(f"the run was interrupted after {steps}")
            raise SystemExit(ended.status)
        return self.record.directory

    def _run_to_end(self) -> Stop | None:
        """Runs the steps; returns why the run ended before its last step, or None. Raises CannotWrite."""
        try:
            try:
                self._run_steps()
                self.checkpoints.commit()
                if not self.has_model:
                    self._write_model()
            except Stop as stop:
                self._save()
                return stop
        except CannotWrite:
            self.checkpoints.settle(self._last_row)
            self._rescue_model()
            raise
        return None

    def _run_steps(self) -> None:
        state, rl, is_new = self.state, self.run.config.rl_config, self.state.step == 0
        self.run.backend.health.enter(BETWEEN)
        if state.open_row is not None:
            self._end_step(self._evaluate())
        elif is_new and rl.eval_on_start:
            self._evaluate()
        elif is_new:
            state.evaluations.append({})
        while state.step < self.run.num_steps:
            with self.watch.step(state.step):
                state.open_row = self._step()
                is_last = state.step == self.run.num_steps
                is_due = is_last or (rl.eval_steps and state.step % rl.eval_steps == 0)
                evaluation = self._evaluate() if is_due else {}
            self._end_step(evaluation)
            exceeded = self.watch.memory_exceeded()
            if exceeded:
                self._save()
                self._write_model()
                raise HostMemoryExhausted(f"the run ends after step {state.step}: {exceeded}")
            if not is_last:
                self.stopping.check_time()

    def _step(self) -> dict[str, Any]:
        """Runs the next step and returns its metrics. Raises Stop, before the weights change."""
        run, state = self.run, self.state
        outcome = self.stepper.run(state)
        self.watch.dump(outcome)
        if run.inputs.plan.generates:
            owners = run.prompts.owners(outcome.batch.rollout.group_ids)
            self.record.samples(state.step, owners, outcome)
            self._reward_guard.step_done(state.step, outcome.scored.scores)
        version = run.roles.policy.version
        metrics = self.stepper.metrics(outcome)
        return metrics | self._nan_guard.step_done(state.step - 1, outcome, version)

    def _evaluate(self) -> dict[str, Any]:
        """Evaluates the policy; returns its metrics, none without held-out rows. Raises Stop."""
        run, step = self.run, self.state.step
        if run.inputs.held_out is None:
            return {}
        self.stopping.check()
        rows = run.inputs.held_out[: run.config.rl_config.eval_samples]
        kind = "held-out prompt" if run.inputs.plan.generates else "held-out row"
        shown = self.record.console.phase(f"evaluating on {counted(len(rows), kind)}")
        with shown, self.watch.phase("evaluate"):
            evaluation = self.stepper.evaluate(rows, step, self.stopping.check)
        self.stopping.check()
        self.checkpoints.evaluated(step, evaluation)
        return self.record.evaluated(step, evaluation)

    def _end_step(self, evaluation: dict[str, Any]) -> None:
        """Writes the step's row, with the evaluation's metrics, and a checkpoint if one is due."""
        state, checkpoints = self.state, self.checkpoints
        metrics = {**(state.open_row or {}), **evaluation}
        state.open_row = None
        metrics |= checkpoints.step_done()
        if checkpoints.is_due(state.step, self.run.num_steps) and checkpoints.newest < state.step:
            metrics |= checkpoints.begin(state)
        self.record.step(state.step, self.run.num_steps, metrics)
        # A checkpoint of a step without its rows would be resumed without them.
        self.record.check_written()
        self._last_row = state.step
        checkpoints.commit(wait=False)

    def _save(self) -> None:
        """Saves a checkpoint of the steps done, unless it exists or checkpoints are off. Raises CannotWrite."""
        self.record.check_written()
        self.checkpoints.commit()
        if self.checkpoints.enabled and self.checkpoints.newest < self.state.step:
            self.checkpoints.begin(self.state, in_background=False)
            self.checkpoints.commit()

    def _write_model(self) -> None:
        record = self.record
        with self.watch.phase("export"), record.console.phase("writing the model"):
            self.export.write_all(record.model_directory, record.directory)
        self.has_model = True

    def _rescue_model(self) -> None:
        """Exports the model of a run that cannot continue, if there is disk space for it."""
        plan, target = self.run.inputs.plan, self.record.model_directory
        has_room = on_first_rank(self.run.backend, lambda: has_room_for_model(plan, target))
        if has_room and self.state.step and not self.has_model:
            with suppress(CannotWrite):
                self._write_model()

    def _close(self, ended: Stop | None) -> None:
        self.run.backend.health.enter("close")
        self.watch.close()
        engine, reason = self.stepper.close(), ended.reason if ended else None
        self.record.close(self.state.step, engine, reason, self.checkpoints.best)

    def _give_up_memory(self) -> None:
        for pool in self.run.backend.live_pools:
            pool.release()

    def _say_how_to_resume(self, ended: Stop) -> None:
        say, checkpoints = self.record.console.line, self.checkpoints
        done = f"{self.state.step} of {self.run.num_steps} steps done"
        say(f"  {ended.reason}: the run ends with {done}")
        if checkpoints.newest:
            say(f"  saved: {folder_of(self.record.directory, checkpoints.newest)}")
            say(f"  resume with: {checkpoints.resume_command}")
        elif checkpoints.enabled:
            say("  nothing was saved: no step was finished")
        else:
            say(
                "  nothing was saved: rl_config.save_ckpt_interval is 0, which means no checkpoints"
            )

    def _what_is_left(self) -> str:
        """Returns a clause for messages about what was saved, after a file could not be written."""
        left = self.checkpoints.safe
        where = f"the model after step {self.state.step} is in {self.record.model_directory}"
        model = [where] if self.has_model else []
        if self.checkpoints.newest:
            return "; ".join([*model, left])  # its command comes last, without a full stop
        return "; ".join([left, *model]) + "."


def _stepper_of(run: Run[TrainedRoles]) -> Stepper | SupervisedStepper:
    inputs, backend = run.inputs, run.backend
    if not inputs.plan.generates:
        return SupervisedStepper(run)
    weight = environment_weight(run.config)
    roles = cast("Run[Roles]", run).roles
    scorer = RolloutScorer(
        inputs.scorer,
        inputs.tokenizer,
        backend,
        weight,
        inputs.form,
        roles.reward_models,
        roles.enter,
    )
    conversations = make_conversations(
        run.config, inputs.tokenizer, inputs.turns, backend, roles.encode_in_rollout
    )
    return make_stepper(cast("Run[Roles]", run), scorer, conversations)
