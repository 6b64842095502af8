"""From a work file and layouts to the roles of a run, exactly as the trainer makes them, with random weights.

Refuses to time anything, and to choose what a user would not: keys that are not set here keep their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from work import Work

from mindgrpo.backend import Backend, connect
from mindgrpo.config import Config
from mindgrpo.generate.settings import SamplingSettings
from mindgrpo.model.families import DecoderConfig, decoder_config, read_config
from mindgrpo.roles import Roles
from mindgrpo.run_plan import RunPlan, plan_run

BETA = 0.01
MICRO_BATCH_TOKENS = 2048
AXES = ("data_parallel", "model_parallel", "pipeline_stage")


def join_ranks() -> Backend | None:
    """None in msrun's scheduler, which serves the cluster until the ranks have ended."""
    backend = connect(None, None, dict(os.environ))
    return None if os.environ.get("MS_ROLE") == "MS_SCHED" else backend


def configuration(
    work: Work,
    train: Sequence[int],
    infer: Sequence[int],
    row_samples: int,
    micro_rows: int | None = None,
    slots: int | None = None,
    beta: float = BETA,
    directory: Path | None = None,
) -> Config:
    """`row_samples` samples fill a row to its end; `slots` None: all samples at once; weights from `directory`."""
    longest = work.prompt_tokens + work.new_tokens
    row = longest * row_samples
    rows = micro_rows or rows_at_once(-(-work.samples // (row_samples * train[0])), row)
    tree: dict[str, Any] = {
        "rl_config": {
            "prompts_per_step": work.prompts,
            "num_generations": work.generations,
            "seq_length": row,
            "batch_size": rows,
            "beta": beta,
        },
        "actor_config": {
            "load": str(directory or ""),
            "parallel_config": dict(zip(AXES, train, strict=True)),
        },
        "ref_config": {"ref_model_batch_size": rows},
        "generate_config": {
            "parallel_config": dict(zip(AXES[:2], infer, strict=True)),
            "max_prompt_length": work.prompt_tokens,
            "max_num_seqs": slots,
            "sampling_config": {"max_tokens": work.new_tokens},
        },
    }
    return Config.model_validate(tree)


def rows_at_once(rows: int, row_tokens: int) -> int:
    """The largest share of `rows` within the tokens of a micro-batch that leaves no micro-batch short."""
    most = max(1, MICRO_BATCH_TOKENS // row_tokens)
    return max(count for count in range(1, min(most, rows) + 1) if rows % count == 0)


def plan_of(config: Config, model: DecoderConfig, world_size: int) -> RunPlan:
    return plan_run(config, model, world_size)


def model_of(work: Work, directory: Path | None = None) -> DecoderConfig:
    if directory is not None:
        return read_config(directory)
    return decoder_config(work.model, "the work file's model")


def roles_of(plan: RunPlan, backend: Backend, **sampling: Any) -> Roles:
    """Random weights unless the configuration names a directory; no stop ids, so completions run to their limits."""
    longest = plan.config.generate_config.sampling_config.max_tokens
    settings = SamplingSettings(max_tokens=longest, stop_ids=(), **sampling)
    return Roles(plan, backend, settings, random_weights=not plan.config.actor_config.load)
