"""Defines the public classes: GRPOTrainer and SFTTrainer, which read arguments; run/train.py is what they do."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mindgrpo.config import Config, Loaded, config_with
from mindgrpo.errors import UserError, counted, is_interactive, writing
from mindgrpo.grpo.scoring import CompletionForm
from mindgrpo.report.inline import ReportFrame
from mindgrpo.report.write import FILE_NAME, write_at_end
from mindgrpo.run.preflight import Reward
from mindgrpo.run.train import Rewards, TrainingLoop
from mindgrpo.run.trl_arguments import Rows, refuse, split_models, with_arguments
from mindgrpo.run.trl_config import GRPOConfig


class Trainer(TrainingLoop):
    """What users call of both trainers."""

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
                self.watch.close()
                self.stepper.close()
                self._give_up_memory()
            raise
        finally:
            self._is_over = True
            self.run.backend.health.end_checks()
            self.record.console.end_live()
            # Tells them that the run has failed, unless it was closed.
            self.record.trackers.ask_to_finish(is_done=False)
        # The other ranks have ended: none of them waits.
        self.record.trackers.close(self.run.config.monitor_config.tracker_finish_seconds)
        return directory

    @property
    def is_finished(self) -> bool:
        """Tells whether `train` has run all steps and written the model, so that nothing is left to continue."""
        return self.state.step >= self.run.num_steps and self.has_model

    def report(self) -> ReportFrame:
        """Writes the run's page, with the steps that are done; a notebook shows what is returned. Raises UserError."""
        directory = self.record.directory
        if self.run.backend.rank == 0:
            _, why = write_at_end(directory)
            if why is not None:
                raise UserError(why)
        return ReportFrame(directory / FILE_NAME)

    def _reopen(self) -> None:
        directory, num_steps = self.record.directory, self.run.num_steps
        if self.is_finished:
            raise UserError(
                f"train() has run the {counted(num_steps, 'step')} of {directory}; make another trainer, with "
                f"actor_config.load {self.record.model_directory} to train this model further."
            )
        if not self.checkpoints.newest:
            raise UserError(
                f"train() has ended after {self.state.step} of {num_steps} steps of {directory} without a "
                "checkpoint to continue from; make another trainer, with rl_config.save_ckpt_interval to have one."
            )
        keys = {"rl_config.resume_training": True, "output_dir": str(directory)}
        self._open(config_with(self._config, keys))

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
        written = self.record.model_directory
        if not self.has_model:
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


class GRPOTrainer(Trainer):
    """Trains as `config` says, on every rank that msrun started, or alone.

    `reward_functions` (callables, built-in names, module:function, file.py:function, or a sequence classifier's folder
    or name on a hub) replace those of reward_config, each with weight 1.0 unless `reward_weights`, `args` or a
    `reward_config.verifier_weight` without functions beside it says. `name` names the output folder. Raises UserError
    for whatever the configuration gets wrong.

    In TRL's form: `model` (a Hugging Face directory, or a name on a hub), `reward_funcs` (one or several) and
    `train_dataset` and `eval_dataset` (rows such as {"prompt": ..., "answer": ...}, a path, or a name on a hub) take
    the place of the configuration's, as does `environment` (a class or function of a module, or text as in
    `rl_config.environment`), and `config` is a mapping of its sections, or left out. `args` (a GRPOConfig) and
    `peft_config` (PEFT's LoraConfig, or a mapping with its names) win over `config`. `reward_funcs` get what TRL
    passes: lists of messages for rows whose prompt is one, unless reward_config.completions says otherwise. `others`,
    such as `processing_class`, are refused with the key to use.
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
        # Functions that are given by TRL's name get what TRL passes.
        form: CompletionForm = "text" if reward_funcs is None else "as_prompts"
        weights, models = reward_weights, dict[int, str]()
        if reward_functions is not None:
            reward_functions, models = split_models(reward_functions)
        if models and weights is not None:
            weights = [weight for i, weight in enumerate(weights) if i not in models]
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
                models=models,
                reward_weights=reward_weights,
            ),
            name,
            Rewards(reward_functions, weights, form),
        )


class SFTTrainer(Trainer):
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
            with_arguments(config, model, train_dataset, eval_dataset, is_supervised=True),
            name,
            Rewards(),
        )
