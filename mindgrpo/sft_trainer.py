"""Trains a model on given answers, the same on every rank: the warm start of a run of GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindgrpo.config import Config, Loaded
from mindgrpo.data.sources import Ranks
from mindgrpo.grpo.build import make_trained_roles
from mindgrpo.grpo.settings import learning_rate_schedule
from mindgrpo.grpo.supervised import SupervisedStepper, held_out_loss, supervised_metrics
from mindgrpo.run.checkpoints import restored_roles
from mindgrpo.run.preflight import Inputs, prepare_supervised
from mindgrpo.run.session import open_run
from mindgrpo.run.training_loop import TrainingLoop
from mindgrpo.run.trl_arguments import Rows, refuse, with_arguments


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
        loaded = with_arguments(config, model, train_dataset, eval_dataset, is_supervised=True)

        def read(config: Config, world_size: int, ranks: Ranks, _: bool) -> Inputs:
            return prepare_supervised(config, world_size, ranks)

        run = open_run(loaded, name, read)
        with run.watch.phase("load"):
            restored = restored_roles(run.config, run.start)
            with run.record.console.phase("loading weights"):
                self.roles = make_trained_roles(
                    run.plan, run.backend, run.inputs.sampling, restored=restored
                )
            super().__init__(run, self.roles)
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
