"""From a work file and layouts to the roles of a run, exactly as the trainer makes them, with random weights.

Refuses to time anything, and to choose what a user would not: keys that are not set here keep their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import numpy as np
from work import Work, random_rewards

from mindgrpo.algorithm.sample import Rollout
from mindgrpo.algorithm.schedule import LRSchedule
from mindgrpo.backend.connect import RuntimeSettings, connect, keeps_slots
from mindgrpo.backend.contract import Backend
from mindgrpo.backend.dtypes import resolve_compute_dtype, resolve_matmul_precision
from mindgrpo.backend.kernels.shapes import SamplingParams
from mindgrpo.backend.targets import choose_target
from mindgrpo.config import Config
from mindgrpo.data.prompts import Prompt
from mindgrpo.grpo.build import make_roles
from mindgrpo.grpo.inputs import Inputs
from mindgrpo.grpo.roles import Roles, TrainedRoles
from mindgrpo.grpo.scoring import Scored
from mindgrpo.grpo.state import Run
from mindgrpo.grpo.step import Stepper, make_stepper
from mindgrpo.models.decoder_config import (
    DecoderConfig,
    decoder_config,
    read_config,
)
from mindgrpo.plan.run_plan import RunPlan, plan_run
from mindgrpo.rewards.scores import Scores

BETA = 0.01
MICRO_BATCH_TOKENS = 2304
RolesT = TypeVar("RolesT", bound=TrainedRoles)
AXES = ("data_parallel", "model_parallel", "pipeline_stage")


def join_ranks(
    asked: str = "highest", dtype: str = "float32", backend: str | None = None
) -> Backend | None:
    """None in msrun's scheduler, which serves the cluster until the ranks have ended.

    `asked`, `dtype` and `backend` are context.float32_matmul_precision, compute_dtype and backend.
    """
    target = choose_target("CPU", backend)
    has_kernels = keeps_slots(target)
    precision = resolve_matmul_precision(asked, target, has_kernels)
    own = resolve_compute_dtype(dtype, target, True, has_kernels, asked)
    settings = RuntimeSettings(matmul_precision=precision, compute_dtype=own)
    joined = connect(target, dict(os.environ), settings)
    return None if os.environ.get("MS_ROLE") == "MS_SCHED" else joined


@dataclass(frozen=True)
class Rows:
    """A packed row holds `samples` samples of one group, their prompt once; a micro-batch takes `count` such rows."""

    samples: int
    count: int

    @classmethod
    def of(cls, work: Work, data_parallel: int) -> Rows:
        """The largest within MICRO_BATCH_TOKENS that leave no row and no micro-batch short."""
        samples = _largest(work.generations, lambda n: row_tokens(work, n) <= MICRO_BATCH_TOKENS)
        rows = work.prompts * (work.generations // samples)
        share = rows // data_parallel if rows % data_parallel == 0 else 1
        tokens = row_tokens(work, samples)
        return cls(samples, _largest(share, lambda n: n * tokens <= MICRO_BATCH_TOKENS))


def _largest(whole: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of `whole` that fits; 1 if none does."""
    return max([n for n in range(1, whole + 1) if whole % n == 0 and fits(n)], default=1)


def row_tokens(work: Work, samples: int) -> int:
    # A sample's last token predicts nothing and takes no place, but a row must hold the longest sample whole.
    packed = work.prompt_tokens + samples * (work.new_tokens - 1)
    return max(packed, work.prompt_tokens + work.new_tokens)


def configuration(
    work: Work,
    train: Sequence[int],
    infer: Sequence[int],
    rows: Rows,
    slots: int | None = None,
    beta: float = BETA,
    directory: Path | None = None,
    dtype: str = "float32",
    rl_config: Mapping[str, Any] | None = None,
) -> Config:
    """`slots` None: all at once; weights from `directory`; `dtype` as for `join_ranks`; `rl_config` adds keys."""
    tree: dict[str, Any] = {
        "context": {"compute_dtype": dtype},
        "rl_config": {
            "prompts_per_step": work.prompts,
            "num_generations": work.generations,
            # One generation a prompt has no group to be compared with.
            "advantage_estimator": "grpo" if work.generations > 1 else "reinforce_plus_plus",
            "seq_length": row_tokens(work, rows.samples),
            "batch_size": rows.count,
            "beta": beta,
            **(rl_config or {}),
        },
        "actor_config": {
            "load": str(directory or ""),
            "parallel_config": dict(zip(AXES, train, strict=True)),
        },
        "ref_config": {"ref_model_batch_size": rows.count},
        "generate_config": {
            "parallel_config": dict(zip(AXES[:2], infer, strict=True)),
            "max_prompt_length": work.prompt_tokens,
            "max_num_seqs": slots,
            "sampling_config": {"max_tokens": work.new_tokens},
        },
    }
    return Config.model_validate(tree)


def plan_of(config: Config, model: DecoderConfig, world_size: int) -> RunPlan:
    return plan_run(config, model, world_size)


def model_of(work: Work, directory: Path | None = None) -> DecoderConfig:
    if directory is not None:
        return read_config(directory)
    return decoder_config(work.model, "the work file's model")


def sampling_of(plan: RunPlan, **drawing: Any) -> SamplingParams:
    """No stop ids, so completions run to their limits."""
    longest = plan.config.generate_config.sampling_config.max_tokens
    return SamplingParams(max_tokens=longest, stop_ids=(), **drawing)


def roles_of(plan: RunPlan, backend: Backend, sampling: SamplingParams | None = None) -> Roles:
    """Random weights unless the configuration names a directory."""
    sampling = sampling or sampling_of(plan)
    return make_roles(plan, backend, sampling, random_weights=not plan.config.actor_config.load)


def prompts_of(token_ids: Iterable[np.ndarray]) -> list[Any]:
    """What an engine reads of prompts."""
    return [SimpleNamespace(ids=ids, row={}) for ids in token_ids]


class RandomTask:
    """A step's prompts and rewards at random, functions of the step's number alone."""

    def __init__(self, work: Work) -> None:
        self._work, self._step = work, 0

    def begin_step(self, step: int) -> list[Any]:
        self._step = step
        return prompts_of(self._work.prompt_ids(step))

    def replace(self, groups: Sequence[int]) -> list[Any]:
        raise NotImplementedError("a bench replaces no groups")

    def owners(self, group_ids: Sequence[int]) -> list[Prompt]:
        return []

    def begin(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Callable[[], Scored]:
        scored = self.score(rollout, prompts)
        return lambda: scored

    def score(self, rollout: Rollout, prompts: Sequence[Prompt]) -> Scored:
        rewards = random_rewards(self._step, self._work.samples)
        return Scored(Scores({"random": rewards}, rewards, rewards != rewards), [])


def stepper_of(roles: Roles, work: Work, lr: float = 1e-6) -> Stepper:
    task: Any = RandomTask(work)
    return make_stepper(run_of(roles, task, sampling_of(roles.plan), lr), task)


def run_of(roles: RolesT, task: Any, sampling: SamplingParams, lr: float) -> Run[RolesT]:
    """What a stepper reads of a run whose prompts are those of `task`."""
    plan, inputs = roles.plan, SimpleNamespace(plan=roles.plan, sampling=sampling, turns=None)
    schedule = LRSchedule(lr_decay_style="constant", lr=lr)
    actor = plan.config.actor_config.model_copy(update={"lr_schedule": schedule})
    config = plan.config.model_copy(update={"actor_config": actor})
    return Run(config, roles.backend, cast("Inputs", inputs), roles, task, 1)
