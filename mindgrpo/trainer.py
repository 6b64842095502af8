"""Trains by GRPO, or on given answers, the same on every rank; the loop over the steps is in run/training_loop.py.

A step is defined in grpo/step.py: sync, rollout, score, reference, old log-probs, update, one call a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.backend.rank_consistency import on_first_rank
from mindgrpo.config import Config, Loaded
from mindgrpo.data.sources import Ranks
from mindgrpo.errors import UserError, counted
from mindgrpo.grpo.build import evaluation_modes, make_roles, make_stepper, make_trained_roles
from mindgrpo.grpo.evaluation import Evaluator
from mindgrpo.grpo.metrics import all_metrics
from mindgrpo.grpo.roles import Roles, TrainedRoles
from mindgrpo.grpo.scoring import CompletionForm, RolloutScorer
from mindgrpo.grpo.settings import learning_rate_schedule
from mindgrpo.grpo.supervised import SupervisedStepper, held_out_loss, supervised_metrics
from mindgrpo.rollout.engine import Capabilities
from mindgrpo.rollout.environment import environment_weight
from mindgrpo.rollout.turns import make_conversations, turn_metrics
from mindgrpo.run.guards import RewardGuard
from mindgrpo.run.preflight import Inputs, Reward, prepare, prepare_supervised
from mindgrpo.run.training_loop import TrainingLoop
from mindgrpo.run.trl_arguments import Rows, refuse, with_arguments
from mindgrpo.run.trl_config import GRPOConfig


class GRPOTrainer(TrainingLoop):
    """Trains as `config` says, on every rank that msrun started, or alone.

    `reward_functions` (callables, built-in names, module:function or file.py:function) replace
    those of reward_config, each with weight 1.0 unless `reward_weights`, `args` or a `reward_config.verifier_weight`
    without functions beside it says. `name` names the output folder. Raises UserError for whatever the configuration
    gets wrong.

    In TRL's form: `model` (a Hugging Face directory, or a name on a hub), `reward_funcs` (one or several) and
    `train_dataset` and `eval_dataset` (rows such as {"prompt": ..., "answer": ...}, a path, or a name on a hub) take
    the place of the configuration's, as does `environment` (a class or function of a module, or text as in
    `rl_config.environment`), and `config` is a mapping of its sections, or left out. `args` (a GRPOConfig) and
    `peft_config` (PEFT's LoraConfig, or a mapping with its names) win over `config`. `reward_funcs` get what TRL
    passes: lists of messages for rows whose prompt is one, unless reward_config.completions says otherwise. `others`,
    such as `processing_class`, are refused with the key to use.
    """

    roles: Roles

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
        environment: str | Sequence[str] | Callable[..., Any] | None = None,
        args: GRPOConfig | None = None,
        peft_config: object = None,
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
        self._rewards = reward_functions, reward_weights
        # Functions that are given by TRL's name get what TRL passes.
        self._form: CompletionForm = "text" if reward_funcs is None else "as_prompts"
        super().__init__(
            with_arguments(
                config,
                model,
                train_dataset,
                eval_dataset,
                environment=environment,
                args=args,
                peft_config=peft_config,
                has_rewards=reward_functions is not None,
            ),
            name,
        )

    def _prepare(self, config: Config, world_size: int, ranks: Ranks, scores: bool) -> Inputs:
        return prepare(config, world_size, *self._rewards, ranks, scores, self._form)

    def _make_roles(self, restored: tuple[str, ...]) -> Roles:
        run = self.run
        return make_roles(run.plan, run.backend, run.inputs.sampling, restored=restored)

    def _open(self, config: Config | Loaded) -> None:
        super()._open(config)
        run = self.run
        inputs, backend = run.inputs, run.backend
        weight = environment_weight(run.config)
        self.scorer = RolloutScorer(inputs.scorer, inputs.tokenizer, backend, weight, inputs.form)
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
            self.session.carried,
        )
        self.evaluator = Evaluator(self.stepper.replicas, self.scorer, run.config.rl_config.seed)
        on_first_rank(backend, inputs.check_rewards)
        self.reward_guard = RewardGuard(run.config.reward_config.max_failed_steps, run.num_steps)

    def _close_workers(self) -> Capabilities:
        self.scorer.close()
        if self.conversations is not None:
            self.conversations.close()
        engine = self.roles.engine.capabilities
        self.roles.engine.close()
        return engine

    def _step(self, step: int) -> dict[str, Any]:
        """Runs step number `step`, from 0, and returns its metrics."""
        run, outcome = self.run, self.stepper.run(step)
        self.carried = self.stepper.carried
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
        shown = run.record.console.phase(
            f"evaluating on {counted(len(prompts), 'held-out prompt')}"
        )
        with shown, run.watch.phase("evaluate"):
            self.roles.refresh_engine()
            version = self.roles.enter_rollout()
            modes = evaluation_modes(run.config, run.inputs.sampling)
            outcomes = self.evaluator.run(prompts, modes, step, version, run.stopping.check)
        run.stopping.check()
        self.session.checkpoints.evaluated(step, outcomes[0].means)
        return run.record.evaluated(step, outcomes)


class SFTTrainer(TrainingLoop):
    """Trains as `config` says, on every rank that msrun started, or alone; `train()` returns the run's folder.

    A step is one update by `rl_config.prompts_per_step` rows. `name` names the output folder. `model`, `train_dataset`
    and `eval_dataset` are as for GRPOTrainer; rows are those of `mindgrpo/data/supervised.py`. Raises UserError for
    whatever the configuration gets wrong.
    """

    def __init__(
        self,
        config: Config | Loaded | Mapping[str, Any] | None = None,
        name: str = "run",
        *,
        model: str | Path | None = None,
        train_dataset: str | Path | Rows | None = None,
        eval_dataset: str | Path | Rows | None = None,
        **others: object,
    ) -> None:
        refuse("SFTTrainer", others)
        super().__init__(
            with_arguments(config, model, train_dataset, eval_dataset, is_supervised=True), name
        )

    def _prepare(self, config: Config, world_size: int, ranks: Ranks, scores: bool) -> Inputs:
        return prepare_supervised(config, world_size, ranks)

    def _make_roles(self, restored: tuple[str, ...]) -> TrainedRoles:
        run = self.run
        return make_trained_roles(run.plan, run.backend, run.inputs.sampling, restored=restored)

    def _open(self, config: Config | Loaded) -> None:
        super()._open(config)
        run = self.run
        learning_rate = learning_rate_schedule(run.config, run.num_updates)
        self.stepper = SupervisedStepper(
            self.roles, run.prompts, learning_rate, run.watch.step_phase
        )

    def _step(self, step: int) -> dict[str, Any]:
        run, outcome = self.run, self.stepper.run(step)
        run.watch.dump(outcome)
        metrics = supervised_metrics(outcome, self.roles, run.prompts.position)
        return metrics | self.nan_guard.step_done(step, outcome, self.roles.policy.version)

    def _evaluate(self, step: int) -> dict[str, Any]:
        run, held_out = self.run, self.run.inputs.held_out
        if held_out is None:
            return {}
        run.stopping.check()
        with run.watch.phase("evaluate"):
            loss = held_out_loss(self.roles, held_out[: run.config.rl_config.eval_samples])
        self.session.checkpoints.evaluated(step, {"loss": loss}, lower_is_better=True)
        return run.record.evaluated_loss(step, loss)
