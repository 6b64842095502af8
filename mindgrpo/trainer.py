"""The loop: rollout, score, reference, old log-probs, update, one call a phase, the same on every rank.

Refuses tensor maths and device questions; those are in the rooms that it calls.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mindgrpo.algorithm.schedule import learning_rate
from mindgrpo.algorithm.types import Samples
from mindgrpo.backend.connect import connect
from mindgrpo.config import Config, Loaded, schedule_notes
from mindgrpo.config.schema import LIVE
from mindgrpo.data.cursor import Cursor
from mindgrpo.data.prompts import Prompt, PromptSet
from mindgrpo.data.sources import Ranks
from mindgrpo.data.tokenizer_files import write_tokenizer
from mindgrpo.grpo.evaluation import Evaluator, modes_of
from mindgrpo.grpo.hf_export import export_adapters, export_policy
from mindgrpo.grpo.metrics import figures_of, resources
from mindgrpo.grpo.roles import Roles
from mindgrpo.grpo.rollout import check_rewards, score
from mindgrpo.grpo.step import StepOutcome, Stepper
from mindgrpo.monitor.host_memory import HostMemoryExhausted
from mindgrpo.run.nan_guard import SkippedUpdates
from mindgrpo.run.preflight import Reward, prepare, runtime_settings
from mindgrpo.run.recorder import RunRecord
from mindgrpo.run.resume import on_first_rank, restored_roles
from mindgrpo.run.same_start import check_same_start
from mindgrpo.run.session import Session
from mindgrpo.run.start import find_start
from mindgrpo.run.stop_signals import Stop, Stopping
from mindgrpo.run.watch import Watch


class GRPOTrainer:
    """Trains as `config` says, on every rank that msrun started, or alone.

    `reward_functions` (callables, built-in names, module:function or file.py:function) replace
    those of reward_config, each with weight 1.0 unless `reward_weights` says. `name` names the
    output folder. Raises UserError for whatever the configuration gets wrong.
    """

    def __init__(
        self,
        config: Config | Loaded,
        reward_functions: Sequence[Reward] | None = None,
        name: str = "run",
        reward_weights: Sequence[float] | None = None,
    ) -> None:
        loaded = config
        if not isinstance(loaded, Loaded):
            loaded = Loaded(loaded, dict.fromkeys(LIVE, "given in code"), [])
        self.config = loaded.config
        self._started = float(os.environ.get("MINDGRPO_LAUNCHED_AT", time.time()))
        context = self.config.context
        self.backend = connect(
            context.device_target,
            context.transport,
            dict(os.environ),
            runtime_settings(self.config),
        )
        check_same_start(self.config, self.backend)
        self.inputs = prepare(
            self.config,
            self.backend.world_size,
            reward_functions,
            reward_weights,
            Ranks(self.backend.rank, self.backend.world_size, self.backend.world.gather_objects),
            scores=self.backend.rank == 0,
        )
        self.plan = self.inputs.plan
        self.cursor = Cursor(self.inputs.prompts, self.config.rl_config.seed)
        start = on_first_rank(self.backend, lambda: find_start(self.config, self.inputs, name))
        self.record = RunRecord(loaded, name, self.plan, self.backend, self._started, start)
        self.num_steps = self._num_steps()
        self.watch = Watch(self.config, self.backend, self.record)
        updates = self.num_steps * self.plan.batch.updates_per_step
        notes = [*self.inputs.notes, *schedule_notes(self.config, updates)]
        notes += [*self.backend.unmet, *self.watch.notes, *(start.notes if start else [])]
        self.record.banner(self.num_steps, self.inputs, notes)
        with self.watch.phase("load"):
            restored = restored_roles(self.config, start)
            with self.record.console.phase("loading weights"):
                self.roles = Roles(self.plan, self.backend, self.inputs.sampling, restored=restored)
            self.session = Session(
                self.inputs,
                self.roles,
                self.record,
                self.cursor,
                start,
                Stopping(self.backend, self._started, self.config.rl_config.max_seconds),
                self.num_steps,
                self.watch.phase,
            )
        self._evaluator = self._make_evaluator()
        check_rewards(self.inputs.check_rewards, self.backend)
        self.skipped = self._make_skipped()
        self._stepper = Stepper(self.roles, self._learning_rate, self._phase)

    def _make_skipped(self) -> SkippedUpdates:
        record = self.record
        return SkippedUpdates(
            self.config, self.backend, record.directory, record.console.line, self._write_weights
        )

    def _make_evaluator(self) -> Evaluator:
        return Evaluator(
            self.roles.generator,
            self.plan.infer,
            self.backend,
            self.inputs.scorer,
            self.inputs.tokenizer,
            self.config.rl_config.seed,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        # Once the weights have begun to change, the step is finished.
        if name != "sync_reference":
            self.session.stopping.check()
        with self.watch.phase(name):
            yield

    def _num_steps(self) -> int:
        rl = self.config.rl_config
        per_epoch = -(-len(self.inputs.prompts) // self.plan.batch.prompts_per_step)
        return min(rl.max_steps or per_epoch * rl.epochs, per_epoch * rl.epochs)

    def train(self) -> Path:
        """Runs to the end and writes the model; the run's folder.

        Raises SystemExit after a signal, with a checkpoint of the steps that are done where they were asked for.
        """
        session, ended = self.session, None
        with session.stopping.listening():
            try:
                self._run_steps()
                session.checkpoints.commit()
                if not session.has_model:
                    self._write_model()
            except Stop as stop:
                ended = stop
                session.save()
        self.backend.presence.now("close")
        self.watch.close()
        if self.inputs.scorer is not None:
            self.inputs.scorer.close()
        self.record.close(session.done, ended.reason if ended else None)
        if ended is not None:
            session.tell_how_to_go_on(ended)
        self.backend.close()
        if ended is not None and ended.status:
            raise SystemExit(ended.status)
        return self.record.directory

    def _run_steps(self) -> None:
        session, every = self.session, self.config.rl_config.eval_steps
        self.backend.presence.now("loop")
        if session.open_row is not None:
            session.write_row(self._evaluate(session.done))
        elif session.done == 0 and self.config.rl_config.eval_on_start:
            self._evaluate(0)
        elif session.done == 0:
            self.record.not_evaluated()
        for step in range(session.done, self.num_steps):
            with self.watch.step(step):
                session.step_done(self._step(step))
                evaluation = {}
                if step + 1 == self.num_steps or (every and (step + 1) % every == 0):
                    evaluation = self._evaluate(step + 1)
            session.write_row(evaluation)
            exceeded = self.watch.memory_exceeded()
            if exceeded:
                session.save()
                self._write_model()
                raise HostMemoryExhausted(f"the run ends after step {step + 1}: {exceeded}")
            if step + 1 < self.num_steps:
                session.stopping.check_time()

    def _write_model(self) -> None:
        self.roles.enter("old_logps")
        with self.watch.phase("export"), self.record.console.phase("writing the model"):
            self._write_weights(self.record.model_directory)
            adapters = self.roles.policy.adapters
            if adapters is not None:
                folder = self.record.directory / "adapter"
                export_adapters(
                    adapters,
                    self.backend,
                    self.config.actor_config.load,
                    folder,
                    self.roles.residency,
                )

    def _write_weights(self, target: Path) -> None:
        policy, source = self.roles.policy, self.config.actor_config.load
        memory = self.roles.residency
        export_policy(policy.weights, self.backend, source, target, memory, policy.adapters)
        if self.backend.rank == 0:
            named = self.config.rl_config.chat_template is not None
            write_tokenizer(self.inputs.tokenizer, target, named)

    def _step(self, step: int) -> dict[str, Any]:
        prompts = self.cursor.take(self.plan.batch.prompts_per_step)

        def owners(samples: Samples) -> list[Prompt]:
            return [prompts[group] for group in samples.groups]

        def further(groups: Sequence[int]) -> list[np.ndarray]:
            fresh = self.cursor.take(len(groups))
            for group, prompt in zip(groups, fresh, strict=True):
                prompts[group] = prompt
            return [prompt.ids for prompt in fresh]

        outcome = self._stepper.run(
            step,
            [prompt.ids for prompt in prompts],
            lambda samples: score(
                self.inputs.scorer, self.inputs.tokenizer, self.backend, owners(samples), samples
            ),
            further,
        )
        self.watch.dump(outcome)
        self.record.rewards(f"step {step + 1}", outcome.scored.scores)
        self.record.completions(step + 1, owners(outcome.samples), outcome.samples, outcome.scored)
        return self._figures(step, outcome)

    def _learning_rate(self, index: int) -> float:
        schedule = self.config.actor_config.lr_schedule
        run = self.num_steps * self.plan.batch.updates_per_step
        warmup = schedule.warmup_step
        if schedule.warmup_ratio is not None:
            warmup = round(schedule.warmup_ratio * run)
        return learning_rate(
            index,
            schedule.lr_decay_style,
            schedule.lr,
            schedule.min_lr,
            warmup,
            schedule.decay_steps or run,
        )

    def _figures(self, step: int, outcome: StepOutcome) -> dict[str, Any]:
        rl, policy = self.config.rl_config, self.roles.policy
        figures = figures_of(
            outcome, rl.num_generations, rl.logprob_gap_limit, self.cursor.position
        )
        figures["weights_version"] = policy.version
        figures |= resources(outcome, self.roles)
        updates = self.plan.batch.updates_per_step
        return figures | self.skipped.step_done(step, outcome, updates, policy.version)

    def _evaluate(self, step: int) -> dict[str, Any]:
        held_out: PromptSet | None = self.inputs.held_out
        if held_out is None:
            return {}
        check = self.session.stopping.check
        check()
        prompts = held_out[: self.config.rl_config.eval_samples]
        told = self.record.console.phase(f"evaluating on {len(prompts)} held-out prompts")
        with told, self.watch.phase("evaluate"):
            self.roles.refresh_generator()
            self.roles.enter("rollout")
            self.roles.check_generator()
            version = self.roles.policy.version
            modes = modes_of(self.config, self.inputs.sampling)
            outcomes = self._evaluator.run(prompts, modes, step, version, check)
        check()
        self.session.checkpoints.evaluated(step, outcomes[0].means)
        return self.record.evaluated(step, outcomes)
